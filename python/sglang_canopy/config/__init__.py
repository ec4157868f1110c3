"""What a server is configured with: options, their checks, and the plan file."""
