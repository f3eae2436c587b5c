"""How many CPU threads torch may use for a model, and why. It decides and sets; --threads is stated in options.py."""

from __future__ import annotations

import os
from collections.abc import Mapping

from twinfer.serve.failure import BadInput

# Below so many parameters a step's products are so short that threads mostly wait for one another. Decode of random Qwen3 weights in bfloat16 on 2
# cores of an EPYC, torch 2.13, tokens/s with 1 thread against 2: alone 240 / 142 at 2 M parameters, 117 / 142 at 6 M, 59 / 77 at 18 M; two commands
# at once, each, 87 / 50, 96 / 34 and 60 / 2 (cores that wait in a barrier take the time of those that they wait for).
# The machine was shared, and repeats beside busy neighbours scatter: 6 M gave 56 / 123, 55 / 9 and 103 / 14, 18 M gave 50 / 28 and 41 / 7, 2 M in
# float32 187 / 247. What one thread may lose is a factor of about 2; what two may lose is a factor of up to 30.
SMALL_MODEL = 10_000_000
# Whoever sets one of these has decided: torch reads them, so its own default is theirs.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_threads(threads: int | None) -> None:
    """Raises BadInput for a number of threads that this machine can't run side by side."""
    most = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= most:
        raise BadInput(f"threads = {threads}: must be an integer from 1 to {most}, the CPUs of this machine")


def threads_for(num_parameters: int, threads: int | None, environ: Mapping[str, str]) -> int | None:
    """The number of threads to set; None leaves torch its own."""
    if threads is not None:
        return threads
    if num_parameters < SMALL_MODEL and not any(environ.get(name) for name in VARIABLES):
        return 1
    return None


def set_threads(num_parameters: int, threads: int | None) -> int:
    """Sets torch's threads for a model of so many parameters, for the rest of the process, and says how many there are now."""
    import torch

    wanted = threads_for(num_parameters, threads, os.environ)
    if wanted is not None:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()
