"""Profiles of hypothesis for all tests: `--hypothesis-profile=soak` runs each property as many times more as tests/budget.py says. No fixtures."""

from hypothesis import settings

settings.register_profile("soak", deadline=None, database=None, print_blob=True)
