"""Which schedule a launch of paged attention takes, and what the SPREAD launches of a server may need at most. Both give the same bits: speed only."""

from __future__ import annotations

import numpy as np

from twinfer.invariants import symbols
from twinfer.invariants.symbols import ENOUGH_PROGRAMS
from twinfer.kernels.attention.tasks import Ints, count_tasks
from twinfer.limits import ceil_div

# SERIAL runs K programs a tile. Measured on an H200 (bench/probes/RESULTS.md, K = 8, contexts of 1024): SPREAD is faster at 8 rows, SERIAL from 16 on.
# The number is ENOUGH_PROGRAMS, which stands where it sizes the workspace.
# Blocks of the SPREAD tile for d 128 in bf16 that one multiprocessor holds, by its 70 KiB of shared memory and 166 registers. Not timed.
RESIDENT = 3


def spread_rows(max_batch: int, num_kv_heads: int, page_size: int, decode_tokens: int, tile_tokens: int) -> int:
    """Launches of up to so many rows of at most decode_tokens tokens each (1, or 1 + speculative_tokens) are SPREAD, larger ones SERIAL.

    The rule stands in `invariants`, where the auditor counts by it what a step lists. tile_tokens: of the SPREAD tile.
    """
    return symbols.spread_rows(max_batch, num_kv_heads, page_size, ceil_div(decode_tokens, tile_tokens))


def spread(
    lengths: Ints,
    contexts: Ints,
    num_kv_heads: int,
    page_size: int,
    decode_tokens: int,
    tile_tokens: int,
    max_tasks: int,
    max_places: int,
) -> bool:
    """Whether a launch over these rows is SPREAD. A graph is captured for rows of decode_tokens, with `spread_rows` alone; contexts are not known then.

    Few tiles, whatever their tokens, leave the device idle in SERIAL: a short chunk behind a long prefix is SPREAD as well, if its tasks and partials fit
    into what decode rows need: max_tasks and max_places, from tasks.py with spread_rows() rows of decode_tokens. So SPREAD's partials are bounded by
    decode_tokens (keys of its rows / 256 + rows) places, its rows being few or the pages small.
    """
    rows, longest = int(np.count_nonzero(lengths)), int(np.max(lengths, initial=0))
    if longest <= decode_tokens:
        return 0 < rows <= spread_rows(rows, num_kv_heads, page_size, decode_tokens, tile_tokens)
    if int((-(-lengths // tile_tokens)).sum()) * num_kv_heads >= ENOUGH_PROGRAMS:
        return False
    tasks, places = count_tasks(lengths, contexts, tile_tokens, True)
    return tasks <= max_tasks and places <= max_places


def num_programs(max_tasks: int, num_kv_heads: int, multiprocessors: int, is_spread: bool) -> int:
    """Programs of a kv head for a launch whose number of tasks is not known when it is captured.

    SERIAL: one a task, its tasks are as many as the rows' tiles and of unequal length. SPREAD: as many as run at once; their tasks are of one length, and
    there may be far fewer of them than the bound says.
    """
    return max(1, min(max_tasks, ceil_div(RESIDENT * multiprocessors, num_kv_heads)) if is_spread else max_tasks)
