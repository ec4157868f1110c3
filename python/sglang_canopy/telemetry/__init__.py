"""Telemetry of a server: counters, status, metrics and the page."""
