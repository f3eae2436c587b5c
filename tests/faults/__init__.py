"""Tests that every gate can fail: the catalogue's faults are switched on one by one, and the gates that it names must turn red."""
