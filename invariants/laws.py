"""Laws: what is true of every right plan besides its bounds, as named objects. Each finds the rows that break it; none repairs anything.

A law is quick to confirm (`holds`) and may be slow to explain (`rows`): the second runs only once the first has failed. Laws of level "step" are
checked on every step in production, those of level "full" scan whole page lists and columns and run in audit mode and in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinfer.invariants import snapshots, states
from twinfer.invariants.facts import I32, StepView, some, unsigned_max
from twinfer.invariants.slots import fed_holds, misfed, misplaced, owner_holds, place_holds, strangers
from twinfer.limits import ceil_div
from twinfer.plan import COPY_COLUMNS, ROW_DTYPES, SAMPLING_DTYPES, SAMPLING_LIST_DTYPES, TOKEN_DTYPES, StepPlan, from_device

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Law:
    """name, why (one sentence: the fault that it stops), holds (quick), rows (offending rows, empty where no single row is at fault).

    constant  it speaks of CONSTANT_COLUMNS alone, so it need not be checked again for a plan that holds the same ones
    """

    name: str
    why: str
    holds: Callable[[StepView], bool]
    rows: Callable[[StepView], Rows]
    level: str = "step"
    constant: bool = False


def _where(mask: NDArray[np.bool_]) -> Rows:
    return np.flatnonzero(mask).astype(np.int64)


def _nobody(view: StepView) -> Rows:
    return np.empty(0, np.int64)


def row_of(counts: I32, entries: NDArray[np.bool_]) -> Rows:
    """Rows that own a True entry, where row i owns `counts[i]` entries one after another."""
    # Clipped, since a wrong count may be 2^31: told as a fault, not turned into an array of 16 GB.
    owner = np.repeat(np.arange(len(counts)), np.clip(counts, 0, len(entries)))
    size = min(len(owner), len(entries))
    return np.unique(owner[:size][entries[:size]]).astype(np.int64)


def _repeats(values: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which entries have occurred before in the array."""
    _, first = np.unique(values, return_index=True)
    again = np.ones(len(values), np.bool_)
    again[first] = False
    return again


# ---- shape of the plan -------------------------------------------------------------------------------------------------------------


_ROW_COLUMNS = tuple((name, np.dtype(dtype)) for name, dtype in ROW_DTYPES.items())
_SAMPLING_COLUMNS = tuple((name, np.dtype(dtype)) for name, dtype in SAMPLING_DTYPES.items())
_LIST_COLUMNS = tuple((name, np.dtype(dtype)) for name, dtype in SAMPLING_LIST_DTYPES.items())
_TOKEN_COLUMNS = tuple((name, np.dtype(dtype)) for name, dtype in TOKEN_DTYPES.items())
_DELTA_COLUMNS = ("entry_slot", "entry_index", "entry_page", "length_slot", "length_pages")
_INT32 = np.dtype(np.int32)


def columns_fault(plan: StepPlan) -> str:
    """The first column whose length or dtype is not the plan's ("" when all are). Everything else relies on it, so it is checked first."""
    num_rows, sampling = len(plan.slot), plan.sampling
    for prefix, owner, columns in (("", plan, _ROW_COLUMNS), ("sampling.", sampling, _SAMPLING_COLUMNS)):
        for name, dtype in columns:
            column = getattr(owner, name)
            if column.dtype != dtype:
                return f"{prefix}{name} is {column.dtype}, a plan holds {dtype}"
            if column.shape != (num_rows,):
                return f"{prefix}{name} has shape {list(column.shape)}, the plan has {num_rows} rows"
    for name, dtype in _LIST_COLUMNS:
        column = getattr(sampling, name)
        if column.dtype != dtype:
            return f"sampling.{name} is {column.dtype}, a plan holds {dtype}"
    if len(sampling.bias_indptr) != num_rows + 1 or len(sampling.seen_indptr) != num_rows + 1:
        return f"sampling.bias_indptr and seen_indptr must have {num_rows + 1} entries"
    if sampling.bias_indptr[-1] != len(sampling.bias_ids) or len(sampling.bias_values) != len(sampling.bias_ids):
        return f"sampling.bias_indptr ends at {sampling.bias_indptr[-1]}, there are {len(sampling.bias_ids)} ids"
    if sampling.seen_indptr[-1] != len(sampling.seen_ids) or len(sampling.seen_counts) != len(sampling.seen_ids):
        return f"sampling.seen_indptr ends at {sampling.seen_indptr[-1]}, there are {len(sampling.seen_ids)} ids"
    if sampling.bias_indptr[0] or sampling.seen_indptr[0]:
        return "sampling.bias_indptr and seen_indptr must begin at 0: entries before the first row would be nobody's"
    return varying_fault(plan)


def varying_fault(plan: StepPlan) -> str:
    """The same of the columns that change with every step: first positions, tokens and what is counted like them, the table's changes."""
    if plan.start.dtype != _INT32 or plan.start.shape != plan.slot.shape:
        return f"start is {plan.start.dtype} {list(plan.start.shape)}, the plan has {len(plan.slot)} rows and holds int32"
    for name, dtype in _TOKEN_COLUMNS:
        column = getattr(plan, name)
        if column is not None and column.dtype != dtype:
            return f"{name} is {column.dtype}, a plan holds {dtype}"
    if plan.positions is not None and len(plan.positions) != len(plan.tokens):
        return f"positions has {len(plan.positions)} entries, the plan has {len(plan.tokens)} tokens"
    if plan.mask is not None and len(plan.mask) != len(plan.slot):
        return f"mask has {len(plan.mask)} rows, the plan has {len(plan.slot)}"
    for name in COPY_COLUMNS:
        column = getattr(plan, name)
        if column.dtype != _INT32 or column.ndim != 2 or column.shape[1] != 2:
            return f"{name} is {column.dtype} {list(column.shape)}, a plan holds int32 pairs [n, 2]"
    delta = plan.delta
    for name in _DELTA_COLUMNS:
        column = getattr(delta, name)
        if column.dtype != _INT32:
            return f"delta.{name} is {column.dtype}, a plan holds int32"
    if not len(delta.entry_slot) == len(delta.entry_index) == len(delta.entry_page) or len(delta.length_slot) != len(delta.length_pages):
        return "the columns of the page table's delta differ in length"
    return ""


def _length_holds(view: StepView) -> bool:
    return view.least_length >= 1 or not view.facts.num_rows


def _start_holds(view: StepView) -> bool:
    return view.least_start >= 0


def _slots_hold(view: StepView) -> bool:
    if not view.page_table_ok:  # slots out of range, which counting below would make room for
        return not _repeats(view.plan.slot).any()
    return bool(np.maximum.reduce(np.bincount(view.plan.slot)) <= 1)


def _sum_holds(view: StepView) -> bool:
    return view.length_sum == view.facts.num_tokens


def _version_holds(view: StepView) -> bool:
    return view.table.version == view.plan.delta.base + 1


# ---- pages -------------------------------------------------------------------------------------------------------------------------


def _uncovered(view: StepView) -> NDArray[np.bool_]:
    return view.table.num_pages[view.slot_index] < view.row_pages


def _covered_holds(view: StepView) -> bool:
    return view.page_table_ok and not some(_uncovered(view))


def _covered_rows(view: StepView) -> Rows:
    return _where(_uncovered(view)) if view.page_table_ok else _nobody(view)


def _outside(pages: I32, view: StepView) -> NDArray[np.bool_]:
    return (pages < 1) | (pages > view.limits.num_pages)


def _written_holds(view: StepView) -> bool:
    return view.least_page >= 1 and view.facts.largest_page <= view.limits.num_pages


def _written_counts(view: StepView) -> I32:
    counts: I32 = np.maximum(view.row_pages - view.plan.start // view.limits.page_size, 0)
    return counts


def _written_rows(view: StepView) -> Rows:
    rows = row_of(_written_counts(view), _outside(view.written, view))
    bad = np.unique(view.plan.delta.entry_slot[_outside(view.plan.delta.entry_page, view)])
    return np.union1d(rows, _where(np.isin(view.plan.slot, bad)))


def _distinct_holds(view: StepView) -> bool:
    pages = view.written_sorted
    return not some(pages[1:] == pages[:-1])


def _distinct_rows(view: StepView) -> Rows:
    return row_of(_written_counts(view), _repeats(view.written))


def _frozen(view: StepView) -> NDArray[np.bool_]:
    """Which of the written pages are shared or sealed; none where a page is out of range (told by another law) or nobody knows."""
    if view.pages is None or not _written_holds(view):
        return np.zeros(len(view.written), np.bool_)
    frozen: NDArray[np.bool_] = (view.pages.references[view.written] != 1) | view.pages.sealed[view.written]
    return frozen


def _lists(view: StepView) -> tuple[I32, Rows]:
    """Every listed page and the row that lists it."""
    pages = np.concatenate([view.table.pages[slot, :count] for slot, count in zip(view.plan.slot, view.row_pages, strict=True)] or [view.row_pages])
    return pages, np.repeat(np.arange(len(view.row_pages)), view.row_pages)


def _listed_rows(view: StepView) -> Rows:
    pages, owner = _lists(view)
    return np.unique(owner[_outside(pages, view)])


def _private_rows(view: StepView) -> Rows:
    """Rows that write a page which the step's page lists hold more than once."""
    pages, _ = _lists(view)
    values, counts = np.unique(pages, return_counts=True)
    return row_of(_written_counts(view), np.isin(view.written, values[counts > 1]))


def _delta_holds(view: StepView) -> bool:
    """Entries name distinct places inside the table, lengths distinct slots; so the delta is at most as large as the table."""
    delta, (num_slots, width) = view.plan.delta, view.table.pages.shape
    slot, index, changed = delta.entry_slot, delta.entry_index, delta.length_slot
    if slot.size:
        if unsigned_max(slot) >= num_slots or unsigned_max(index) >= width:
            return False
        if len(set((slot.astype(np.int64) * width + index).tolist())) < slot.size:
            return False
    return not changed.size or (unsigned_max(changed) < num_slots and len(set(changed.tolist())) == changed.size)


# ---- tokens and sampling -----------------------------------------------------------------------------------------------------------


def _tokens_hold(view: StepView) -> bool:
    return view.vocab_size is None or unsigned_max(view.plan.tokens) < view.vocab_size or not _token_rows(view).size


def _token_rows(view: StepView) -> Rows:
    """Rows with a token outside the vocabulary that is not their own unread one in a step planned ahead."""
    tokens, wrong = view.plan.tokens, _outside_vocab(view.plan.tokens, view)
    if view.decode and view.limits.look_ahead:
        wrong &= tokens != from_device(0) - view.plan.slot
    elif view.limits.look_ahead and view.length_sum == len(tokens) and view.least_length >= 1:
        first = np.cumsum(view.plan.length, dtype=np.int64) - view.plan.length
        own = (view.plan.length == 1) & (tokens[first] == from_device(0) - view.plan.slot)
        wrong[first[own]] = False
    return row_of(view.plan.length, wrong)


def _outside_vocab(ids: I32, view: StepView) -> NDArray[np.bool_]:
    return (ids < 0) | (ids >= (view.vocab_size or 2**31))


def _samples_fault(view: StepView) -> NDArray[np.bool_]:
    return view.plan.num_samples > view.plan.length


def _scored_holds(view: StepView) -> bool:
    plan = view.plan
    if not plan.targets.size:
        return view.scored_none
    return int(np.add.reduce(plan.num_scored, dtype=np.int64)) == plan.targets.size and not _scored_rows(view).size


def _scored_rows(view: StepView) -> Rows:
    plan = view.plan
    wrong = (plan.num_scored < 0) | (plan.num_scored > plan.length)
    return np.union1d(_where(wrong), row_of(plan.num_scored, _outside_vocab(plan.targets, view)))


def _seen_rows(view: StepView) -> Rows:
    counts = np.diff(view.plan.sampling.seen_indptr)
    return _where((counts < 0) | (counts > view.context))


def _seen_holds(view: StepView) -> bool:
    return not view.plan.sampling.seen_ids.size or not _seen_rows(view).size


def _id_rows(view: StepView) -> Rows:
    sampling = view.plan.sampling
    rows = [_where((np.diff(sampling.bias_indptr) < 0) | (np.diff(sampling.seen_indptr) < 0))]
    for indptr, ids in ((sampling.bias_indptr, sampling.bias_ids), (sampling.seen_indptr, sampling.seen_ids)):
        counts = np.diff(indptr)
        owner = np.repeat(np.arange(len(counts)), np.clip(counts, 0, len(ids)))
        rows.append(row_of(counts, _outside_vocab(ids, view)))
        if len(owner) == len(ids):
            rows.append(row_of(counts, _repeats(owner * 2**31 + ids)))
    return np.unique(np.concatenate(rows))


def _mask_rows(view: StepView) -> Rows:
    mask = view.plan.mask
    return _nobody(view) if mask is None else _where((view.plan.num_samples > 0) & ~mask.any(axis=1))


def _position_rows(view: StepView) -> Rows:
    positions, length = view.plan.positions, view.plan.length
    if positions is None or view.length_sum != len(positions):
        return _nobody(view)
    return row_of(length, positions >= np.repeat(view.context, length))  # a negative one is over the bound of the rope table


def _width_holds(view: StepView) -> bool:
    mask = view.plan.mask
    return mask is None or view.vocab_size is None or mask.shape[1] == ceil_div(view.vocab_size, 32)


def _none(rows: Callable[[StepView], Rows]) -> Callable[[StepView], bool]:
    return lambda view: not rows(view).size


LAWS: tuple[Law, ...] = (
    Law("table_version", "A plan that follows another version of the page table reads pages that are not its own.", _version_holds, _nobody),
    Law(
        "row_length",
        "A full prefix hit that leaves no token to compute has no logits to sample from.",
        _length_holds,
        lambda v: _where(v.plan.length < 1),
        constant=True,
    ),
    Law("row_start", "A negative start makes a negative position, which indexes from the end.", _start_holds, lambda v: _where(v.plan.start < 0)),
    Law("token_count", "tokens of a step = sum of its rows; else every row after the gap reads another's tokens.", _sum_holds, _nobody),
    Law("distinct_slots", "Two rows in one batch slot write each other's pages.", _slots_hold, lambda v: _where(_repeats(v.plan.slot)), constant=True),
    Law("page_list", "pages(row) = ceil(context / page_size) must be in the table; what lies beyond is stale.", _covered_holds, _covered_rows),
    Law("written_pages", "A written page is in 1..num_pages: page 0 is the padding page, no row's own.", _written_holds, _written_rows),
    Law("write_slots", "A slot is page and offset: rows that write one page overwrite each other.", _distinct_holds, _distinct_rows),
    Law(
        "immutable_pages",
        "A sealed page is found by others and a shared one is read by them: who writes it changes their past.",
        lambda v: not some(_frozen(v)),
        lambda v: row_of(_written_counts(v), _frozen(v)),
    ),
    Law(
        "token_range",
        "A token id outside the vocabulary reads past the embedding.",
        _tokens_hold,
        _token_rows,
    ),
    Law(
        "slot_owner",
        "A row in a slot of another sequence, or of none, reads and writes that one's pages.",
        owner_holds,
        lambda v: _where(strangers(v)),
    ),
    Law(
        "cache_position",
        "A row begins where its cache ends and samples after its last known token: a gap is never written, an overlap is written twice.",
        place_holds,
        lambda v: _where(misplaced(v)),
    ),
    Law(
        "fed_tokens",
        "A token comes from the device where one is unread, and nowhere else: any other is an older token of the slot, perhaps another sequence's.",
        fed_holds,
        lambda v: _where(misfed(v)),
    ),
    Law(
        "state_slot",
        "In a model that keeps states a row without a slot for its own indexes from the end: another's state.",
        states.given_holds,
        lambda v: _where(states.stateless(v)),
        constant=True,
    ),
    Law(
        "distinct_states",
        "Two rows in one state slot: one reads what the other has written, or is overwritten by it.",
        states.distinct_holds,
        lambda v: _where(states.sharing(v)),
        constant=True,
    ),
    Law(
        "state_owner",
        "A row in the state slot of another sequence, or of none, goes on from that one's past.",
        states.owner_holds,
        lambda v: _where(states.disowned(v)),
    ),
    Law(
        "state_length",
        "A row begins where its state ends, as its cache does: a state can't be read at an earlier length, and a slot just taken holds a stranger's.",
        states.length_holds,
        lambda v: _where(states.torn(v)),
    ),
    Law(
        "state_copies",
        "A copy is of a state of one of the step's rows, once each way, and no snapshot is written twice or read as it is written.",
        snapshots.places_hold,
        lambda v: _where(snapshots.displaced(v)),
    ),
    Law(
        "restored_length",
        "A state restored from a snapshot of another length, or from one that nobody has written, is another past.",
        snapshots.restores_hold,
        lambda v: _where(snapshots.misread(v)),
    ),
    Law(
        "saved_length",
        "A snapshot is of whole chunks and pages, and has the tokens behind it that it is found by.",
        snapshots.saves_hold,
        lambda v: _where(snapshots.miswritten(v)),
    ),
    Law("delta_places", "A place of the page table that a delta names twice holds whatever was written last.", _delta_holds, _nobody),
    Law(
        "samples",
        "Positions to sample from are among the row's own tokens.",
        lambda v: v.facts.largest_samples <= v.least_length or not some(_samples_fault(v)),
        lambda v: _where(_samples_fault(v)),
        constant=True,
    ),
    Law("scored", "Scored positions are among the row's own tokens, one target each, in the vocabulary.", _scored_holds, _scored_rows),
    Law("token_positions", "A token's position is below its row's context, on which the bound of the rope table rests.", _none(_position_rows), _position_rows),
    Law("mask_width", "A mask has a bit for each token of the config's vocabulary: a tokenizer's is narrower and read past its end.", _width_holds, _nobody),
    Law("seen_tokens", "Distinct seen tokens are at most the context; the bound of seen_ids rests on it.", _seen_holds, _seen_rows),
    Law("listed_pages", "Every page that a row reads is in 1..num_pages.", _none(_listed_rows), _listed_rows, "full"),
    Law("private_pages", "A page that is written is listed by its writer alone; shared pages are sealed.", _none(_private_rows), _private_rows, "full"),
    Law("sampling_ids", "Bias and seen token ids are in the vocabulary and distinct within a row.", _none(_id_rows), _id_rows, "full"),
    Law("token_mask", "A row whose mask allows nothing has no token to sample: NaN, not an answer.", _none(_mask_rows), _mask_rows, "full"),
)
