"""What a request says about itself, and how it travels to the scheduler."""
