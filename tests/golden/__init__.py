"""Tests of the golden models, their goldens, what makes them and the comparison. Not of any engine."""
