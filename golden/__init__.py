"""Golden models and logits: small trained checkpoints, what HF transformers computes from them, and the comparison. Not an engine."""

from pathlib import Path

BUNDLED = Path(__file__).resolve().parent / "qwen3"
"""Directory of the bundled model, a checkpoint in Hugging Face format."""

MICRO = Path(__file__).resolve().parent / "micro"
"""Directory of the smallest model (vocabulary of 256 bytes), for tests that run many steps."""
