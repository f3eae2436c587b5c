"""RMS norm of each head, times silu of a gate: what a Gated DeltaNet layer does with its output before the last projection."""
