"""Runs in the HTTP process: checks and stamps requests, and serves Canopy's own routes."""
