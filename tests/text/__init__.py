"""Tests of text: tokenizer, streaming, stop strings and a checkpoint's generation defaults."""
