"""No plan within the limits exceeds a bound, a plan over one limit is refused by that bound's name and numbers, and no capacity is larger than reached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.engine.flatten import Staging, flatten
from twinfer.errors import BoundViolation, LimitError
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS, BUFFERS, BY_NAME, CONTRACT
from twinfer.invariants.facts import PlanFacts
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.symbols import limit_env
from twinfer.limits import Limits

from ..engine.ghosts import ghost_config
from .random_plans import VOCAB, Drawn, drawn_plans, environment, naive_facts

MODEL = ghost_config(VOCAB)
STAGED = ("token_ids", "positions", "write_slots", "row_indptr", "context", "page_indptr", "page_indices")


def staging(limits: Limits, bounds: dict[str, Bound] = BY_NAME) -> Staging:
    """A staging set whose sizes come from `bounds`."""
    ledger = Ledger(limits, MODEL, "float32", bounds)
    return Staging(**{name: ledger.host(name) for name in STAGED})


def padded_list(drawn: Drawn) -> int:
    """References that a graph of this step's bucket lists: each padding row lists the padding page."""
    facts = naive_facts(drawn)
    return facts["page_references"] + facts["padded_rows"] - facts["num_rows"]


def padded_tokens(drawn: Drawn) -> int:
    """Tokens that the step computes: a graph of verify rows computes its bucket's rows in full."""
    facts = naive_facts(drawn)
    return max(facts["num_tokens"], facts["uniform_rows"] * (1 + drawn.limits.speculative_tokens))


def fits(drawn: Drawn, bounds: dict[str, Bound] = BY_NAME) -> None:
    """The plan's real arrays, padding included, fit into buffers of the bounds' sizes: the meaning of a bound, not its formula."""
    made = staging(drawn.limits, bounds)
    flat = flatten(drawn.plan, drawn.table, drawn.limits.page_size, made)
    rows = drawn.plan.expand(drawn.table, drawn.limits.page_size)
    assert flat.page_indices.tolist() == [page for row in rows for page in row.pages]
    assert flat.token_ids.tolist() == [token for row in rows for token in row.tokens]
    assert flat.positions.tolist() == [row.start + i for row in rows for i in range(len(row.tokens))]
    assert padded_list(drawn) <= len(made.page_indices)
    assert padded_tokens(drawn) <= min(len(made.token_ids), len(made.positions), len(made.write_slots))
    assert naive_facts(drawn)["padded_rows"] + 1 <= min(len(made.row_indptr), len(made.page_indptr))


def within(drawn: Drawn, bounds: dict[str, Bound] = BY_NAME) -> None:
    """demand <= capacity for every bound, by the integer reading and facts counted naively."""
    env = environment(drawn)
    over = [bound.name for bound in bounds.values() if bound.demand.evaluate(env) > bound.capacity.evaluate(env)]
    assert over == []


def facts_are_right(drawn: Drawn) -> None:
    counted = Auditor(drawn.limits, MODEL).facts(drawn.plan, drawn.table)
    assert counted._asdict() == naive_facts(drawn)


@given(drawn_plans())
@settings(max_examples=examples(300), deadline=None, derandomize=repeatable(), database=None)
def test_no_plan_within_the_limits_exceeds_a_bound(drawn: Drawn) -> None:
    if naive_facts(drawn)["page_references"] > drawn.limits.num_pages:
        event("more references than pages")
    facts_are_right(drawn)
    within(drawn)
    fits(drawn)
    Auditor(drawn.limits, MODEL, level="full").audit(drawn.plan, drawn.table)


# contract bound -> (limit that it is made of, what of the demand that limit has to grant)
TIGHTENED = {
    "rows": ("max_batch", "num_rows"),
    "step_tokens": ("max_step_tokens", "num_tokens"),
    "row_tokens": ("max_chunk_tokens", "largest_length"),
    "row_context": ("max_context", "largest_context"),
    "step_context": ("max_step_context", "step_context"),
    "row_samples": ("speculative_tokens", "largest_samples"),
    "row_bias": ("max_logit_bias", "largest_bias"),
    "logprobs": ("max_logprobs", "largest_logprobs"),
    "state_slots": ("num_state_slots", "used_state_slots"),
    "snapshots": ("num_snapshots", "used_snapshots"),
}


def by_row(name: str, drawn: Drawn) -> list[int]:
    """What each row asks for, and whether rows add up (the first four) or the largest counts."""
    plan = drawn.plan
    context = (plan.start + plan.length).tolist()
    scored = [int(n) if k else -1 for n, k in zip(plan.scored_logprobs, plan.num_scored, strict=True)]
    asked: dict[str, list[int]] = {
        "rows": [1] * plan.num_rows,
        "step_tokens": plan.length.tolist(),
        "step_context": context,
        "row_tokens": plan.length.tolist(),
        "row_context": context,
        "row_samples": plan.num_samples.tolist(),
        "row_bias": np.diff(plan.sampling.bias_indptr).tolist(),
        "logprobs": [max(int(a), b) for a, b in zip(plan.sampling.num_logprobs, scored, strict=True)],
        "state_slots": (plan.state_slot + 1).tolist(),
        "snapshots": [1 + max(r.restored_from, r.saved_into) for r in plan.expand(drawn.table, drawn.limits.page_size)],
    }
    return asked[name]


def culprits(name: str, drawn: Drawn, capacity: int) -> tuple[int, ...]:
    """Rows over by themselves; else all from the one at which the running sum passes the capacity."""
    asked = by_row(name, drawn)
    alone = tuple(i for i, value in enumerate(asked) if value > capacity)
    if alone or name not in ("rows", "step_tokens", "step_context"):
        return alone
    first = next(i for i in range(len(asked)) if sum(asked[: i + 1]) > capacity)
    return tuple(range(first, len(asked)))


def tightened(name: str, drawn: Drawn, short: int) -> Limits | None:
    """Limits under which the plan breaks the contract in `name` alone, by `short`; None where lowering that limit breaks another bound too."""
    limit, fact = TIGHTENED[name]
    excess = BY_NAME[name].capacity.evaluate(limit_env(drawn.limits)) - naive_facts(drawn)[fact]
    lowered = getattr(drawn.limits, limit) - excess - short
    try:
        small = replace(drawn.limits, **{limit: lowered}, buckets=() if limit == "max_batch" else drawn.limits.buckets)
    except LimitError:
        return None
    env = environment(drawn, small)
    return small if [b.name for b in CONTRACT if b.demand.evaluate(env) > b.capacity.evaluate(env)] == [name] else None


def test_one_limit_too_small_is_refused_by_its_bound() -> None:
    refused = dict.fromkeys(TIGHTENED, 0)

    @given(drawn_plans(), st.integers(1, 3))
    @settings(max_examples=examples(250), deadline=None, derandomize=repeatable(), database=None)
    def each(drawn: Drawn, short: int) -> None:
        for name, (limit, fact) in TIGHTENED.items():
            small = tightened(name, drawn, short)
            if small is None:
                continue
            refused[name] += 1
            capacity = BY_NAME[name].capacity.evaluate(environment(drawn, small))
            with pytest.raises(BoundViolation) as error:
                Auditor(small, MODEL).audit(drawn.plan, drawn.table)
            told = error.value
            assert (told.bound, told.demand, told.capacity, told.unit) == (name, naive_facts(drawn)[fact], capacity, str(BY_NAME[name].unit))
            assert told.rows == culprits(name, drawn, capacity)
            assert limit in told.remedy

    each()
    assert min(refused.values()) >= 5, f"too few plans were over one limit alone: {refused}"


def test_every_contract_bound_is_tightened() -> None:
    assert set(TIGHTENED) == {bound.name for bound in CONTRACT}


# ---- no capacity is larger than some plan reaches ----------------------------------------------------------------------------------

FULL = Limits(
    max_batch=4,
    max_step_tokens=40,
    max_chunk_tokens=13,
    warmup_tokens=1,
    max_context=10,
    max_step_context=40,
    max_logit_tokens=6,
    page_size=4,
    num_pages=50,
    num_state_slots=4,
    num_snapshots=6,
    speculative_tokens=2,
    look_ahead=1,
    max_logprobs=3,
    max_logit_bias=2,
    buckets=(1, 2, 4),
)
# What the largest steps under FULL ask for. A full batch of verify rows at full contexts; a step of prompts that fills max_step_tokens, all scored.
VERIFY = PlanFacts(
    num_rows=4, padded_rows=4, uniform_rows=4, num_tokens=12, largest_length=3, largest_context=13, step_context=52, page_references=16,
    largest_position=12, largest_slot=3, largest_page=50, num_sampled=12, largest_samples=3, num_scored=0, spread_splits=4, logit_tile=6, bias_entries=8,
    largest_bias=2, seen_entries=52, largest_logprobs=3, used_state_slots=4, delta_entries=16, delta_lengths=4,
    used_snapshots=6, num_restores=4, num_saves=4, state_tasks=0,
)  # fmt: skip
PROMPTS = VERIFY._replace(uniform_rows=0, spread_splits=0, num_tokens=40, largest_length=13, num_sampled=0, num_scored=40, state_tasks=8)

# Where max_batch is no bucket, padding leaves some room that no plan reaches.
_SAMPLED = "a padding row is a verify row to the graph, which samples 1 + speculative_tokens positions of it; only one is listed"
SLACK = {
    **{bound.name: _SAMPLED for bound in BUFFERS if bound.name.startswith("sampled_")},
    "page_indices": "a padding row lists one page; the capacity grants it a whole list, so that it need not know how many rows are padding",
}


SHAPE = {
    "num_attention_layers": 1, "num_gdn_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "hidden_size": 4, "mlp_size": 4,
    "vocab_size": VOCAB, "conv_history": 3, "conv_dim": 5, "num_value_heads": 2, "key_head_dim": 2, "value_head_dim": 3,
    "num_projected_heads": 3, "rotary_dim": 2, "projection_dim": 9, "num_key_heads": 1,
    "num_experts": 4, "num_per_token": 2, "intermediate_size": 3, "num_router_rows": 16, "num_shared": 1,
}  # fmt: skip


def reached(limits: Limits, steps: tuple[PlanFacts, ...]) -> set[str]:
    """Bounds whose capacity one of the steps reaches exactly."""
    names = set()
    for facts in steps:
        env = {**limit_env(limits), **SHAPE, **facts._asdict()}
        for bound in BOUNDS:
            demand, capacity = bound.demand.evaluate(env), bound.capacity.evaluate(env)
            assert demand <= capacity, bound.name
            if demand == capacity:
                names.add(bound.name)
    return names


def test_every_capacity_is_reached_by_some_step() -> None:
    assert {bound.name for bound in BOUNDS} - reached(FULL, (VERIFY, PROMPTS)) == set()


def test_slack_is_only_where_it_is_explained() -> None:
    """With max_batch = 3 and a bucket of 4, the same steps with a row less."""
    limits = replace(FULL, max_batch=3, max_step_context=30)
    verify = VERIFY._replace(num_rows=3, num_tokens=9, step_context=39, page_references=12, largest_slot=2, num_sampled=9, bias_entries=6, seen_entries=39)
    verify = verify._replace(delta_entries=12, delta_lengths=3, spread_splits=3, num_restores=3, num_saves=3)
    prompts = PROMPTS._replace(num_rows=3, step_context=39, page_references=12, largest_slot=2, bias_entries=6, seen_entries=39)
    prompts = prompts._replace(delta_entries=12, delta_lengths=3, num_restores=3, num_saves=3, state_tasks=6)
    assert {bound.name for bound in BOUNDS} - reached(limits, (verify, prompts)) == set(SLACK)


@given(drawn_plans())
@settings(max_examples=examples(60), deadline=None, derandomize=repeatable(), database=None)
def test_warmup_and_the_pool_size_no_step_buffer(drawn: Drawn) -> None:
    """The two outages: neither the profiling forward nor the pool's pages has a place in what a step lists."""
    names = [bound.name for bound in BUFFERS if bound.staged]
    other = replace(drawn.limits, warmup_tokens=drawn.limits.warmup_tokens + 100, num_pages=drawn.limits.num_pages + 100)
    assert [BY_NAME[n].capacity.evaluate(limit_env(other)) for n in names if n != "token_mask"] == [
        BY_NAME[n].capacity.evaluate(limit_env(drawn.limits)) for n in names if n != "token_mask"
    ]
