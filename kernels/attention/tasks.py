"""The task list of paged attention: built on the host once a step, and bounds on its length. No torch; launches nothing.

A task is (row, first token within the row, split, first place of the tile's partials), int32. Rows are cut into tiles of `tile_tokens` tokens; a SERIAL
task walks all of a tile's keys, a SPREAD task one split of them. A tile of n tokens and s > 1 splits keeps n s places of partials.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfer.kernels.attention.tiles import SPLIT
from twinfer.limits import ceil_div

Ints = npt.NDArray[np.integer]


def _tiles(lengths: Ints, contexts: Ints, tile_tokens: int) -> tuple[npt.NDArray[np.int64], ...]:
    """By tile, rows ascending: row, first token within the row, tokens, keys that the last token sees."""
    lengths, contexts = np.asarray(lengths, np.int64), np.asarray(contexts, np.int64)
    number = -(-lengths // tile_tokens)  # tiles of each row
    row = np.repeat(np.arange(len(lengths)), number)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)) * tile_tokens
    tokens = np.minimum(tile_tokens, lengths[row] - first)
    return row, first, tokens, (contexts - lengths)[row] + first + tokens


def count_tasks(lengths: Ints, contexts: Ints, tile_tokens: int, spread: bool) -> tuple[int, int]:
    """How many tasks and places of partials `plan_tasks` will list."""
    _, _, tokens, end = _tiles(lengths, contexts, tile_tokens)
    if not spread:
        return len(end), 0
    splits = -(-end // SPLIT)
    return int(splits.sum()), int((tokens * splits)[splits > 1].sum())


def plan_tasks(lengths: Ints, contexts: Ints, tile_tokens: int, spread: bool, out: npt.NDArray[np.int32], places: int = 0) -> int:
    """Writes the tasks of a launch into out [max_tasks, 4] int32 and returns their number.

    lengths   [R] tokens of each row; a row of none has no task, so rows of another launch may be left out that way
    contexts  [R] start + length
    places    how many partials the workspace holds; SERIAL needs none

    SERIAL lists the longest tiles first: the last to run are short. The splits of a tile are neighbours in ascending order. Raises ValueError, and leaves
    `out` as it is, where `out` or the workspace is too small.
    """
    row, first, tokens, end = _tiles(lengths, contexts, tile_tokens)
    if not spread:
        if len(row) > len(out):
            raise ValueError(f"attention_tasks: {len(row)} tasks in a list of {len(out)}")
        order = np.argsort(-end, kind="stable")
        out[: len(row), 0], out[: len(row), 1] = row[order], first[order]
        out[: len(row), 2:] = 0
        return len(row)
    splits = -(-end // SPLIT)
    own = np.where(splits > 1, tokens * splits, 0)  # places of each tile
    number, used = int(splits.sum()), int(own.sum())
    if number > len(out):
        raise ValueError(f"attention_tasks: {number} tasks in a list of {len(out)}")
    if used > places:
        raise ValueError(f"attention_partials: {used} partials in a workspace of {places}")
    tile = np.repeat(np.arange(len(row)), splits)
    out[:number, 0], out[:number, 1] = row[tile], first[tile]
    out[:number, 2] = np.arange(number) - (np.cumsum(splits) - splits)[tile]
    out[:number, 3] = np.where(splits > 1, np.cumsum(own) - own, 0)[tile]
    return number


def max_tasks(max_batch: int, max_step_tokens: int, max_step_context: int, max_length: int, tile_tokens: int, spread: bool) -> int:
    """No step lists more tasks, if it has at most max_batch rows (padding rows, of one token and one key, included), max_step_tokens tokens (theirs
    included), max_step_context keys summed over its other rows, and max_length tokens in a row.

    Tiles: a row of n tokens has ceil(n / b) <= (n + b - 1) / b, so R rows have at most (T + R (b - 1)) / b; and no tile is without a token.
    Splits, by reference: a row of context c has ceil(c / 256) <= c / 256 + 1 in each of its at most ceil(max_length / b) tiles, a padding row has one. So
    R rows have at most (C / 256 + R) of them for one tile a row, rounded down as a whole since R and the padding rows' are whole.
    """
    if not spread:
        return min(max_step_tokens, (max_step_tokens + max_batch * (tile_tokens - 1)) // tile_tokens)
    return ceil_div(max_length, tile_tokens) * (max_step_context // SPLIT + max_batch)


def max_places(max_batch: int, max_step_context: int, max_length: int) -> int:
    """No SPREAD step keeps more partials, under the limits of `max_tasks`.

    The tiles of a row have its n <= max_length tokens together, each with at most ceil(c / 256) splits: n (c / 256 + 1). Padding rows keep none.
    """
    return max_length * (max_step_context // SPLIT + max_batch)
