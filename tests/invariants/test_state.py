"""State laws over values made by hand: the right value breaks none, one number changed breaks exactly one, whose words hold the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from twinfer.errors import LawViolation
from twinfer.invariants.state import (
    STATE_LAWS,
    FailedStep,
    LoopState,
    PaddedTokens,
    PageView,
    PoolState,
    SequencesState,
    SequenceState,
    SnapshotsState,
    check,
)

from .plans import i32, plan

IDENTITY = np.array([10, 11, 12], np.int64)
# Pages 1 and 2 are listed by one sequence, 2 by another too; 3 is cached, 4 and 5 are free.
POOL = PoolState(i32(0, 1, 2, 0, 0, 0), np.array([0, 0, 1, 1, 0, 0], np.bool_), [4, 5], [3], [[1, 2], [2]])
# 9 tokens in cache on pages of 4, the first of them sealed; one more is planned and one unread.
ONE = SequenceState(7, 1, 9, 10, 11, 10, 1, 4, 6, [5, 2, 4], [True, None, None], False)
GONE = SequenceState(8, 0, 4, 5, 5, 9, 0, 0, 5, [1, 3], [None, None], True)
SEQUENCES = SequencesState(3, 4, 5, [ONE, GONE], [2], [20, 11])
# The same in a model that keeps states, in slots 2 and 0 of three.
STATEFUL = SequencesState(
    3, 4, 5, [ONE._replace(state_slot=2, state_length=10), GONE._replace(state_slot=0, state_length=5)], [2], [20, 11], 3, [1]
)
# Snapshot 0 is cached, 1 is found and about to be restored, 2 about to be saved, 3 and 4 are free.
SNAPSHOTS = SnapshotsState(
    64, i32(64, 128, 64, -1, -1), np.array([1, 1, 0, 0, 0], np.bool_), i32(0, 1, 1, 0, 0), [4, 3], [0], {b"a": 0, b"b": 1}, [1, 2], [(0, 64), (1, 128)],
    {b"a", b"b", b"c"},
)  # fmt: skip
LOOP = LoopState(1, [plan()], IDENTITY, 5, 3, 2, True, 4, 3)
FAILED = FailedStep(IDENTITY, i32(4, 5, 6), i32(4, 5, 6), IDENTITY)
VIEW = PageView(i32(0, 2, 3, 6), i32(8, 3, 10), 4)
PADDED = PaddedTokens(np.array([9, 10, 0, 0]), 2)
RIGHT: dict[str, Any] = {"LoopState": LOOP, "FailedStep": FAILED, "PaddedTokens": PADDED, "PageView": VIEW, "PoolState": POOL, "SequencesState": SEQUENCES}
RIGHT["SnapshotsState"] = SNAPSHOTS


def sequence(**changes: Any) -> SequencesState:
    return SEQUENCES._replace(sequences=[ONE._replace(**changes), GONE])


# law -> values that break it, and nothing else
BREAKERS: dict[str, tuple[Any, ...]] = {
    "references": (POOL._replace(references=i32(0, 1, 3, 0, 0, 0)), POOL._replace(page_lists=[[1, 2]])),
    "freed_once": (POOL._replace(free=[4, 5, 4]), POOL._replace(cached=[3, 3])),
    "pool_total": (POOL._replace(free=[4]), POOL._replace(cached=[])),
    "cached_sealed": (POOL._replace(sealed=np.array([0, 0, 1, 0, 0, 0], np.bool_)), POOL._replace(sealed=np.array([0, 0, 1, 1, 1, 0], np.bool_))),
    "slots": (SEQUENCES._replace(free_slots=[2, 1]), SEQUENCES._replace(free_slots=[])),
    "positions": (sequence(computed=11), sequence(known=12), sequence(planned=12), sequence(unread=0), sequence(computed=-1, sealed=[None] * 3)),
    "reserved_pages": (sequence(pages=[5, 2], sealed=[True, None]),),
    "state_pool": (
        STATEFUL._replace(free_states=[1, 2]),
        STATEFUL._replace(free_states=[]),
        STATEFUL._replace(sequences=[ONE, STATEFUL.sequences[1]], free_states=[1, 2]),
        STATEFUL._replace(sequences=[ONE._replace(state_slot=0, state_length=10), STATEFUL.sequences[1]], free_states=[1, 2]),
        SEQUENCES._replace(sequences=[ONE._replace(state_slot=0, state_length=10), GONE]),
    ),
    "state_place": (
        STATEFUL._replace(sequences=[ONE._replace(state_slot=2, state_length=9), STATEFUL.sequences[1]]),
        STATEFUL._replace(sequences=[STATEFUL.sequences[0], GONE._replace(state_slot=0, state_length=0)]),
    ),
    "peak_draw": (SEQUENCES._replace(peaks=[21, 3]),),
    "sealed_written": (sequence(sealed=[True, True, True]),),
    "sealed_content": (sequence(sealed=[False, None, None]),),
    "matched_prefix": (sequence(num_matched=8), sequence(num_matched=3), sequence(num_prompt=4), SEQUENCES._replace(hit_grid=64)),
    "snapshot_total": (SNAPSHOTS._replace(cached=[]), SNAPSHOTS._replace(free=[4, 3, 3])),
    "snapshot_pins": (SNAPSHOTS._replace(pending=[1]), SNAPSHOTS._replace(pending=[1, 1, 2]), SNAPSHOTS._replace(pending=[1, 2, 0])),
    "snapshot_keys": (SNAPSHOTS._replace(keys={b"a": 0, b"b": 1, b"c": 1}), SNAPSHOTS._replace(keys={b"b": 1})),
    "snapshot_grid": (
        SNAPSHOTS._replace(length=i32(64, 128, 63, -1, -1)),
        SNAPSHOTS._replace(length=i32(64, 128, 0, -1, -1)),
        SNAPSHOTS._replace(length=i32(64, 128, 64, 64, -1)),
        SNAPSHOTS._replace(written=np.array([1, 1, 0, 0, 1], np.bool_)),
    ),
    "snapshot_written": (SNAPSHOTS._replace(written=np.array([0, 1, 0, 0, 0], np.bool_)),),
    "snapshot_length": (SNAPSHOTS._replace(found=[(0, 64), (1, 64)]),),
    "snapshot_pages": (SNAPSHOTS._replace(sealed={b"a", b"c"}),),
    "staging_sets": (LOOP._replace(in_flight=[plan()] * 3),),
    "pending_writer": (LOOP._replace(identity=np.array([10, -1, 12], np.int64)), LOOP._replace(identity=np.array([10, 11, 13], np.int64))),
    "terminal_events": (LOOP._replace(num_told=4), LOOP._replace(num_told=2), LOOP._replace(num_accepted=6)),
    "baseline": (
        LOOP._replace(has_work=False, num_live=0, num_told=5),
        LOOP._replace(has_work=False, num_held=0, num_taken=0),
        LOOP._replace(has_work=False, num_held=0, num_taken=0, num_live=0, num_told=5, num_states=1),
        LOOP._replace(has_work=False, num_held=0, num_taken=0, num_live=0, num_told=5, num_pinned=1),
    ),
    "failed_step": (FAILED._replace(after=i32(4, 5, 7)),),
    "page_view": (VIEW._replace(page_indptr=i32(0, 3, 4, 7)), VIEW._replace(page_indptr=i32(0, 2, 3, 5)), VIEW._replace(context=i32(8, 5, 10))),
    "padding_page": (PADDED._replace(write_slots=np.array([9, 0, 0, 0])), PADDED._replace(write_slots=np.array([9, 10, 0, 9]))),
}


@pytest.mark.parametrize("name", [law.name for _, laws in STATE_LAWS for law in laws])
def test_each_law_is_broken_alone_and_told_with_numbers(name: str) -> None:
    (laws,) = (laws for _, laws in STATE_LAWS if name in {law.name for law in laws})
    if isinstance(BREAKERS[name][0], SequencesState):
        check(laws, STATEFUL)
    right = RIGHT[type(BREAKERS[name][0]).__name__]
    check(laws, right)
    for wrong in BREAKERS[name]:
        assert [each.name for each in laws if each.fault(wrong)] == [name]
        with pytest.raises(LawViolation, match=r"\d") as error:
            check(laws, wrong)
        assert error.value.law == name


def test_names_are_unique_and_each_has_a_breaker() -> None:
    names = [law.name for _, laws in STATE_LAWS for law in laws]
    assert len(set(names)) == len(names)
    assert set(names) == set(BREAKERS)


def test_what_ended_or_came_with_a_failed_step_may_have_moved() -> None:
    """The rows of the step end: their slots are free, or somebody else's by then."""
    after = i32(4, 0, 0)
    check(STATE_LAWS[1][1], FAILED._replace(after=after, identity_after=np.array([10, -1, 15], np.int64)))
    check(STATE_LAWS[0][1], LOOP._replace(in_flight=[replace(plan(), sequence=IDENTITY)], has_work=False, num_held=0, num_taken=0, num_live=0, num_told=5))
