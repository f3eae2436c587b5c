"""Random traffic over engines that compute: the same state machine drives the reference and the fast engine. The ghost's is tests/engine/test_machine.py."""
