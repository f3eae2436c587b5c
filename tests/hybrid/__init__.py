"""Tests of the hybrid and mixture-of-experts model types: configs, checkpoints, arithmetic. Needs transformers; fetches nothing."""
