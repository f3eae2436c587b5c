"""Tests of everything that decides: pages, prefix cache, scheduler, loop. Driven by the ghost executor, which has no tensors."""
