"""Replay traces against a running server, and measure hits and TTFT."""
