"""Decoding: few queries over a long key/value cache, the keys split over CTAs."""
