"""Random limits, and random plans within them, made directly as columns without a scheduler; and what a plan asks for, counted naively. Not a test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np

from twinfer.invariants.symbols import limit_env
from twinfer.limits import Limits, ceil_div
from twinfer.plan import SamplingColumns, StepPlan
from twinfer.table import PageTable, TableDelta

from .plans import i32

VOCAB = 40


@dataclass(frozen=True)
class Drawn:
    """A plan that obeys all laws and bounds under `limits`, and the table that it follows."""

    limits: Limits
    plan: StepPlan
    table: PageTable


def _often_most(draw: st.DrawFn, low: int, high: int) -> int:
    """A number of low..high, the highest more often than by chance: capacities are missed by one, not by many."""
    return draw(st.one_of(st.just(high), st.integers(low, high)))


@st.composite
def drawn_limits(draw: st.DrawFn) -> Limits:
    """Small limits of every arrangement; num_pages is set by who draws the plan."""
    batch, speculative, look_ahead = draw(st.integers(1, 6)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    step_tokens = batch * (1 + speculative) + draw(st.integers(0, 20))
    context = draw(st.one_of(*[st.integers(1, 24)] * 3, st.integers(200, 600)))  # now and then more than one split of attention
    buckets = draw(st.sampled_from([(), (batch,), (batch + 3,), tuple(sorted({1, batch, batch + 1})), tuple(range(1, batch + 1))]))
    return Limits(
        max_batch=batch,
        max_step_tokens=step_tokens,
        max_chunk_tokens=draw(st.integers(1, step_tokens)),
        warmup_tokens=draw(st.integers(1, 8)),
        max_context=context,
        max_step_context=draw(st.integers(context, max(context, batch * context))),
        max_logit_tokens=draw(st.integers(1, 6)),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 8, 64])),
        num_pages=1,
        num_state_slots=draw(st.sampled_from([0, batch, batch + 1])),
        num_snapshots=draw(st.sampled_from([0, 1, batch, 2 * batch])),
        speculative_tokens=speculative,
        look_ahead=look_ahead,
        max_logprobs=draw(st.integers(0, 3)),
        max_logit_bias=draw(st.integers(0, 4)),
        buckets=buckets,
    )


@st.composite
def drawn_plans(draw: st.DrawFn) -> Drawn:
    """Rows of any length; all share the pages that they only read, so references often outnumber the pool's pages."""
    limits = draw(drawn_limits())
    size, overshoot = limits.page_size, limits.look_ahead + limits.speculative_tokens
    row_tokens = max(limits.max_chunk_tokens, 1 + limits.speculative_tokens)
    context_left = limits.max_step_context + limits.max_batch * overshoot
    tokens_left = limits.max_step_tokens
    # One token a row is kept back for the rows to come, so that a full batch is drawn as often as any other.
    wanted = min(_often_most(draw, 1, limits.max_batch), context_left)
    contexts: list[int] = []
    lengths: list[int] = []
    for row in range(wanted):
        later = wanted - row - 1
        most = min(limits.max_context + overshoot, context_left - later)
        contexts.append(_often_most(draw, 1, most))
        most = min(row_tokens, tokens_left - later, contexts[-1])
        lengths.append(_often_most(draw, 1, most))
        context_left, tokens_left = context_left - contexts[-1], tokens_left - lengths[-1]
    num_rows = len(contexts)
    shared = max(1, *((context - length) // size for context, length in zip(contexts, lengths, strict=True)))
    table = PageTable(np.zeros((limits.max_batch, limits.pages_per_context), np.int32), np.zeros(limits.max_batch, np.int32))
    slots = draw(st.permutations(range(limits.max_batch)))[:num_rows]
    fresh = shared
    for slot, context, length in zip(slots, contexts, lengths, strict=True):
        count, first = ceil_div(context, size), (context - length) // size
        turn = draw(st.integers(0, shared - 1))
        table.pages[slot, :first] = [(turn + i) % shared + 1 for i in range(first)]
        table.pages[slot, first:count] = range(fresh + 1, fresh + 1 + count - first)
        fresh += count - first
        table.resize(i32(slot), i32(count))
    table.version = 1
    limits = replace(limits, num_pages=fresh)
    num_tokens = sum(lengths)
    scored = [draw(st.integers(0, length)) for length in lengths]
    samples = [_often_most(draw, 0, min(1 + limits.speculative_tokens, length)) for length in lengths]
    bias = [_often_most(draw, 0, limits.max_logit_bias) for _ in lengths]
    seen = [draw(st.integers(0, min(context, VOCAB))) for context in contexts]
    states = _state_slots(draw, limits.num_state_slots, num_rows)
    restores, saves = _copies(draw, limits, states, contexts, lengths)
    plan = StepPlan(
        step=0,
        delta=_delta(table, slots, draw(st.integers(0, 3))),
        slot=i32(*slots),
        sequence=np.arange(num_rows, dtype=np.int64),
        start=i32(*contexts) - i32(*lengths),
        length=i32(*lengths),
        num_samples=i32(*samples),
        num_scored=i32(*scored),
        state_slot=i32(*states),
        tokens=np.arange(num_tokens, dtype=np.int32) % VOCAB,
        targets=np.zeros(sum(scored), np.int32),
        scored_logprobs=i32(*(_often_most(draw, -1, limits.max_logprobs) for _ in lengths)),
        sampling=_sampling(bias, seen, [_often_most(draw, -1, limits.max_logprobs) for _ in lengths]),
        restores=restores,
        saves=saves,
    )
    return Drawn(limits, plan, table)


def _state_slots(draw: st.DrawFn, num_slots: int, num_rows: int) -> list[int]:
    """One of its own for each row, the last of all often among them; none in a model without states."""
    if not num_slots:
        return [-1] * num_rows
    slots = draw(st.permutations(range(num_slots)))[:num_rows]
    return slots if num_slots - 1 in slots or draw(st.booleans()) else [num_slots - 1, *slots[1:]]


def _copies(draw: st.DrawFn, limits: Limits, states: list[int], contexts: list[int], lengths: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Restores of rows that do not begin at 0, saves of rows that end on the grid; the last snapshot of all often among them."""
    restores, saves = [], []
    free = draw(st.permutations(range(limits.num_snapshots)))
    free = sorted(free, key=lambda snapshot: snapshot != limits.num_snapshots - 1) if draw(st.booleans()) else free
    for state, context, length in zip(states, contexts, lengths, strict=True):
        if state >= 0 and free and context % limits.snapshot_grid == 0 and draw(st.booleans()):
            saves.append((state, free.pop(0)))
        if state >= 0 and free and context > length and draw(st.booleans()):
            restores.append((free[-1], state))  # several rows may go on from one
    restores = [pair for pair in restores if pair[0] not in {snapshot for _, snapshot in saves}]
    return tuple(np.array(made, np.int32).reshape(-1, 2) for made in (restores, saves))  # type: ignore[return-value]


def _delta(table: PageTable, slots: list[int], part: int) -> TableDelta:
    """What made a part of the table: none of its entries, every third, every second or all of them, and the lengths of as many slots."""
    places = [(slot, i) for slot in slots for i in range(int(table.num_pages[slot]))][:: max(1, 4 - part)] if part else []
    told = sorted({slot for slot, _ in places})
    return TableDelta(
        0,
        entry_slot=i32(*(slot for slot, _ in places)),
        entry_index=i32(*(i for _, i in places)),
        entry_page=i32(*(int(table.pages[place]) for place in places)),
        length_slot=i32(*told),
        length_pages=i32(*(int(table.num_pages[slot]) for slot in told)),
    )


def _sampling(bias: list[int], seen: list[int], logprobs: list[int]) -> SamplingColumns:
    num_rows = len(bias)
    ones = np.ones(num_rows, np.float32)
    bias_ids = [token for count in bias for token in range(count)]
    seen_ids = [token for count in seen for token in range(count)]
    return SamplingColumns(
        temperature=ones,
        top_k=np.zeros(num_rows, np.int32),
        top_p=ones,
        min_p=ones * 0,
        repetition=ones,
        presence=ones * 0,
        frequency=ones * 0,
        seed=np.arange(num_rows, dtype=np.uint64),
        sample=np.zeros(num_rows, np.int32),
        num_logprobs=i32(*logprobs),
        bias_indptr=np.cumsum([0, *bias], dtype=np.int32),
        bias_ids=i32(*bias_ids),
        bias_values=np.zeros(len(bias_ids), np.float32),
        seen_indptr=np.cumsum([0, *seen], dtype=np.int32),
        seen_ids=i32(*seen_ids),
        seen_counts=np.zeros(len(seen_ids), np.int32),
    )


def naive_facts(drawn: Drawn) -> dict[str, int]:
    """PlanFacts counted row by row from the expanded plan, sharing no code with `facts`."""
    limits, plan = drawn.limits, drawn.plan
    rows = plan.expand(drawn.table, limits.page_size)
    padded = next(size for size in limits.buckets if size >= len(rows))
    size = limits.page_size
    written = [page for row in rows for i, page in enumerate(row.pages) if (i + 1) * size > row.start]
    logprobs = [int(n) for n in plan.sampling.num_logprobs] + [int(n) for n, r in zip(plan.scored_logprobs, rows, strict=True) if r.num_scored]
    bias = [int(b - a) for a, b in zip(plan.sampling.bias_indptr[:-1], plan.sampling.bias_indptr[1:], strict=True)]
    uniform = all(len(r.tokens) <= 1 + limits.speculative_tokens for r in rows)
    sampled = sum(r.num_samples for r in rows) + (padded - len(rows) if uniform else 0)
    return {
        "num_rows": len(rows),
        "padded_rows": padded,
        "uniform_rows": padded if uniform else 0,
        "num_tokens": sum(len(r.tokens) for r in rows),
        "largest_length": max(len(r.tokens) for r in rows),
        "largest_context": max(r.start + len(r.tokens) for r in rows),
        "step_context": sum(r.start + len(r.tokens) for r in rows),
        "page_references": sum(len(r.pages) for r in rows),
        "largest_position": max(r.start + len(r.tokens) for r in rows) - 1,
        "largest_slot": max(r.slot for r in rows),
        "largest_page": max(written + plan.delta.entry_page.tolist()),
        "num_sampled": sum(r.num_samples for r in rows),
        "largest_samples": max(r.num_samples for r in rows),
        "num_scored": sum(r.num_scored for r in rows),
        "spread_splits": spread_splits(drawn),
        "logit_tile": min(limits.max_logit_tokens, max(sampled, sum(r.num_scored for r in rows))),
        "bias_entries": sum(bias),
        "largest_bias": max(bias),
        "seen_entries": len(plan.sampling.seen_ids),
        "largest_logprobs": max(0, *logprobs),
        "used_state_slots": 1 + max(int(s) for s in plan.state_slot),
        "delta_entries": len(plan.delta.entry_page),
        "delta_lengths": len(plan.delta.length_slot),
        "used_snapshots": 1 + max(max(r.restored_from, r.saved_into) for r in rows),
        "num_restores": sum(r.restored_from >= 0 for r in rows),
        "num_saves": sum(r.saved_into >= 0 for r in rows),
        "state_tasks": len({(i, at // 64) for i, r in enumerate(rows) if len(r.tokens) > 1 for at in range(r.start, r.start + len(r.tokens))})
        if max(int(s) for s in plan.state_slot) >= 0
        else 0,
    }


def spread_splits(drawn: Drawn) -> int:
    """Splits of 256 keys of the short rows, where a tile of 64 keys crosses pages or rows times the one kv head are fewer than 128 programs."""
    rows = [r for r in drawn.plan.expand(drawn.table, drawn.limits.page_size) if len(r.tokens) <= 1 + drawn.limits.speculative_tokens]
    spreads = drawn.limits.page_size % 64 or len(rows) < 128
    return sum(ceil_div(r.start + len(r.tokens), 256) for r in rows) if spreads else 0


def environment(drawn: Drawn, limits: Limits | None = None) -> dict[str, Any]:
    """Limits, facts and a model's shape, by symbol."""
    return {
        **limit_env(limits or drawn.limits),
        **naive_facts(drawn),
        "num_attention_layers": 1,
        "num_gdn_layers": 1,
        "conv_history": 3,
        "conv_dim": 5,
        "num_value_heads": 2,
        "key_head_dim": 2,
        "value_head_dim": 3,
        "num_heads": 1,
        "num_projected_heads": 3,
        "rotary_dim": 2,
        "projection_dim": 9,
        "num_key_heads": 1,
        "num_experts": 4,
        "num_per_token": 2,
        "intermediate_size": 3,
        "num_router_rows": 16,
        "num_shared": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "hidden_size": 4,
        "mlp_size": 4,
        "vocab_size": VOCAB,
    }
