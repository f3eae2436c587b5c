"""Bounds, laws and the ledger: every buffer's size stated once, checked on every step. Imports no torch; engines build on it, not it on them."""
