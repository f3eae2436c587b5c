"""Each law of plan and state that an outage broke or might: a wrong line of the engine turns that very law red, before anything else notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from twinfer.engine.flatten import FlatTokens, TokenStaging, pad_tokens
from twinfer.errors import ExecutorLost, LawViolation, StepFailed
from twinfer.invariants.faults.switch import edited
from twinfer.invariants.state import STATE_LAWS
from twinfer.plan import StepPlan
from twinfer.sampling import SamplingParams
from twinfer.table import PageTable

from .ghosts import GhostEngine, drain, limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def traffic(engine: GhostEngine) -> None:
    """Prompts of several pages that share a beginning, an end by a stop token, a failed step, an abort, and nothing left."""
    for i in range(3):
        engine.add([0, 1, 1, 0, 1, 0, 0, 1, i % 3, i % 2], GREEDY)
    drain(engine)

    def fail(plan: StepPlan) -> None:
        engine.executor.fail_on = None
        raise StepFailed("the kernel said no")

    for i in range(3):
        engine.add([0, 1, 1, 0, 1, 0, 0, 1, i % 2, 1], dataclasses.replace(GREEDY, stop_token_ids=(0, 1), min_tokens=2))
    last = engine.add([1, 1, 1, 0], GREEDY)
    engine.step()
    engine.executor.fail_on = fail
    engine.step()
    engine.add([0, 0, 1], dataclasses.replace(GREEDY, presence_penalty=0.5))  # each of its rows waits until the host has read its last token
    engine.step()
    engine.abort(last)
    drain(engine, 60)


def too_large(engine: GhostEngine) -> None:
    """One request that fits the context and never the pool."""
    engine.add([0, 1, 0, 1], dataclasses.replace(GREEDY, max_tokens=engine.limits.max_context - 4))
    for _ in range(3):
        engine.step()


def again(engine: GhostEngine) -> None:
    """A prompt, and then the same once more."""
    for _ in range(2):
        engine.add([0, 1, 1, 0, 1, 0, 0, 1, 0, 1], GREEDY)
        drain(engine)


TEXT = [int(bit) for bit in f"{0xB5297A4D1B56C4E9B5297A4D9E3779B97F4A7C15:0160b}"]


def conversation(engine: GhostEngine) -> None:
    """Two equal prompts at once, the same once more with an answer that passes the grid, its next turn, a branch, an abort, cached pages thrown away."""
    for _ in range(2):
        engine.add(TEXT[:150], GREEDY)
    drain(engine)
    engine.add(TEXT[:124], dataclasses.replace(GREEDY, max_tokens=80))
    events = drain(engine)
    answer = [token for event in events for token in event.tokens]
    engine.add([*TEXT[:124], *answer, 0], GREEDY)
    drain(engine)
    engine.add([*TEXT[:100], *TEXT[:60]], GREEDY)
    last = engine.add([*TEXT[:100], *TEXT[20:70]], GREEDY)
    for _ in range(2):
        engine.step()
    engine.abort(last)
    drain(engine)
    engine.scheduler.pool.drop_cached()
    engine.add(TEXT[:70], GREEDY)
    drain(engine)


@dataclass(frozen=True)
class Wrong:
    """`old` in twinfer.engine.`place` becomes `new`, and the first law that is broken is `law`. look_ahead, audit, states, snapshots: of the engine."""

    law: str
    place: str
    old: str
    new: str
    look_ahead: int = 1
    audit: str = "full"
    run: Callable[[GhostEngine], None] = traffic
    states: int = 0
    snapshots: int = 0


def of_snapshots(law: str, place: str, old: str, new: str, snapshots: int = 6, **given: Any) -> Wrong:
    return Wrong(law, place, old, new, states=3, snapshots=snapshots, run=conversation, **given)


WRONG = (
    Wrong("page_view", "flatten:list_pages", "-(-flat.context // page_size)", "flat.context // page_size + 1"),
    Wrong("sealed_written", "scheduler:Scheduler._advance", "full = after // size", "full = (after + 1) // size"),
    Wrong("sealed_content", "scheduler:Scheduler._seal", "int(pages[i])", "int(pages[first + end - 1 - i])"),
    Wrong("matched_prefix", "scheduler:Scheduler._enter", "sequence.num_cached = cached", "sequence.num_cached = cached + 1"),
    Wrong("pool_total", "pages:PagePool.release", "self._free.append(page)", "pass"),
    Wrong("freed_once", "pages:PagePool.release", "self._free.append(page)", "self._free.extend([page, page])"),
    Wrong("cached_sealed", "pages:PagePool.release", "if self.sealed[page]:", "if True:"),
    Wrong("state_pool", "scheduler:Scheduler._release", "self.states.release(int(self._state_slot[slot]))", "pass", states=3),
    Wrong("state_pool", "states:StatePool.release", "self._free.append(slot)", "self._free.extend([slot, slot])", states=3),
    Wrong("baseline", "scheduler:Scheduler._release", "self.states.release(int(self._state_slot[slot]))", "pass", states=9, audit="step"),
    Wrong("state_pool", "scheduler:Scheduler._admit", "and self.states.available and", "and", states=1, audit="step"),
    Wrong("state_place", "states:StatePool.launched", "plan.start + plan.length", "plan.start + plan.length - 1", look_ahead=0, states=3),
    Wrong("references", "scheduler:Scheduler._release", "self.pool.release(self.table.page_list(slot).tolist())", "pass"),
    Wrong("baseline", "scheduler:Scheduler._release", "self.pool.release(self.table.page_list(slot).tolist())", "pass", audit="step"),
    Wrong("peak_draw", "admission:max_new_tokens", "if asked > most:", "if False:", run=too_large),
    Wrong("page_list", "scheduler:Scheduler._admit", "now = ceil_div(cached + length, size)", "now = (cached + length) // size"),
    Wrong("slots", "scheduler:Scheduler._release", "self._free_slots.append(slot)", "self._free_slots.extend([slot, slot])"),
    Wrong("positions", "scheduler:Scheduler.delivered", "self._known[sampling] += 1", "self._known[sampling] += 2", look_ahead=0),
    Wrong("pending_writer", "scheduler:Scheduler._leave", "self._last_step[sequence.slot] > self._over", "False"),
    Wrong("pending_writer", "scheduler:Scheduler._leave", "self._last_step[sequence.slot] > self._over", "False", audit="step"),
    Wrong("failed_step", "scheduler:Scheduler.failed", "self._over = plan.step", "self._over = plan.step; self._computed += 1"),
    Wrong("terminal_events", "live:LiveRequests._end", "terminal=terminal,", "terminal=False,"),
    Wrong("terminal_events", "live:LiveRequests._end", "terminal=terminal,", "terminal=False,", audit="step"),
    Wrong("terminal_events", "live:LiveRequests._end", "terminal = not live.open",
          "terminal = not live.open; self._emit(Event(live.id, 0, terminal=True))"),
    Wrong("staging_sets", "loop:Loop._advance", "> self.limits.look_ahead)", "> self.limits.look_ahead + 1)"),
    Wrong("token_count", "rows:RowBuilder._tokens", "return np.concatenate(parts)", "return np.concatenate([*parts, parts[0][:1]])"),
    Wrong("slot_owner", "rows:RowBuilder.build", "sequence=order.identity,", "sequence=order.identity[::-1].copy(),"),
    Wrong("cache_position", "scheduler:Scheduler._choose", "return slots, start, order.ones if", "return slots, start - 1, order.ones if"),
    Wrong("fed_tokens", "rows:RowBuilder.read_tokens", "self._last_token[slots[latest]] = tokens[latest]", "pass"),
    Wrong("fed_tokens", "rows:RowBuilder.await_tokens", "self._last_token[slots] = from_device(0) - slots", "pass"),
    Wrong("fed_tokens", "scheduler:Scheduler.delivered", "self._unread[sampling] += 1", "self._unread[sampling] += 0"),
    Wrong("state_slot", "scheduler:Scheduler._enter", "self._state_slot[slot] = self.states.take(sequence.id)", "self.states.take(sequence.id)", states=3,
          run=again),
    Wrong("distinct_states", "states:StatePool.take", "slot = self._free.pop()", "slot = self._free[-1]", states=3),
    Wrong("state_owner", "rows:RowBuilder.build", "state_slot=order.state_slot,", "state_slot=order.state_slot[::-1].copy(),", states=3),
    Wrong("state_length", "states:StatePool.take", "self.owner[slot], self.length[slot] = sequence, 0", "self.owner[slot] = sequence", states=3, run=again),
    Wrong("state_length", "states:StatePool.launched", "plan.start + plan.length", "plan.start + plan.length - 1", states=3, audit="step"),
    Wrong("immutable_pages", "scheduler:Scheduler._enter", "cached = len(hit.pages) * self.limits.page_size",
          "cached = max(0, len(hit.pages) * self.limits.page_size - 1)", run=again),
    of_snapshots("snapshot_total", "snapshots:SnapshotPool._release", "self._free.append(snapshot)", "pass"),
    of_snapshots("snapshot_pins", "keeping:Keeping.over", "for snapshot in plan.restores[:, 0].tolist():", "for snapshot in ():"),
    of_snapshots("snapshot_keys", "snapshots:SnapshotPool.keep", "known = self.find(key)", "known = NO_SNAPSHOT"),
    of_snapshots("snapshot_grid", "snapshots:SnapshotPool._release", "= -1, False", "= 0, False"),
    of_snapshots("snapshot_written", "keeping:Keeping.launched", "self.pool.written[plan.saves[:, 1]] = True", "pass"),
    of_snapshots("snapshot_length", "keeping:Keeping.over", "length // self._page_size - 1]", "length // self._page_size - 2]"),
    of_snapshots("snapshot_pages", "scheduler:Scheduler._forget", "self.keeping.pool.forget(digest)", "pass"),
    of_snapshots("baseline", "keeping:Keeping.over", "for snapshot in plan.restores[:, 0].tolist():", "for snapshot in ():", audit="step"),
    of_snapshots("state_copies", "keeping:Keeping.copies", "(int(state_slot[slots[row]]),", "(int(state_slot[slots[row]]) + 5,"),
    of_snapshots("restored_length", "keeping:Keeping.hit", "Hit(pages[: point * step],", "Hit(pages[: (point + 1) * step],"),
    of_snapshots("restored_length", "keeping:Keeping.enter", "self.restored_from[slot] = hit.snapshot", "self.restored_from[slot] = hit.snapshot ^ 1"),
    of_snapshots("saved_length", "keeping:Keeping.copies", "(ends % self.grid == 0) &", "", audit="step"),
    of_snapshots("state_length", "keeping:Keeping.copies", "if int(source.max()) >= 0:", "if False:", audit="step"),
)  # fmt: skip


def first_broken(look_ahead: int, audit: str, run: Callable[[GhostEngine], None], states: int = 0, snapshots: int = 0) -> str:
    """The first law that is broken, "" for none."""
    within = limits(max_batch=3, page_size=4, num_pages=14, num_state_slots=states)
    if snapshots:
        within = limits(max_batch=3, page_size=16, max_context=256, num_pages=40, max_step_tokens=160, num_state_slots=states, num_snapshots=snapshots)
    engine = GhostEngine(dataclasses.replace(within, look_ahead=look_ahead), audit=audit)
    broken: list[str] = []
    real = engine.auditor.audit

    def watched(plan: StepPlan, table: PageTable) -> None:
        try:
            real(plan, table)
        except LawViolation as error:
            broken.append(error.law)
            raise

    engine.auditor.audit = watched  # type: ignore[method-assign]
    try:
        run(engine)
    except LawViolation as error:
        broken.append(error.law)
    except ExecutorLost:
        assert engine.lost
    if engine.lost and "law '" in engine.lost:
        broken.append(engine.lost.split("law '")[1].split("'")[0])
    return broken[0] if broken else ""


@pytest.mark.parametrize("look_ahead", [0, 1])
@pytest.mark.parametrize("audit", ["step", "full"])
@pytest.mark.parametrize("states", [0, 1, 3])
def test_the_right_engine_breaks_none(states: int, audit: str, look_ahead: int) -> None:
    assert first_broken(look_ahead, audit, traffic, states) == ""
    for snapshots in (1, 2, 6) if states else ():
        assert first_broken(look_ahead, audit, conversation, states, snapshots) == ""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.law} in {wrong.place}, {wrong.audit}")
def test_a_wrong_line_turns_its_law_red(wrong: Wrong) -> None:
    with edited(f"twinfer.engine.{wrong.place}", wrong.old, wrong.new)():
        assert first_broken(wrong.look_ahead, wrong.audit, wrong.run, wrong.states, wrong.snapshots) == wrong.law


@pytest.mark.parametrize("fill", ["0", "4"])
def test_padding_that_is_written_elsewhere_is_refused(fill: str) -> None:
    """Slot 4 is the first of page 1 where pages hold four tokens."""
    write_slots = np.array([9, 10, 77, 77], np.int64)
    rows, tokens = np.zeros(1, np.int32), np.zeros(4, np.int32)
    staging = TokenStaging(tokens.copy(), tokens.copy(), write_slots, rows, rows)
    flat = FlatTokens(staging.token_ids[:2], staging.positions[:2], write_slots[:2], rows, rows, rows, rows)
    with edited("twinfer.engine.flatten:pad_tokens", "[flat.num_tokens :] = 0", f"[flat.num_tokens :] = {fill}")():
        if fill == "0":
            pad_tokens(flat, staging, 4)
            assert write_slots.tolist() == [9, 10, 0, 0]
            return
        with pytest.raises(LawViolation, match="padding_page"):
            pad_tokens(flat, staging, 4)
    write_slots[1] = 0
    with pytest.raises(LawViolation, match="a token of the plan at 1"):
        pad_tokens(flat, staging, 4)


def test_every_state_law_is_turned_red_here() -> None:
    """`reserved_pages` can't be broken alone: a page list that is too short is refused by the plan's law `page_list` first."""
    names = {law.name for _, laws in STATE_LAWS for law in laws}
    assert names - {wrong.law for wrong in WRONG} == {"padding_page", "reserved_pages"}
