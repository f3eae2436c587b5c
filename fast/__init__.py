"""The Triton executor's place; its interface is settled in `twinfer.executor`, its code comes with the fast-engine work."""
