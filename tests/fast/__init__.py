"""Tests of the fast engine as a whole, in Triton's interpreter where there is no GPU: against the reference, its buffers, its errors, law 2."""
