"""Says once, before any kernel runs, that the interpreter can't work here. No fixtures."""

from tests.kernels.interpreter import refuse_what_cannot_run

refuse_what_cannot_run()
