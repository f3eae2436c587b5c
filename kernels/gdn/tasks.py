"""The lists that Gated DeltaNet's kernels walk: built on the host once a step, and bounds on their lengths. No torch; launches nothing.

A row of one token is a *single*; it is a *commit* too when its token fills a chunk. Every other row is *long*: its tokens lie in chunks of 64 from
absolute position 0, a *task* each. Padding rows (slot -1) are in no list. All entries are int32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CHUNK = 64
Ints = npt.NDArray[np.integer]

# Columns of each list.
TASK = ("token", "slot", "begin", "end")  # token: of the chunk's row 0 in the step, negative where that row is of an earlier one; rows begin .. end are new
LONG = ("task", "token", "begin", "end", "slot", "anchor")  # its first task; token and begin as there; end: its rows from there on; anchor: position of row 0
SINGLE = ("token", "position", "slot")
COMMIT = ("slot", "position")
LISTS = {"tasks": len(TASK), "longs": len(LONG), "singles": len(SINGLE), "commits": len(COMMIT)}  # columns by list, in the order of the counts


class Counts(NamedTuple):
    """Entries of each list, as they are staged for the device: int32 in this order."""

    tasks: int
    longs: int
    singles: int
    commits: int


class Lists(NamedTuple):
    """Arrays [capacity, columns] int32."""

    tasks: npt.NDArray[np.int32]
    longs: npt.NDArray[np.int32]
    singles: npt.NDArray[np.int32]
    commits: npt.NDArray[np.int32]


def max_chunk_tasks(num_tokens: int, num_rows: int) -> int:
    """No step of so many tokens and rows has more tasks.

    A row of n tokens meets at most (n + 126) / 64 chunks (n = 2 may lie in two). At most tokens / 2 rows are long. And no task is without a token.
    """
    longs = min(num_rows, num_tokens // 2)
    return min(num_tokens, (num_tokens + (2 * CHUNK - 2) * longs) // CHUNK)


def max_long_rows(num_tokens: int, num_rows: int) -> int:
    """A long row has two tokens or more."""
    return min(num_rows, num_tokens // 2)


def plan_lists(starts: Ints, lengths: Ints, slots: Ints, out: Lists) -> Counts:
    """Writes the lists of a step and returns how long they are.

    starts   [R] position of each row's first token
    lengths  [R] its tokens; rows of none are in no list
    slots    [R] its state slot, -1 for a padding row, whose tokens count in the step all the same

    Long rows are listed by falling number of chunks: the last to run are short. Raises ValueError, and leaves `out` as it is, where an array is too short.
    """
    starts, lengths, slots = (np.asarray(x, np.int64) for x in (starts, lengths, slots))
    tokens = np.cumsum(lengths) - lengths  # each row's first token in the step
    single = np.flatnonzero((slots >= 0) & (lengths == 1))
    commit = single[starts[single] % CHUNK == CHUNK - 1]
    long = np.flatnonzero((slots >= 0) & (lengths > 1))
    begin = starts[long] % CHUNK
    chunks = (begin + lengths[long] - 1) // CHUNK + 1
    order = np.argsort(-chunks, kind="stable")
    long, begin, chunks = long[order], begin[order], chunks[order]
    end, anchor, first = begin + lengths[long], starts[long] - begin, np.cumsum(chunks) - chunks
    at = np.repeat(np.arange(len(long)), chunks)  # the long row of each task
    chunk = np.arange(len(at)) - first[at]
    counts = Counts(len(at), len(long), len(single), len(commit))
    for name, number, array in zip(LISTS, counts, out, strict=True):
        if number > len(array):
            raise ValueError(f"gdn_{name}: {number} entries in a list of {len(array)}")
    columns = (
        (tokens[long][at] - begin[at] + CHUNK * chunk, slots[long][at], np.where(chunk == 0, begin[at], 0), np.minimum(CHUNK, end[at] - CHUNK * chunk)),
        (first, tokens[long] - begin, begin, end, slots[long], anchor),
        (tokens[single], starts[single], slots[single]),
        (slots[commit], starts[commit]),
    )
    for number, array, values in zip(counts, out, columns, strict=True):
        for i, value in enumerate(values):
            array[:number, i] = value
    return counts
