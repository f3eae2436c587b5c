"""Every decision: reading checkpoints, scheduling, pages, prefix cache, the loop. Holds no tensors and computes no model."""
