"""What a live server's steps cost, measured from outside for the simulator."""
