"""The auditor: a valid plan passes, and each law and each bound of the contract is broken by a minimal plan, which is refused by name with its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.budget import examples, repeatable
from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.auditor import Auditor, rows_of
from twinfer.invariants.bounds import BOUNDS, BY_NAME, CONTRACT
from twinfer.invariants.expr import Const
from twinfer.invariants.facts import PageState, Setting, SlotState, SnapshotColumns, StateSlots, StepView
from twinfer.invariants.laws import LAWS
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import ROW_DTYPES, SAMPLING_DTYPES, SAMPLING_LIST_DTYPES, TOKEN_DTYPES, StepPlan, from_device, no_copies
from twinfer.sampling import SamplingParams
from twinfer.table import PageTable, TableDelta

from ..engine.ghosts import GhostEngine, drain, ghost_config, limits
from .plans import LIMITS, VOCAB, i32, plan, table

Broken = Callable[[], tuple[StepPlan, PageTable]]
SPECULATIVE = replace(LIMITS, speculative_tokens=2)
STATEFUL = replace(LIMITS, num_state_slots=4)


def auditor(level: str = "full", limits: Limits = LIMITS, **changes: Any) -> Auditor:
    return Auditor(limits, ghost_config(VOCAB), level=level, **changes)


def page_state(name: str) -> PageState | None:
    """For the law that needs it: page 2, which row 0 writes, is listed by somebody else too, and page 6, which row 2 writes, is sealed."""
    if name != "immutable_pages":
        return None
    references, sealed = np.ones(16, np.int32), np.zeros(16, np.bool_)
    references[2], sealed[6] = 2, True
    return PageState(references, sealed)


def slot_state(**changes: np.ndarray[Any, Any]) -> SlotState:
    """What a scheduler knows of the slots of `plan`: row 0 is a chunk of a prompt of 20."""
    return SlotState(np.array([10, 11, 12], np.int64), i32(0, 0, 9), i32(20, 3, 10), i32(0, 0, 0))._replace(**changes)


SLOTS = {
    "slot_owner": slot_state(identity=np.array([10, -1, 12], np.int64)),
    "cache_position": slot_state(planned=i32(0, 0, 8)),
    "fed_tokens": slot_state(unread=i32(0, 0, 1)),
}


def state_slots(owner: tuple[int, ...] = (12, 10, -1, 11), length: tuple[int, ...] = (9, 0, 7, 0)) -> StateSlots:
    """What a scheduler knows of the state slots 1, 3, 0 of `plan`'s rows; slot 2 is free, and what it held had 7 tokens behind it."""
    return StateSlots(np.array(owner, np.int64), i32(*length))


STATES = {
    "state_owner": state_slots(owner=(12, 11, -1, 10)),
    "state_length": state_slots(length=(10, 0, 0, 0)),
}


# Row 0 computes the first 64 tokens of a prompt and saves its state (slot 1) into snapshot 1; row 2 (slot 0) goes on at 64 from snapshot 2.
COPYING = replace(STATEFUL, num_snapshots=3, page_size=32, max_context=130, max_step_context=260, max_step_tokens=80, max_chunk_tokens=70)
COPIES: dict[str, Any] = {
    "start": i32(0, 0, 64), "length": i32(64, 3, 1), "tokens": np.arange(68, dtype=np.int32) % VOCAB, "num_scored": i32(0, 0, 0), "targets": i32(),
    "state_slot": i32(1, 3, 0), "saves": i32(1, 1).reshape(1, 2), "restores": i32(2, 0).reshape(1, 2),
}  # fmt: skip
COPY_LAWS = ("state_copies", "restored_length", "saved_length")


def snapshot_columns(length: tuple[int, ...] = (-1, 64, 64), written: tuple[bool, ...] = (False, False, True)) -> SnapshotColumns:
    """Of three snapshots: nobody's, one that the step writes, one that it reads."""
    return SnapshotColumns(i32(*length), np.array(written))


SNAPSHOTS = {
    "restored_length": snapshot_columns(length=(-1, 64, 128)),
    "saved_length": snapshot_columns(length=(-1, 128, 64)),
}


def limits_for(name: str) -> Limits:
    """Only where rows may sample several positions can one sample more than it has tokens without exceeding a bound."""
    return COPYING if name in COPY_LAWS else SPECULATIVE if name == "samples" else STATEFUL if "state" in name else LIMITS


def known_of(name: str) -> dict[str, Any]:
    """What a scheduler knows, as far as a law needs it."""
    return {"pages": page_state(name), "slots": SLOTS.get(name), "states": STATES.get(name), "snapshots": SNAPSHOTS.get(name)}


def broken(**changes: Any) -> Broken:
    return lambda: (plan(**changes), table())


def wrong_table(edit: Callable[[PageTable], None]) -> Broken:
    def make() -> tuple[StepPlan, PageTable]:
        made = table()
        edit(made)
        return plan(), made

    return make


def set_version(made: PageTable) -> None:
    made.version = 5


def set_page(slot: int, index: int, page: int) -> Callable[[PageTable], None]:
    def edit(made: PageTable) -> None:
        made.pages[slot, index] = page

    return edit


MASK = np.full((3, 2), 0xFFFFFFFF, np.uint32)
EMPTY_MASK = np.where(np.arange(3)[:, None] == 1, np.uint32(0), MASK).astype(np.uint32)

# law -> the smallest plan that breaks it and nothing else, and the rows at fault
LAW_BREAKERS: dict[str, tuple[Broken, tuple[int, ...]]] = {
    "table_version": (wrong_table(set_version), ()),
    "row_length": (broken(length=i32(8, 3, 0), tokens=np.arange(11, dtype=np.int32), num_samples=i32(0, 1, 0), start=i32(0, 0, 9)), (2,)),
    "row_start": (broken(start=i32(0, -1, 9)), (1,)),
    "token_count": (broken(tokens=np.arange(13, dtype=np.int32)), ()),
    "distinct_slots": (broken(slot=i32(0, 1, 1), start=i32(0, 0, 3)), (2,)),
    "page_list": (wrong_table(lambda made: made.resize(i32(2), i32(2))), (2,)),
    "written_pages": (wrong_table(set_page(1, 0, 0)), (1,)),
    "write_slots": (wrong_table(set_page(2, 2, 3)), (2,)),
    "token_range": (broken(tokens=i32(*range(11), VOCAB)), (2,)),
    "immutable_pages": (wrong_table(lambda made: None), (0, 2)),
    "slot_owner": (broken(), (1,)),
    "cache_position": (broken(), (2,)),
    "fed_tokens": (broken(), (2,)),
    "state_slot": (broken(state_slot=i32(1, -1, 0)), (1,)),
    "distinct_states": (broken(state_slot=i32(1, 0, 0)), (2,)),
    "state_owner": (broken(state_slot=i32(1, 3, 0)), (0, 1)),
    "state_length": (broken(state_slot=i32(1, 3, 0)), (2,)),
    "state_copies": (broken(**{**COPIES, "restores": i32(2, 0, 2, 0).reshape(2, 2)}), (2,)),
    "restored_length": (broken(**COPIES), (2,)),
    "saved_length": (broken(**COPIES), (0,)),
    "delta_places": (broken(delta=TableDelta(0, i32(2, 2), i32(0, 0), i32(4, 4))), ()),
    "samples": (broken(num_samples=i32(0, 1, 2)), (2,)),
    "scored": (broken(targets=i32(1, 2, 3, 4, 5, 6, 7, VOCAB)), (0,)),
    "token_positions": (broken(positions=i32(*range(8), 0, 1, 3, 9)), (1,)),
    "mask_width": (broken(mask=MASK[:, :1]), ()),
    "seen_tokens": (broken(seen_indptr=i32(0, 0, 11, 11), seen_ids=i32(*range(11)), seen_counts=i32(*[0] * 11)), (1,)),
    "listed_pages": (wrong_table(set_page(2, 0, 0)), (2,)),
    "private_pages": (wrong_table(set_page(2, 0, 3)), (1,)),
    "sampling_ids": (broken(bias_ids=i32(7, 7)), (2,)),
    "token_mask": (broken(mask=EMPTY_MASK), (1,)),
}


def test_the_valid_plan_passes() -> None:
    auditor().audit(plan(), table())
    auditor(slots=slot_state()).audit(plan(mask=MASK), table())
    auditor(limits=STATEFUL, slots=slot_state(), states=state_slots()).audit(plan(state_slot=i32(1, 3, 0)), table())


def test_every_law_has_a_breaker() -> None:
    assert set(LAW_BREAKERS) == {law.name for law in LAWS}


@pytest.mark.parametrize("name", [law.name for law in LAWS])
def test_a_broken_law_is_refused_by_name_with_its_rows(name: str) -> None:
    make, rows = LAW_BREAKERS[name]
    checker = auditor(limits=limits_for(name), **known_of(name))
    made, pages = make()
    with pytest.raises(LawViolation) as error:
        checker.audit(made, pages)
    assert (error.value.law, error.value.rows) == (name, rows)


@pytest.mark.parametrize("name", [law.name for law in LAWS])
def test_without_the_law_its_breaker_passes(name: str) -> None:
    """The breaker breaks that law alone: with the law taken out nothing else refuses it, so the law is what catches it."""
    make, _ = LAW_BREAKERS[name]
    others = tuple(law for law in LAWS if law.name != name)
    overlapping = {"listed_pages", "written_pages", "write_slots", "private_pages", "row_length", "row_start", "distinct_slots", "page_list"}
    if name in overlapping:
        # These describe one fault from two sides, so another law or bound may catch it; never under this law's name.
        with contextlib.suppress(BoundViolation, LawViolation):
            auditor(limits=limits_for(name), laws=others, pages=page_state(name)).audit(*make())
    else:
        auditor(limits=limits_for(name), laws=others, **known_of(name)).audit(*make())


@pytest.mark.parametrize(
    ("slots", "states", "law", "rows"),
    [
        ((-1, -2, -1), StateSlots(np.empty(0, np.int64), i32()), "state_slot", (1,)),
        ((1, 3, 2), state_slots(), "state_owner", (2,)),  # a free slot is nobody's
        ((1, 3, 0), state_slots(length=(9, 3, 7, 0)), "state_length", (0,)),  # it begins at 0, but its state has not been given up
        ((1, 3, 0), state_slots(length=(8, 0, 7, 1)), "state_length", (1, 2)),
    ],
)
def test_rows_go_on_from_their_own_states(slots: tuple[int, ...], states: StateSlots, law: str, rows: tuple[int, ...]) -> None:
    within = replace(LIMITS, num_state_slots=len(states.owner))
    with pytest.raises(LawViolation) as error:
        auditor("step", limits=within, states=states).audit(plan(state_slot=i32(*slots)), table())
    assert (error.value.law, error.value.rows) == (law, rows)


def pairs(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return i32(*numbers).reshape(-1, 2)


@pytest.mark.parametrize(
    ("change", "known", "law", "rows"),
    [
        ({}, snapshot_columns(), "", ()),
        ({}, None, "", ()),
        ({"restores": pairs(2, 0, 2, 3), "start": i32(0, 64, 64), "length": i32(64, 3, 1)}, snapshot_columns(), "", ()),  # one snapshot, two samples
        ({"restores": pairs(2, 2)}, snapshot_columns(), "state_copies", ()),  # a slot that no row has: nobody's fault
        ({"saves": pairs(1, 1, 1, 0)}, snapshot_columns(length=(64, 64, 64)), "state_copies", (0,)),
        ({"saves": pairs(1, 1, 0, 1)}, snapshot_columns(), "state_copies", (2,)),  # two rows into one snapshot
        ({"saves": pairs(1, 2)}, snapshot_columns(), "state_copies", (0,)),  # read and written
        ({"restores": pairs(0, 0)}, snapshot_columns(), "restored_length", (2,)),  # nobody's
        ({}, snapshot_columns(written=(False, False, False)), "restored_length", (2,)),  # not written yet
        ({"restores": pairs(2, 1)}, None, "restored_length", (0,)),  # a row that begins at 0
        ({}, snapshot_columns(written=(False, True, True)), "saved_length", (0,)),  # somebody may read it
        ({"saves": pairs(3, 1)}, None, "saved_length", (1,)),  # 3 tokens are not on the grid
    ],
)
def test_copies_are_of_states_at_the_length_of_their_snapshots(change: dict[str, Any], known: SnapshotColumns | None, law: str, rows: tuple[int, ...]) -> None:
    made, within = {**COPIES, **change}, COPYING
    made["tokens"] = np.arange(int(made["length"].sum()), dtype=np.int32) % VOCAB
    pages = table()
    if int(made["start"][1]):
        pages.pages[1, :3] = (7, 8, 9)
        pages.resize(i32(1), i32(3))
    checker = auditor("step", limits=within, snapshots=known)
    if not law:
        checker.audit(plan(**made), pages)
        return
    with pytest.raises(LawViolation) as error:
        checker.audit(plan(**made), pages)
    assert (error.value.law, error.value.rows) == (law, rows)


def test_a_restored_row_begins_where_its_snapshot_ends_not_where_its_slot_stands() -> None:
    """The slot was just taken and counts as empty; without the restore the same row would be refused."""
    states = state_slots(owner=(12, 10, -1, 11), length=(0, 0, 7, 0))
    checker = auditor("step", limits=COPYING, states=states, snapshots=snapshot_columns())
    checker.audit(plan(**COPIES), table())
    unrestored = plan(**{**COPIES, "restores": no_copies()})
    with pytest.raises(LawViolation) as error:
        checker.audit(unrestored, table())
    assert (error.value.law, error.value.rows) == ("state_length", (2,))


@pytest.mark.parametrize("name", ["restores", "saves"])
@pytest.mark.parametrize("column", [np.zeros((1, 2), np.int64), np.zeros(2, np.int32), np.zeros((1, 3), np.int32)])
def test_copies_are_pairs_of_int32(name: str, column: np.ndarray[Any, Any]) -> None:
    checker, made = auditor("step", limits=COPYING), plan(**{**COPIES, name: column})
    with pytest.raises(LawViolation, match=f"{name} is .*, a plan holds int32 pairs"):
        checker.audit(made, table())


AHEAD = replace(LIMITS, look_ahead=1)
FED = {"tokens": i32(*range(11), from_device(2))}
DECODE = rows_of(plan(), 2, 3)
FED_DECODE = replace(DECODE, tokens=i32(from_device(2)))


@pytest.mark.parametrize(
    ("made", "slots", "law", "rows"),
    [
        (plan(), slot_state(), "", ()),
        (plan(**FED), slot_state(unread=i32(0, 0, 1)), "", ()),
        (plan(**FED), slot_state(), "fed_tokens", (2,)),
        (plan(**FED), slot_state(unread=i32(0, 0, 1), identity=np.array([10, 11, 13], np.int64)), "slot_owner", (2,)),
        (plan(**FED), slot_state(unread=i32(0, 0, 1), planned=i32(0, 0, 10), known=i32(20, 3, 11)), "cache_position", (2,)),
        (plan(**FED), slot_state(unread=i32(0, 0, 1), known=i32(20, 3, 11)), "cache_position", (2,)),
        (plan(), slot_state(known=i32(8, 3, 10)), "cache_position", (0,)),
        (plan(), slot_state(known=i32(20, 2, 10)), "cache_position", (1,)),
        (plan(), slot_state(unread=i32(0, 1, 0)), "fed_tokens", (1,)),
        (DECODE, slot_state(), "", ()),
        (FED_DECODE, slot_state(unread=i32(0, 0, 1)), "", ()),
        (FED_DECODE, slot_state(unread=i32(1, 1, 0)), "fed_tokens", (0,)),
        (DECODE, slot_state(unread=i32(0, 0, 1)), "fed_tokens", (0,)),
        (DECODE, slot_state(planned=i32(0, 0, 8)), "cache_position", (0,)),
        (DECODE, slot_state(known=i32(20, 3, 9)), "cache_position", (0,)),
        (DECODE, slot_state(known=i32(20, 3, 11)), "cache_position", (0,)),
        (DECODE, slot_state(identity=np.array([12, 12, -1], np.int64)), "slot_owner", (0,)),
    ],
)
def test_rows_follow_what_the_scheduler_knows_of_their_slots(made: StepPlan, slots: SlotState, law: str, rows: tuple[int, ...]) -> None:
    """A token may come from the device only where one is unread, of the same sequence, at the position where it will stand."""
    checker = auditor(limits=AHEAD, slots=slots)
    if not law:
        checker.audit(made, table())
        return
    with pytest.raises(LawViolation) as error:
        checker.audit(made, table())
    assert (error.value.law, error.value.rows) == (law, rows)


CONTRACT_BREAKERS: dict[str, tuple[StepPlan, int, int]] = {
    "row_tokens": (plan(length=i32(9, 3, 1), tokens=np.arange(13, dtype=np.int32), num_scored=i32(0, 0, 0), targets=i32()), 9, 8),
    "row_context": (plan(start=i32(0, 0, 20)), 21, 20),
    "row_samples": (plan(num_samples=i32(0, 2, 1)), 2, 1),
    "row_bias": (plan(bias_indptr=i32(0, 0, 0, 4), bias_ids=i32(1, 2, 3, 4), bias_values=np.zeros(4, np.float32)), 4, 3),
    "logprobs": (plan(num_logprobs=i32(-1, 3, -1)), 3, 2),
    "state_slots": (plan(state_slot=i32(-1, 0, -1)), 1, 0),
    "snapshots": (plan(state_slot=i32(1, 3, 0), saves=i32(1, 2).reshape(1, 2)), 3, 0),
}


@pytest.mark.parametrize("name", sorted(CONTRACT_BREAKERS))
def test_a_bound_is_refused_by_name_and_numbers(name: str) -> None:
    made, demand, capacity = CONTRACT_BREAKERS[name]
    with pytest.raises(BoundViolation) as error:
        auditor("step", limits=STATEFUL if name == "snapshots" else LIMITS).audit(made, table())
    assert (error.value.bound, error.value.demand, error.value.capacity) == (name, demand, capacity)
    assert len(error.value.rows) == 1
    assert "raise " in str(error.value)


@pytest.mark.parametrize(
    ("bound", "changed", "demand", "capacity", "rows"),
    [
        ("rows", {"max_batch": 2}, 3, 2, (2,)),
        ("step_tokens", {"max_step_tokens": 10, "max_chunk_tokens": 8}, 12, 10, (1, 2)),
        ("step_context", {"max_step_context": 20}, 21, 20, (2,)),
    ],
)
def test_a_sum_over_its_limit_names_the_rows_that_pass_it(bound: str, changed: dict[str, int], demand: int, capacity: int, rows: tuple[int, ...]) -> None:
    """A step whose rows fit one by one: the first row at which the running sum passes the limit and all after it are at fault."""
    small = replace(LIMITS, **changed)
    with pytest.raises(BoundViolation) as error:
        Auditor(small, ghost_config(VOCAB)).audit(plan(), table())
    assert (error.value.bound, error.value.demand, error.value.capacity) == (bound, demand, capacity)
    assert error.value.rows == rows


def test_every_contract_bound_was_broken_here() -> None:
    assert set(CONTRACT_BREAKERS) | {"rows", "step_tokens", "step_context"} == {bound.name for bound in CONTRACT}


def test_columns_of_different_lengths_are_refused_before_anything_else() -> None:
    with pytest.raises(LawViolation, match=r"length has shape \[2\], the plan has 3 rows"):
        auditor().audit(plan(length=i32(8, 3)), table())


EVERY_COLUMN = (*ROW_DTYPES, *SAMPLING_DTYPES, *SAMPLING_LIST_DTYPES, *TOKEN_DTYPES)


@pytest.mark.parametrize("name", EVERY_COLUMN)
def test_a_column_of_another_dtype_is_refused_by_name(name: str) -> None:
    """int64 where int32 belongs computes on a CPU and reads every second entry on a device."""
    given = {"positions": i32(*range(8), 0, 1, 2, 9), "mask": MASK}
    made = plan(**given)
    auditor().audit(made, table())
    owner: Any = made if name in ROW_DTYPES or name in TOKEN_DTYPES else made.sampling
    column = getattr(owner, name)
    wider = column.astype(np.float64 if column.dtype.kind == "f" else np.int64 if column.dtype != np.int64 else np.int32)
    with pytest.raises(LawViolation, match=rf"{name} is {wider.dtype}"):
        auditor().audit(plan(**{**given, name: wider}), table())


def test_what_an_output_holds_has_its_dtype() -> None:
    good = StepOutput(0, i32(4, 5), logprob_columns(2, 2), logprob_columns(8, 1), {})
    for wrong in (
        replace(good, tokens=good.tokens.astype(np.int64)),
        replace(good, sampled=LogprobColumns(np.zeros(2, np.float32), np.zeros((2, 2), np.int32), np.zeros((2, 2)))),  # type: ignore[arg-type]
        replace(good, scored=LogprobColumns(np.zeros(8), np.zeros((8, 1), np.int64), np.zeros((8, 1)))),  # type: ignore[arg-type]
    ):
        with pytest.raises(LawViolation, match="an output holds"):
            auditor().check_output(plan(), wrong)


def frozen(made: StepPlan) -> StepPlan:
    """The plan with read-only columns, as the scheduler shares them from step to step."""
    for owner, names in ((made, ROW_DTYPES), (made.sampling, (*SAMPLING_DTYPES, *SAMPLING_LIST_DTYPES))):
        for name in names:
            getattr(owner, name).setflags(write=False)
    return made


def unscored(**changes: Any) -> StepPlan:
    return plan(num_scored=i32(0, 0, 0), targets=i32(), **changes)


def test_a_plan_with_the_columns_of_the_last_one_is_checked_for_what_changed() -> None:
    """Read-only columns that passed are not checked again; what varies is: first positions, tokens, pages, the table's changes."""
    checker, made, pages = auditor(), frozen(unscored()), table()
    checker.audit(made, pages)
    setting = Setting(LIMITS, VOCAB, LIMITS.max_batch)
    assert checker.facts(made, pages) == StepView(made, pages, setting, StepView(made, pages, setting)).facts
    checker.audit(replace(made, start=i32(0, 0, 8)), pages)
    for changed, law in (
        ({"start": i32(0, 0, 20)}, "row_context"),
        ({"start": i32(0, -1, 9)}, "row_start"),
        ({"start": np.array([0, 0, 9])}, "columns"),
        ({"start": i32(0, 0, 11)}, ""),
        ({"start": i32(0, 0, 12)}, "page_list"),
        ({"tokens": i32(*range(11), VOCAB)}, "token_range"),
        ({"tokens": i32(*range(11))}, "token_count"),
        ({"delta": TableDelta(0, i32(2, 2), i32(0, 0), i32(4, 4))}, "delta_places"),
        ({"delta": TableDelta(0, i32(2), i32(0), i32(99))}, "kv_keys"),
    ):
        checker.audit(made, pages)
        if not law:
            checker.audit(replace(made, **changed), pages)
            continue
        with pytest.raises((LawViolation, BoundViolation)) as error:
            checker.audit(replace(made, **changed), pages)
        assert getattr(error.value, "law", None) == law or getattr(error.value, "bound", None) == law, error.value


def test_columns_that_somebody_can_write_are_checked_every_time() -> None:
    checker, made, pages = auditor(), unscored(), table()
    checker.audit(made, pages)
    made.num_samples[2] = 2
    with pytest.raises((LawViolation, BoundViolation)):
        checker.audit(made, pages)


def test_a_checker_that_always_says_yes_is_caught() -> None:
    """The gate above is a gate only if the compiled check compares: one over bounds with endless capacity must let the breaker pass."""
    endless = tuple(replace(b, capacity=Const(2**62, b.unit), shape=()) if b.name == "logprobs" else b for b in BOUNDS)
    made, _, _ = CONTRACT_BREAKERS["logprobs"]
    auditor("step", bounds=endless).audit(made, table())


def logprob_columns(num: int, num_top: int) -> LogprobColumns:
    return LogprobColumns(np.zeros(num), np.zeros((num, num_top), np.int32), np.zeros((num, num_top)))


def test_output_is_checked() -> None:
    """Tokens of the right step, number and range; log probabilities as asked for (2 sampled positions with 2 alternatives, 8 scored with 1)."""
    checker = auditor()
    good = StepOutput(0, i32(4, 5), logprob_columns(2, 2), logprob_columns(8, 1), {})
    checker.check_output(plan(), good)
    tokens = (i32(4), i32(4, VOCAB), i32(-1, 5))
    sampled = (None, logprob_columns(1, 2), logprob_columns(2, 1))
    scored = (None, logprob_columns(7, 1), logprob_columns(8, 0))
    wrong = [replace(good, step=1), replace(good, row_error={3: "a row that the plan lacks"})]
    wrong += [replace(good, tokens=t) for t in tokens] + [replace(good, sampled=c) for c in sampled] + [replace(good, scored=c) for c in scored]
    for output in wrong:
        with pytest.raises(LawViolation):
            checker.check_output(plan(), output)
    checker.check_output(plan(), replace(good, tokens=i32(4, VOCAB), row_error={2: "not a number"}))


@given(
    batch=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 3, 8, 64]),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    tokens=st.integers(6, 40),
    shared=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None, derandomize=repeatable(), database=None)
def test_no_scheduled_plan_is_ever_refused(batch: int, page_size: int, prompts: list[int], tokens: int, shared: bool) -> None:
    """Random limits and traffic through the real scheduler: the auditor at full level refuses nothing, and capacities are approached."""
    small = limits(max_batch=batch, max_step_tokens=tokens, page_size=page_size, max_context=64)
    engine = GhostEngine(small)
    for i, length in enumerate(prompts):
        engine.add([0] * length if shared else [(i + k) % 3 for k in range(length)], SamplingParams(max_tokens=5))
    events = drain(engine)
    assert all(event.error is None for event in events)


def test_page_indices_is_filled_to_its_capacity() -> None:
    """The witness that the bound is not merely large: a full batch of full contexts reaches it exactly."""
    small = limits(max_batch=4, max_context=16, page_size=4, max_step_tokens=64)
    engine = GhostEngine(small)
    for i in range(4):
        engine.add([i % 3] * 15, SamplingParams(max_tokens=1))
    scheduled = engine.scheduler.plan()
    assert scheduled is not None
    demand = engine.auditor.facts(scheduled, engine.scheduler.table).page_references
    assert demand == engine.ledger.capacity("page_indices") == 16


def test_names_are_unique_and_every_history_has_a_source() -> None:
    assert len(BY_NAME) == len(BOUNDS)
    assert any("#403" in bound.history for bound in BOUNDS)
