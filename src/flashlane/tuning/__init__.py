"""Stored timings and the search for the fastest configuration."""
