"""Launches: what a step's kernels are launched with beside the number of tokens. Sizes only, so that a step can be captured; the lists are on the device."""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.kernels.attention.tiles import Tile


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One launch of attention over the task list of that name (buffers.TASK_LISTS); `num_programs` of each kv head walk it."""

    tasks: str
    tile: Tile
    num_programs: int


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one step, or of every step of one shape."""

    attention: tuple[AttentionLaunch, ...]
