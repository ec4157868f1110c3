"""Configuration of a server: options, their checks, and the plan file."""
