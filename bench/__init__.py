"""Benchmarks: workloads, a load generator, floors, records, a plot, and pytest-benchmark comparisons. Not tests: no time is asserted anywhere."""
