"""State laws: what is true of an engine between steps, as named objects over small values that the engine hands over. They only read.

Laws of a plan are `laws`'. These speak of what no single plan shows: who holds which page, what a failed step left behind, who was told. Each group has
a value of its own, so that whoever can make the value can be checked, this engine or another. Quick groups are checked at each step, the others in
audit mode (`TWINFER_AUDIT=1`) and in tests, after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import LawViolation
from twinfer.invariants.facts import some
from twinfer.limits import ceil_div
from twinfer.plan import StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StateLaw(Generic[S]):
    """name; why, one sentence: the fault that it stops; fault: what is wrong, with numbers, "" where the law holds."""

    name: str
    why: str
    fault: Callable[[S], str]


def check(laws: Sequence[StateLaw[S]], state: S) -> None:
    """Raises LawViolation for the first law that is broken."""
    for law in laws:
        fault = law.fault(state)
        if fault:
            raise LawViolation(law.name, fault)


# ---- the page pool -----------------------------------------------------------------------------------------------------------------


class PoolState(NamedTuple):
    """The page pool, exhaustively.

    references, sealed   [num_pages + 1], of each page
    free, cached         pages that nobody references: empty, or sealed and evictable
    page_lists           of every sequence that has a slot
    """

    references: I32
    sealed: NDArray[np.bool_]
    free: Sequence[int]
    cached: Sequence[int]
    page_lists: Sequence[Sequence[int]]


def _references(pool: PoolState) -> str:
    expected = np.zeros(len(pool.references), np.int64)
    for pages in pool.page_lists:
        np.add.at(expected, np.asarray(pages, np.int64), 1)
    wrong = np.flatnonzero(expected != pool.references)
    if not len(wrong):
        return ""
    page = int(wrong[0])
    return f"page {page} has {pool.references[page]} references, {expected[page]} page lists name it"


def _freed_once(pool: PoolState) -> str:
    pages, times = np.unique(np.array([*pool.free, *pool.cached], np.int64), return_counts=True)
    twice, held = pages[times > 1], pages[pool.references[pages] != 0]
    if len(twice):
        return f"page {twice[0]} is free or cached twice"
    return f"page {held[0]} is free or cached, and held" if len(held) else ""


def _pool_total(pool: PoolState) -> str:
    num_pages, held = len(pool.references) - 1, np.flatnonzero(pool.references).tolist()
    if {*pool.free, *pool.cached, *held} == set(range(1, num_pages + 1)):
        return ""
    return f"free {len(pool.free)} + cached {len(pool.cached)} + held {len(held)} != {num_pages} pages"


def _cached_sealed(pool: PoolState) -> str:
    wrong = [page for page in pool.cached if not pool.sealed[page]] + [page for page in pool.free if pool.sealed[page]]
    return f"page {wrong[0]} is cached and not sealed, or free and sealed" if wrong else ""


POOL_LAWS: tuple[StateLaw[PoolState], ...] = (
    StateLaw("references", "A count that is not the number of page lists frees a page under a reader, or never.", _references),
    StateLaw("freed_once", "A page that is free twice is given to two sequences.", _freed_once),
    StateLaw("pool_total", "free + held + cached = total: a page in none of them is lost, until nothing can be admitted.", _pool_total),
    StateLaw("cached_sealed", "A page that is found by its content is full, written and immutable.", _cached_sealed),
)


# ---- sequences ---------------------------------------------------------------------------------------------------------------------


class SequenceState(NamedTuple):
    """One sequence that has a batch slot.

    computed, planned, known  tokens in cache by committed steps, by launched ones; tokens known when these are over
    num_tokens, unread        tokens that the host has read; those that it has not
    num_matched, num_prompt   prompt tokens that the prefix cache had when it was admitted; prompt tokens
    pages                     its page list
    sealed                    of each page: None where it is not sealed, else whether it is sealed with this sequence's own history
    departing                 it has ended, a step in flight still holds a row of it
    state_slot, state_length  the slot of its state and the tokens behind it; -1 in a model that keeps none
    """

    identity: int
    slot: int
    computed: int
    planned: int
    known: int
    num_tokens: int
    unread: int
    num_matched: int
    num_prompt: int
    pages: Sequence[int]
    sealed: Sequence[bool | None]
    departing: bool
    state_slot: int = -1
    state_length: int = -1


class SequencesState(NamedTuple):
    """All of them. `peaks`: tokens that each running or waiting one may come to hold; free_slots, free_states: batch and state slots that nobody has.

    hit_grid   tokens that the length of a hit is a multiple of; 0 stands for a page
    """

    max_batch: int
    page_size: int
    num_pages: int
    sequences: Sequence[SequenceState]
    free_slots: Sequence[int]
    peaks: Sequence[int]
    num_state_slots: int = 0
    free_states: Sequence[int] = ()
    hit_grid: int = 0


def _each(fault: Callable[[SequencesState, SequenceState], str]) -> Callable[[SequencesState], str]:
    def first(state: SequencesState) -> str:
        found = ((each.identity, fault(state, each)) for each in state.sequences)
        return next((f"sequence {identity}: {text}" for identity, text in found if text), "")

    return first


def _slots(state: SequencesState) -> str:
    taken = [each.slot for each in state.sequences]
    if sorted([*taken, *state.free_slots]) == list(range(state.max_batch)):
        return ""
    return f"taken {sorted(taken)} and free {sorted(state.free_slots)} do not make up {state.max_batch} slots"


def _positions(state: SequencesState, each: SequenceState) -> str:
    right = 0 <= each.computed <= each.planned <= each.known
    if right and (each.departing or (each.known == each.num_tokens + each.unread and each.computed < each.known)):
        return ""
    return f"computed {each.computed}, planned {each.planned}, known {each.known}, tokens {each.num_tokens}, unread {each.unread}"


def _reserved(state: SequencesState, each: SequenceState) -> str:
    if len(each.pages) * state.page_size >= each.planned:
        return ""
    return f"{len(each.pages)} pages of {state.page_size} do not hold {each.planned} tokens"


def _sealed_written(state: SequencesState, each: SequenceState) -> str:
    last = max((i for i, sealed in enumerate(each.sealed) if sealed is not None), default=-1)
    full = (last + 1) * state.page_size
    if last < 0 or full <= each.computed:
        return ""
    return f"page {each.pages[last]} is sealed as tokens {full - state.page_size}..{full - 1}, {each.computed} are written"


def _sealed_content(state: SequencesState, each: SequenceState) -> str:
    wrong = [i for i, own in enumerate(each.sealed) if own is False]
    return f"page {each.pages[wrong[0]]} at index {wrong[0]} is sealed with another history" if wrong else ""


def _matched(state: SequencesState, each: SequenceState) -> str:
    grid = state.hit_grid or state.page_size
    most = (each.num_prompt - 1) // grid * grid
    if each.num_matched <= most and each.num_matched % grid == 0:
        return ""
    return f"{each.num_matched} of {each.num_prompt} prompt tokens were matched, at most {most} may be, in multiples of {grid}"


def _state_pool(state: SequencesState) -> str:
    taken = [each.state_slot for each in state.sequences if each.state_slot >= 0]
    wanted = len(state.sequences) if state.num_state_slots else 0
    if len(taken) == wanted and sorted([*taken, *state.free_states]) == list(range(state.num_state_slots)):
        return ""
    return f"taken {sorted(taken)} and free {sorted(state.free_states)} do not make up {state.num_state_slots} state slots of {wanted} sequences"


def _state_place(state: SequencesState, each: SequenceState) -> str:
    if each.state_slot < 0 or each.state_length == each.planned:
        return ""
    return f"state slot {each.state_slot} has {each.state_length} tokens behind it, the cache {each.planned}"


def _peak_draw(state: SequencesState) -> str:
    most = max(state.peaks, default=0)
    need = ceil_div(most, state.page_size)
    return f"a sequence may come to hold {most} tokens, {need} pages; there are {state.num_pages}" if need > state.num_pages else ""


SEQUENCE_LAWS: tuple[StateLaw[SequencesState], ...] = (
    StateLaw("slots", "A batch slot that two sequences have is one page list for both; one that nobody has is lost.", _slots),
    StateLaw("positions", "computed <= planned <= known, and known = read + unread: a position that runs ahead is read before it is written.",
             _each(_positions)),
    StateLaw("state_pool", "A state slot that two sequences have is one past for both; one that nobody has is lost.", _state_pool),
    StateLaw("state_place", "Cache and state of a sequence are at one length: a state that is ahead has seen tokens twice.", _each(_state_place)),
    StateLaw("reserved_pages", "A page list covers what launched steps write, overshoot included: else they write where nobody reserved.", _each(_reserved)),
    StateLaw("peak_draw", "The pages cover the most that one sequence may draw: else it preempts everybody and then waits for ever.", _peak_draw),
    StateLaw("sealed_written", "sealed x page <= written: a page that is found before it is written holds what was there before.", _each(_sealed_written)),
    StateLaw("sealed_content", "A sealed page in a list holds this sequence's own tokens after this sequence's own beginning.", _each(_sealed_content)),
    StateLaw("matched_prefix", "matched <= floor((prompt - 1) / page) x page: a full hit leaves no token to compute and no logits to sample from.",
             _each(_matched)),
)  # fmt: skip


# ---- snapshots of states -----------------------------------------------------------------------------------------------------------


class SnapshotsState(NamedTuple):
    """The snapshots of a model that keeps states, exhaustively.

    length, written, pins  [num_snapshots], of each: tokens behind it (-1: nothing), whether its save was launched, pending readers and writers
    free, cached   those that hold nothing; those that are found and not pinned
    keys           those that are found, by the digest of their last page
    pending        one entry a pending restore or save
    found          (snapshot, tokens) for each prefix of a present sequence whose digest finds it: how many tokens that digest stands for
    sealed         digests of the pages that are sealed
    """

    grid: int
    length: I32
    written: NDArray[np.bool_]
    pins: I32
    free: Sequence[int]
    cached: Sequence[int]
    keys: Mapping[bytes, int]
    pending: Sequence[int]
    found: Sequence[tuple[int, int]]
    sealed: Container[bytes]


def _snapshot_total(state: SnapshotsState) -> str:
    held = np.flatnonzero(state.pins).tolist()
    if sorted([*state.free, *state.cached, *held]) == list(range(len(state.length))):
        return ""
    return f"free {sorted(state.free)}, cached {sorted(state.cached)} and held {held} do not make up {len(state.length)} snapshots"


def _snapshot_pins(state: SnapshotsState) -> str:
    expected = np.zeros(len(state.pins), np.int64)
    np.add.at(expected, np.asarray(state.pending, np.int64), 1)
    wrong = np.flatnonzero(expected != state.pins)
    if not len(wrong):
        return ""
    return f"snapshot {wrong[0]} has {state.pins[wrong[0]]} pins, {expected[wrong[0]]} restores and saves are pending"


def _snapshot_keys(state: SnapshotsState) -> str:
    found = sorted(state.keys.values())
    twice = [a for a, b in pairwise(found) if a == b]
    if twice:
        return f"snapshot {twice[0]} is found by two histories"
    lost = sorted(set(state.cached) - set(found))
    return f"snapshot {lost[0]} is cached and nobody finds it" if lost else ""


def _snapshot_grid(state: SnapshotsState) -> str:
    free = np.zeros(len(state.length), np.bool_)
    free[list(state.free)] = True
    right = np.where(free, (state.length == -1) & ~state.written, (state.length > 0) & (state.length % state.grid == 0))
    wrong = np.flatnonzero(~right)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return f"snapshot {at}, {'free' if free[at] else 'held'}, has {state.length[at]} tokens behind it, the grid is {state.grid}"


def _snapshot_written(state: SnapshotsState) -> str:
    wrong = [snapshot for snapshot in state.keys.values() if not state.written[snapshot]]
    return f"snapshot {wrong[0]} is found, but no step that writes it was launched" if wrong else ""


def _snapshot_length(state: SnapshotsState) -> str:
    wrong = [(snapshot, tokens) for snapshot, tokens in state.found if state.length[snapshot] != tokens]
    return f"snapshot {wrong[0][0]} has {state.length[wrong[0][0]]} tokens behind it, it is found by {wrong[0][1]}" if wrong else ""


def _snapshot_pages(state: SnapshotsState) -> str:
    wrong = [snapshot for key, snapshot in state.keys.items() if key not in state.sealed]
    return f"snapshot {wrong[0]} is found, the page before it is not" if wrong else ""


SNAPSHOT_LAWS: tuple[StateLaw[SnapshotsState], ...] = (
    StateLaw("snapshot_total", "free + cached + held = total: a snapshot in two of them is written under a reader, one in none of them is lost.",
             _snapshot_total),
    StateLaw("snapshot_pins", "A snapshot stays as long as a restore or save of it is pending, and no longer: else it holds another's past, or is lost.",
             _snapshot_pins),
    StateLaw("snapshot_keys", "One history finds one snapshot: found by two, it is the past of one of them at most.", _snapshot_keys),
    StateLaw("snapshot_grid", "A state is kept where no chunk is open and a page is full; elsewhere it lacks what belongs to it.", _snapshot_grid),
    StateLaw("snapshot_written", "Nobody finds a snapshot before the step that saves it was launched: it would read what was there before.", _snapshot_written),
    StateLaw("snapshot_length", "A snapshot has behind it just the tokens that it is found by: a token more is computed twice, one less is left out.",
             _snapshot_length),
    StateLaw("snapshot_pages", "A snapshot whose last page is gone can't be hit: it would take the place of one that can.", _snapshot_pages),
)  # fmt: skip


# ---- the loop ----------------------------------------------------------------------------------------------------------------------


class LoopState(NamedTuple):
    """The loop at the end of a step, in a few numbers.

    in_flight     launched steps that are not over
    identity      [max_batch] int64, the sequence of each batch slot
    num_accepted, num_told, num_live   requests: taken, given their terminal event, open
    has_work      whether any sequence waits, runs or departs
    num_held      pages with a reference; num_taken: batch slots that somebody has; num_states: state slots; num_pinned: snapshots with a pending copy
    """

    look_ahead: int
    in_flight: Sequence[StepPlan]
    identity: I64
    num_accepted: int
    num_told: int
    num_live: int
    has_work: bool
    num_held: int
    num_taken: int
    num_states: int = 0
    num_pinned: int = 0


def _staging_sets(loop: LoopState) -> str:
    if len(loop.in_flight) <= loop.look_ahead + 1:
        return ""
    return f"{len(loop.in_flight)} steps are in flight, look_ahead = {loop.look_ahead} gives {loop.look_ahead + 1} staging sets"


def _pending_writer(loop: LoopState) -> str:
    for plan in loop.in_flight:
        held = loop.identity[plan.slot]
        if held.tobytes() != plan.sequence.tobytes():
            row = int(np.flatnonzero(held != plan.sequence)[0])
            return f"slot {plan.slot[row]} was given up by sequence {plan.sequence[row]} while step {plan.step} is in flight, which writes its pages"
    return ""


def _terminal_events(loop: LoopState) -> str:
    if loop.num_accepted == loop.num_told + loop.num_live:
        return ""
    return f"{loop.num_accepted} requests were accepted, {loop.num_told} terminal events were told, {loop.num_live} requests are open"


def _baseline(loop: LoopState) -> str:
    if loop.has_work or not (loop.num_held or loop.num_taken or loop.num_states or loop.num_pinned or loop.num_live):
        return ""
    held = f"{loop.num_held} pages, {loop.num_taken} slots, {loop.num_states} state slots and {loop.num_pinned} snapshots"
    return f"no work is left, but {held} are held and {loop.num_live} requests are open"


STAGING_SETS = StateLaw(
    "staging_sets", "A staging buffer exists once for each step in flight: with one step more it is rewritten before its copy is done.", _staging_sets
)
LOOP_LAWS: tuple[StateLaw[LoopState], ...] = (
    STAGING_SETS,
    StateLaw("pending_writer", "A slot, and with it its pages, stays its sequence's until the steps that write them are over.", _pending_writer),
    StateLaw("terminal_events", "Every accepted request gets exactly one terminal event: with none its client waits for ever.", _terminal_events),
    StateLaw(
        "baseline", "With no work left every page is free or cached and every slot free, state slots too, and no copy pending: what is held then is "
        "never given back.", _baseline
    ),
)


# ---- one step ----------------------------------------------------------------------------------------------------------------------


class FailedStep(NamedTuple):
    """A step that failed, before and after: [max_batch] each, the sequence of a slot and its tokens in cache by committed steps."""

    identity: I64
    before: I32
    after: I32
    identity_after: I64


def _failed_step(step: FailedStep) -> str:
    kept = (step.identity == step.identity_after) & (step.identity >= 0)
    moved = np.flatnonzero(kept & (step.before != step.after))
    return f"the step failed, sequence {step.identity[moved[0]]} moved from {step.before[moved[0]]} to {step.after[moved[0]]}" if len(moved) else ""


class PageView(NamedTuple):
    """A step's page lists as an executor gets them: page_indptr [num_rows + 1], context [num_rows]."""

    page_indptr: I32
    context: I32
    page_size: int


def _page_view(view: PageView) -> str:
    last = view.context - (np.diff(view.page_indptr) - 1) * view.page_size
    wrong = (last < 1) | (last > view.page_size)
    if not some(wrong):
        return ""
    row = int(np.flatnonzero(wrong)[0])
    return f"row {row} lists {int(np.diff(view.page_indptr)[row])} pages of {view.page_size} for {view.context[row]} tokens"


class PaddedTokens(NamedTuple):
    """Where each token of a padded step is written: write_slots [padded tokens] int64, the first num_tokens of them the plan's."""

    write_slots: I64
    num_tokens: int


def _padding_page(padded: PaddedTokens) -> str:
    wrong = (padded.write_slots == 0) != (np.arange(len(padded.write_slots)) >= padded.num_tokens)
    if not some(wrong):
        return ""
    at = int(np.flatnonzero(wrong)[0])
    what = "a token of the plan" if at < padded.num_tokens else "padding"
    return f"{what} at {at} is written to slot {padded.write_slots[at]}; slot 0, on the padding page 0, is padding's alone"


FAILURE_LAWS: tuple[StateLaw[FailedStep], ...] = (
    StateLaw("failed_step", "A failed step changes no position: its rows end, and nobody counts tokens that were not computed.", _failed_step),
)
PAGE_VIEW_LAWS: tuple[StateLaw[PageView], ...] = (
    StateLaw("page_view", "pages = ceil(length / page) and (pages - 1) x page + last = length: a page more is not begun, a page less is not read.", _page_view),
)
PADDING_LAWS: tuple[StateLaw[PaddedTokens], ...] = (
    StateLaw("padding_page", "Padding writes the first slot of the padding page and nothing else, and nobody else writes it.", _padding_page),
)

STATE_LAWS: tuple[tuple[str, tuple[StateLaw[Any], ...]], ...] = (
    ("each step", LOOP_LAWS),
    ("each failed step", FAILURE_LAWS),
    ("each padded step", PADDING_LAWS),
    ("each page list", PAGE_VIEW_LAWS),
    ("audit", POOL_LAWS),
    ("audit", SEQUENCE_LAWS),
    ("audit", SNAPSHOT_LAWS),
)
"""When each group is checked; audit: after every step of an engine that is audited in full."""
