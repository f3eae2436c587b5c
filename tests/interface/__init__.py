"""Tests of the values that both engines share."""
