"""Gated DeltaNet's recurrence in the open-chunk form: one arithmetic for prefill, chunk, verify and decode rows."""
