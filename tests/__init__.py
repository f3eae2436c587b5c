"""Tests of the whole tree. A package, so that tests can import their helpers."""
