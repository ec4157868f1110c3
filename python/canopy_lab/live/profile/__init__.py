"""Measure the step costs of a live server over HTTP, as input for the simulator."""
