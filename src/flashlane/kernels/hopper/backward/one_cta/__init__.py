"""Head dims up to 128: one CTA a tile, all gradients in one pass."""
