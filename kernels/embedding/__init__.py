"""Embedding: token ids to rows of the embedding matrix."""
