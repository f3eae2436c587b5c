"""Row pointers are checked before anybody indexes with them: their number, where they begin and end, and that none goes back. No kernel runs.

A pointer array of one entry where rows + 1 belong made a public planner read past it (docs/known_faults.md).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.ghosts import ghost_config
from twinfer.engine.flatten import Staging, flatten
from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.ledger import Ledger

from .plans import LIMITS, VOCAB, i32, plan, table
from .test_bounds import STAGED

# The plan's own: bias 0 0 0 2, seen 0 0 0 3. Three rows, so four entries.
WRONG = {
    "one entry": (0,),
    "one too few": (0, 0, 2),
    "one too many": (0, 0, 0, 0, 2),
    "begins late": (1, 1, 1, 2),
    "ends early": (0, 0, 0, 1),
    "ends late": (0, 0, 0, 9),
    "goes back": (0, 2, 1, 2),
    "below zero": (0, -1, 0, 2),
    "none": (),
}


@pytest.mark.parametrize("name", ["bias_indptr", "seen_indptr"])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_pointer_column_is_refused(name: str, fault: str) -> None:
    last = 2 if name == "bias_indptr" else 3
    wrong = i32(*(last if entry == 2 and position == len(WRONG[fault]) - 1 else entry for position, entry in enumerate(WRONG[fault])))
    checker = Auditor(LIMITS, ghost_config(VOCAB), level="full")
    checker.audit(plan(), table())
    with pytest.raises((LawViolation, BoundViolation)):
        checker.audit(plan(**{name: wrong}), table())


@pytest.mark.parametrize("name", ["row_indptr", "page_indptr"])
def test_the_pointers_that_executors_read_have_one_entry_more_than_rows(name: str) -> None:
    ledger = Ledger(LIMITS, ghost_config(VOCAB), "float32")
    flat = flatten(plan(), table(), LIMITS.page_size, Staging(**{each: ledger.host(each) for each in STAGED}))
    pointers = getattr(flat, name)
    entries = {"row_indptr": flat.token_ids, "page_indptr": flat.page_indices}[name]
    assert len(pointers) == plan().num_rows + 1
    assert pointers[0] == 0
    assert pointers[-1] == len(entries)
    assert (np.diff(pointers) > 0).all()


@pytest.mark.parametrize("name", ["row_indptr", "page_indptr"])
def test_a_buffer_for_them_that_is_short_is_told_and_not_cut(name: str) -> None:
    ledger = Ledger(LIMITS, ghost_config(VOCAB), "float32")
    held = {each: ledger.host(each) for each in STAGED}
    held[name] = held[name][:3]
    with pytest.raises(BoundViolation, match=f"bound '{name}': the step needs 4 entries, the limit is 3"):
        flatten(plan(), table(), LIMITS.page_size, Staging(**held))
