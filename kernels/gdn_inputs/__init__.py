"""What happens between a Gated DeltaNet layer's projection and its recurrence: convolution, silu, l2 norm, gates, and the convolution's history."""
