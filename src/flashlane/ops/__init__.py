"""The torch operators and the cache of calls."""
