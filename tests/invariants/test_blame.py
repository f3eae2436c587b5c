"""Who is at fault: the rows that a violation names are those that cause it, and nobody where no row does. Not whether it is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.auditor import Auditor
from twinfer.plan import StepPlan
from twinfer.table import TableDelta

from .plans import LIMITS, i32, plan, table


def with_bad_entry(slot: int) -> StepPlan:
    """The rows of slots 0 and 2 only; the delta lists page 99 first in the page list of `slot`, where none of them writes in this step."""
    made = plan(start=i32(4, 0, 9), length=i32(4, 3, 1), tokens=np.arange(8, dtype=np.int32), num_scored=i32(0, 0, 0), targets=i32())
    kept = TableDelta(0, i32(0, 0, 2), i32(0, 1, 0), i32(1, 2, 4), i32(0, 1, 2), i32(2, 1, 3))
    return replace(made, delta=replace(kept, entry_slot=i32(*kept.entry_slot, slot), entry_index=i32(0, 1, 0, 0), entry_page=i32(1, 2, 4, 99)))


@pytest.mark.parametrize(("slot", "rows"), [(0, (0,)), (1, (1,)), (2, (2,))])
def test_a_page_outside_the_pool_is_the_fault_of_its_slot(slot: int, rows: tuple[int, ...]) -> None:
    """Once the last row of the step was blamed, whoever's the page was: an innocent request ended with the error."""
    with pytest.raises(BoundViolation) as error:
        Auditor(LIMITS, None).audit(with_bad_entry(slot), table())
    assert (error.value.bound, error.value.demand, error.value.rows) == ("kv_keys", 100, rows)


def test_a_page_of_a_slot_without_a_row_is_no_rows_fault() -> None:
    made = with_bad_entry(1)
    alone = replace(
        made,
        **{name: getattr(made, name)[:1] for name in ("slot", "sequence", "start", "length", "num_samples", "num_scored", "state_slot")},
        scored_logprobs=made.scored_logprobs[:1],
        tokens=made.tokens[:4],
        sampling=replace(
            made.sampling,
            **{name: getattr(made.sampling, name)[:1] for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency")},
            **{name: getattr(made.sampling, name)[:1] for name in ("seed", "sample", "num_logprobs")},
            **{name: i32(0, 0) for name in ("bias_indptr", "seen_indptr")},
            **{name: i32() for name in ("bias_ids", "seen_ids", "seen_counts")},
            bias_values=np.empty(0, np.float32),
        ),
    )
    with pytest.raises(BoundViolation) as error:
        Auditor(LIMITS, None).audit(alone, table())
    assert (error.value.bound, error.value.rows) == ("kv_keys", ())


def test_entries_before_the_first_row_are_refused() -> None:
    """They would count as bias or seen tokens of the step and belong to no row, so no limit by row would hold them."""
    with pytest.raises(LawViolation, match="begin at 0"):
        Auditor(LIMITS, None).audit(plan(bias_indptr=i32(1, 1, 1, 2)), table())
