"""The Hopper forward kernel."""
