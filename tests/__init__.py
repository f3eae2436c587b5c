"""Tests of twinfer. Without a GPU, Triton kernels run in its interpreter, which has to be chosen before Triton is imported."""

import os

if os.environ.get("TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
