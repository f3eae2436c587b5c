"""Where a limit comes from: argument, environment, model, memory, default, in that order; and what a memory plan adds up to."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.budget import examples, repeatable
from twinfer.config import ModelConfig
from twinfer.errors import LimitError
from twinfer.golden import BUNDLED, MICRO
from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.memory import fit_pages, page_bytes, plan_memory
from twinfer.invariants.report import EXAMPLE_LIMITS, EXAMPLE_MODEL
from twinfer.invariants.resolve import resolve_limits
from twinfer.invariants.size import format_bytes, parse_bytes
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.limits import Limits

MODEL = ModelConfig.from_file(BUNDLED)


def test_the_chain() -> None:
    environ = {"TWINFER_MAX_BATCH": "5", "TWINFER_PAGE_SIZE": "8", "TWINFER_MEMORY": "1GiB", "PATH": "/bin"}
    resolved = resolve_limits(MODEL, explicit={"max_batch": 3, "max_chunk_tokens": None}, environ=environ)
    limits, source = resolved.limits, resolved.provenance
    assert (limits.max_batch, source["max_batch"]) == (3, "argument")
    assert (limits.page_size, source["page_size"]) == (8, "environment TWINFER_PAGE_SIZE")
    assert (limits.max_context, source["max_context"]) == (MODEL.max_position, "model")
    assert source["num_pages"] == "memory"
    assert source["max_logit_tokens"] == "default"
    assert set(source) == {field.name for field in fields(Limits)}
    assert resolve_limits(MODEL).provenance["num_pages"] == "default"
    assert resolve_limits(MODEL, explicit={"num_pages": 7}).limits.num_pages == 7


@pytest.mark.parametrize(
    ("explicit", "environ", "named"),
    [
        ({"max_batches": 3}, {}, "max_batch"),
        ({"max_batch": "3"}, {}, "max_batch"),
        ({"max_batch": True}, {}, "max_batch"),
        ({"max_batch": 0}, {}, "max_batch"),
        ({"max_context": 10**6}, {}, "max_position_embeddings"),
        ({"max_step_tokens": 8, "max_batch": 9}, {}, "max_step_tokens"),
        ({"max_chunk_tokens": 4096, "max_step_tokens": 64}, {}, "max_chunk_tokens"),
        ({"max_step_context": 10}, {}, "max_step_context"),
        ({"buckets": (1, 2)}, {}, "buckets"),
        ({}, {"TWINFER_MAX_BATCH": "many"}, "TWINFER_MAX_BATCH"),
        ({}, {"TWINFER_MAX_BACH": "3"}, "did you mean TWINFER_MAX_BATCH"),
        ({}, {"TWINFER_MEMORY": "8G"}, "8G"),
    ],
)
def test_bad_values_are_named(explicit: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(LimitError, match=named):
        resolve_limits(MODEL, explicit=explicit, environ=environ)


@pytest.mark.parametrize("explicit", [{"max_step_tokens": 4}, {"max_batch": 5000}, {"max_chunk_tokens": 5000}, {"max_context": 16}, {"page_size": 4096}])
def test_defaults_give_way_to_what_was_asked(explicit: dict[str, int]) -> None:
    limits = resolve_limits(MODEL, explicit=explicit).limits
    for name, value in explicit.items():
        assert getattr(limits, name) == value


@given(
    budget=st.integers(2**29, 2**36),
    page_size=st.sampled_from([1, 16, 64]),
    max_batch=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
)
@settings(max_examples=examples(60), deadline=None, derandomize=repeatable(), database=None)
def test_pages_fill_the_budget_and_one_more_would_not_fit(budget: int, page_size: int, max_batch: int, dtype: str) -> None:
    limits = resolve_limits(MODEL, explicit={"page_size": page_size, "max_batch": max_batch, "max_chunk_tokens": 64, "num_pages": 1}, dtype=dtype).limits
    pages = fit_pages(MODEL, limits, dtype, budget)
    assert plan_memory(MODEL, replace(limits, num_pages=pages), dtype, budget).total <= budget
    with pytest.raises(LimitError, match="num_pages"):
        plan_memory(MODEL, replace(limits, num_pages=pages + 1), dtype, budget)


def test_a_budget_that_is_too_small_names_the_numbers() -> None:
    with pytest.raises(LimitError, match=r"memory = 8\.0 MiB: too small; weights 4\.1 MiB"):
        resolve_limits(MODEL, budget_bytes=2**23)


def test_the_plan_lists_every_buffer_once() -> None:
    plan = plan_memory(EXAMPLE_MODEL, EXAMPLE_LIMITS, "bfloat16", backend="fast", device="cuda")
    env = {**limit_env(EXAMPLE_LIMITS, EXAMPLE_MODEL), **model_env(EXAMPLE_MODEL)}
    named = {line.name: line.bytes for line in plan.lines}
    buffers = sum(bound.device_bytes(env, "bfloat16") for bound in BY_NAME.values())
    assert plan.total == named["weights"] + buffers + named["runtime reserve"]
    assert named["weights"] == 2 * 8_190_735_360  # the model specification's count for Qwen3-8B
    assert plan.page_bytes == page_bytes(EXAMPLE_MODEL, EXAMPLE_LIMITS, "bfloat16", "fast") == 2 * 36 * 16 * 8 * 128 * 2
    assert page_bytes(EXAMPLE_MODEL, EXAMPLE_LIMITS, "bfloat16") == plan.page_bytes + 5  # and its two entries in the pool, on the same machine


def test_an_engine_allocates_exactly_its_bounds() -> None:
    """Every buffer of a real engine is in its ledger with the bound's bytes, and what it holds is what the executor shows."""
    from twinfer.reference import Engine

    engine = Engine.from_pretrained(MICRO, limits={"max_batch": 3, "max_context": 64, "num_pages": 9, "max_step_tokens": 32})
    env = {**limit_env(engine.limits, engine.model), **model_env(engine.model)}
    rows = engine.ledger.rows()
    assert len(rows) > 20
    for row in rows:
        bound = BY_NAME[row.name]
        assert row.shape == bound.axes(env)
        assert row.owner in bound.owners
    assert engine.ledger.total_bytes == sum(bound.total_bytes(env, "float32", "reference") for bound in BY_NAME.values())
    shown = engine.executor.buffers()
    assert {row.name: row.shape for row in rows if row.owner == "reference"} == {name: tuple(buffer.shape) for name, buffer in shown.items()}


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("1KiB", 1024), ("1.5GiB", 3 * 2**29), ("80 GB", 80 * 10**9), ("141gib", 141 * 2**30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1GiB", "8G", "GiB", "1e9", "0", "nan", "9999999999GiB", "1.5.2GiB"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(LimitError):
        parse_bytes(text)


@given(st.integers(1, 2**62))
@settings(max_examples=examples(100), deadline=None, derandomize=repeatable(), database=None)
def test_sizes_are_written_to_within_their_digits(size: int) -> None:
    number, unit = format_bytes(size).split(" ")
    assert abs(float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}[unit] - size) <= size * 0.06


def test_a_default_never_reaches_what_int32_can_index() -> None:
    """Of 16384 contexts of 262144 tokens only as many are planned at once as their references can be counted."""
    model = replace(EXAMPLE_MODEL, max_position=262144)
    limits = resolve_limits(model, explicit={"max_batch": 16384, "max_step_tokens": 16384, "num_pages": 4096, "look_ahead": 1}, backend="fast").limits
    assert limits.max_step_context == 2**31 - 1 - 16384
    Ledger(limits, model, "bfloat16")


def test_what_no_engine_does_is_refused_not_ignored() -> None:
    for explicit in ({"speculative_tokens": 3}, {"speculative_tokens": 3, "num_pages": 10}):
        with pytest.raises(LimitError, match="speculative_tokens = 3: must be 0"):
            resolve_limits(MODEL, explicit=explicit)
    with pytest.raises(LimitError, match="speculative_tokens = 1: must be 0"):
        resolve_limits(MODEL, environ={"TWINFER_SPECULATIVE_TOKENS": "1"})


@pytest.mark.parametrize("value", ["true", "yes", "full", " 1", "2"])
def test_a_value_of_the_audit_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(LimitError, match="TWINFER_AUDIT"):
        resolve_limits(MODEL, environ={"TWINFER_AUDIT": value})
    for known in ("", "0", "1"):
        resolve_limits(MODEL, environ={"TWINFER_AUDIT": known})
