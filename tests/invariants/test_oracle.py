"""The auditor against a slow judge that shares no code with it: one number of a valid plan is changed at random, and both must agree on the plan."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import event, given, settings

from tests.budget import examples, repeatable
from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.laws import LAWS
from twinfer.limits import ceil_div
from twinfer.plan import SamplingColumns

from ..engine.ghosts import ghost_config
from .random_plans import VOCAB, Drawn, drawn_plans

MODEL = ghost_config(VOCAB)
COLUMNS = ("slot", "start", "length", "num_samples", "num_scored", "state_slot", "tokens", "targets", "scored_logprobs", "positions", "restores", "saves")
SAMPLING = ("num_logprobs", "bias_indptr", "bias_ids", "seen_indptr", "seen_ids")
TABLE = ("pages", "num_pages")
VALUES = st.one_of(st.integers(-2, 12), st.sampled_from([-(2**31), 2**31 - 1, VOCAB - 1, VOCAB, 2**30]))


def judge(drawn: Drawn) -> bool:
    """Whether the plan is right, entry by entry in Python integers."""
    limits, plan, table, sampling = drawn.limits, drawn.plan, drawn.table, drawn.plan.sampling
    start, length = [int(n) for n in plan.start], [int(n) for n in plan.length]
    slots, samples, scored = plan.slot.tolist(), plan.num_samples.tolist(), plan.num_scored.tolist()
    context = [a + n for a, n in zip(start, length, strict=True)]
    overshoot = limits.look_ahead + limits.speculative_tokens
    if len(set(slots)) < len(slots) or not all(0 <= slot < limits.max_batch for slot in slots):
        return False
    if min(length) < 1 or min(start) < 0 or max(context) > limits.max_context + overshoot:
        return False
    if max(length) > max(limits.max_chunk_tokens, 1 + limits.speculative_tokens) or sum(length) != len(plan.tokens):
        return False
    if sum(length) > limits.max_step_tokens or sum(context) > limits.max_step_context + limits.max_batch * overshoot:
        return False
    lists = []
    for slot, tokens in zip(slots, context, strict=True):
        count = ceil_div(tokens, limits.page_size)
        if table.num_pages[slot] < count:
            return False
        lists.append(table.pages[slot, :count].tolist())
    everywhere = [page for pages in lists for page in pages]
    if not all(1 <= page <= limits.num_pages for page in everywhere):
        return False
    written = [page for pages, first in zip(lists, start, strict=True) for page in pages[first // limits.page_size :]]
    if any(everywhere.count(page) != 1 for page in written):
        return False
    own = [slot for slot, count in zip(slots, length, strict=True) for _ in range(count)]
    single = [count == 1 for count in length for _ in range(count)]
    for token, slot, alone in zip(plan.tokens.tolist(), own, single, strict=True):
        unread = limits.look_ahead > 0 and alone and token == -1 - slot
        if not (0 <= token < VOCAB or unread):
            return False
    if not all(0 <= token < VOCAB for token in plan.targets.tolist()):
        return False
    if not all(0 <= n <= min(most, 1 + limits.speculative_tokens) for n, most in zip(samples, length, strict=True)):
        return False
    if not all(0 <= n <= most for n, most in zip(scored, length, strict=True)) or sum(scored) != len(plan.targets):
        return False
    if max([*sampling.num_logprobs.tolist(), *(k for k, n in zip(plan.scored_logprobs.tolist(), scored, strict=True) if n)]) > limits.max_logprobs:
        return False
    states = plan.state_slot.tolist()
    if any(not 0 <= state < limits.num_state_slots or states.count(state) > 1 if limits.num_state_slots else state != -1 for state in states):
        return False
    into, out_of = [pair[1] for pair in plan.restores.tolist()], [pair[0] for pair in plan.saves.tolist()]
    read, written = [pair[0] for pair in plan.restores.tolist()], [pair[1] for pair in plan.saves.tolist()]
    if any(len(set(each)) < len(each) for each in (into, out_of, written)) or set(read) & set(written) or not {*into, *out_of} <= set(states):
        return False
    if not all(0 <= snapshot < limits.num_snapshots for snapshot in (*read, *written)):
        return False
    if any(start[states.index(state)] < 1 for state in into) or any(context[states.index(state)] % max(limits.page_size, 64) for state in out_of):
        return False
    if plan.positions is not None:
        owner = [most for most, count in zip(context, length, strict=True) for _ in range(count)]
        if not all(0 <= position < most for position, most in zip(plan.positions.tolist(), owner, strict=True)):
            return False
    for indptr, ids, most in (
        (sampling.bias_indptr.tolist(), sampling.bias_ids.tolist(), [limits.max_logit_bias] * len(slots)),
        (sampling.seen_indptr.tolist(), sampling.seen_ids.tolist(), context),
    ):
        if indptr[0] != 0 or indptr[-1] != len(ids) or indptr != sorted(indptr):
            return False
        for row, allowed in enumerate(most):
            own = ids[indptr[row] : indptr[row + 1]]
            if len(own) > allowed or len(set(own)) < len(own) or not all(0 <= token < VOCAB for token in own):
                return False
    return True


@st.composite
def tampered(draw: st.DrawFn) -> Drawn:
    """A valid plan with at most one entry of one column or of the page table changed."""
    drawn = draw(drawn_plans())
    plan, table = drawn.plan, drawn.table
    if draw(st.booleans()):
        implied = [int(a) + i for a, n in zip(plan.start, plan.length, strict=True) for i in range(int(n))]
        plan = replace(plan, positions=np.array(implied, np.int32))
    where = draw(st.sampled_from([*COLUMNS, *SAMPLING, *TABLE]))
    source = table if where in TABLE else plan.sampling if where in SAMPLING else plan
    column = getattr(source, where)
    if column is None or column.size == 0:
        return replace(drawn, plan=plan)
    changed = column.copy()
    changed.reshape(-1)[draw(st.integers(0, column.size - 1))] = draw(VALUES)
    if where in TABLE:
        column[...] = changed
        return replace(drawn, plan=plan)
    if where in SAMPLING:
        sampling: SamplingColumns = replace(plan.sampling, **{where: changed})
        return replace(drawn, plan=replace(plan, sampling=sampling))
    return replace(drawn, plan=replace(plan, **{where: changed}))


def verdict(drawn: Drawn) -> str:
    """What the auditor refuses the plan for ("" if nothing); fails unless the judge says the same and any blame is on rows that exist."""
    refused, excess = "", 1
    rows: tuple[int, ...] = ()
    try:
        Auditor(drawn.limits, MODEL, level="full").audit(drawn.plan, drawn.table)
    except BoundViolation as error:
        refused, rows, excess = error.bound, error.rows, error.demand - error.capacity
    except LawViolation as error:
        refused, rows = error.law, error.rows
    assert excess > 0
    assert all(0 <= row < drawn.plan.num_rows for row in rows)
    assert judge(drawn) == (refused == ""), f"the auditor says {refused or 'valid'}"
    return refused


def test_auditor_and_judge_agree() -> None:
    names: set[str] = set()

    @given(tampered())
    @settings(max_examples=examples(400), deadline=None, derandomize=repeatable(), database=None)
    def agree(drawn: Drawn) -> None:
        refused = verdict(drawn)
        event(refused or "passed")
        names.add(refused)

    agree()
    known = {law.name for law in LAWS} | {bound.name for bound in BOUNDS} | {"columns", ""}
    assert names <= known
    assert len(names) >= 12, f"too little was refused to compare: {sorted(names)}"
