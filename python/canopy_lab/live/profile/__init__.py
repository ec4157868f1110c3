"""Measure over HTTP what a live server's steps cost, as input for the simulator."""
