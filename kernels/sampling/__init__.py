"""Sampling: from logits to tokens and log probabilities on the device."""
