"""HTTP process: check and stamp requests, and serve Canopy's routes."""
