"""Head dims above 128: a 2-CTA cluster a tile, all gradients in one pass."""
