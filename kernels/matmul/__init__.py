"""Product of activations with a weight: one chain over K in ascending order, whatever the tile and however many rows."""
