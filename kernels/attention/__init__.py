"""Paged attention: decode, chunk, prefill and verify rows in one arithmetic."""
