"""Tests of the command line, in process: each command's work, each way it fails, and that every printed example runs."""
