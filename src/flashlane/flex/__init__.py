"""Translates Python functions of a score or of a pair to expressions, and these to device code and block lists."""
