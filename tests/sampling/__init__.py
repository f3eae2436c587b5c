"""Tests of the noise and of the reference sampler, against transformers and statistics."""
