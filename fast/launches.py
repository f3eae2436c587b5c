"""Launches: what a step's kernels are launched with beside the number of tokens. Sizes only, so that a step can be captured; the lists are on the device."""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.kernels.attention.tiles import Tile
from twinfer.kernels.gdn.tiles import CommitTile, LongTile, SingleTile


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One launch of attention over the task list of that name (buffers.TASK_LISTS); `num_programs` of each kv head walk it."""

    tasks: str
    tile: Tile
    num_programs: int


@dataclass(frozen=True, slots=True)
class GdnLaunch:
    """Launches of a Gated DeltaNet layer: programs for so many entries of each list, and for so many rows; entries beyond the counts have no work."""

    num_rows: int
    num_tasks: int
    num_longs: int
    num_singles: int
    num_commits: int
    long_tile: LongTile
    single_tile: SingleTile
    commit_tile: CommitTile


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one step, or of every step of one shape. gdn: None in a model without such layers."""

    attention: tuple[AttentionLaunch, ...]
    gdn: GdnLaunch | None = None
