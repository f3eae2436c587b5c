"""Tests of the reference engine as a whole: against the goldens, and against itself under every schedule."""
