"""Tests of the load generator, records, workloads, floors and the plot. No speed is tested."""
