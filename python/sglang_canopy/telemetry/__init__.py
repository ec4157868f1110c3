"""Telemetry of a server: counters, status, metrics, and `canopy top`."""
