"""Tests of the operations, one by one."""
