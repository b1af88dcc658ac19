"""Fixed sets of problems."""
