"""The page at ``/canopy/ui``: what a server's cache holds and does, in a browser."""
