"""Tests of bounds, laws, ledger, auditor, memory plan and proofs, and of that each of them can fail."""
