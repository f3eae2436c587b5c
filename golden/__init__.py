"""Golden models and logits: small trained checkpoints, what HF transformers computes from them, and the comparison. Not an engine."""
