"""Tests of the reference model and of checkpoint reading. Needs transformers; fetches nothing."""
