"""`twinfer plan` and the resolver for all five types, from configs of published shapes: the figures are the formulas', counted here by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_memory import PAGE_SIZE
from tests.serve.command import run
from twinfer.config import ModelConfig
from twinfer.errors import LimitError
from twinfer.invariants.memory import SAMPLER_BYTES, MemoryPlan, plan_memory, reference_workspace
from twinfer.invariants.resolve import resolve_limits
from twinfer.limits import Limits
from twinfer.reference import Engine

from .engines import open_engine, write_config
from .shapes import HYBRID, KINDS, NEW
from .test_memory import bound

# The published shapes of Qwen3-30B-A3B, Qwen3-Next-80B-A3B, Qwen3.5-4B and Qwen3.6-35B-A3B.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                  "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": True},
    "qwen3_next": {"max_position_embeddings": 262144},
    "qwen3_5": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "max_position_embeddings": 262144},
    "qwen3_5_moe": {"max_position_embeddings": 262144},
}  # fmt: skip


def config_file(name: str, directory: Path) -> Path:
    shape = {**PUBLISHED[name]}
    data = json.loads(KINDS[name].config(**shape).to_json_string(use_diff=False))
    (directory / "config.json").write_text(json.dumps({**data, "dtype": "bfloat16"}))
    return directory


@pytest.mark.parametrize("name", NEW)
def test_the_plan_of_a_published_shape(name: str, tmp_path: Path) -> None:
    place = config_file(name, tmp_path)
    done = run("plan", str(place), "--memory", "200GiB", "--backend", "reference", "--json")
    assert done.code == 0, done.err
    record, config = json.loads(done.out), ModelConfig.from_file(place)
    assert record["engine"] == "reference"
    lines = {line["name"]: line["bytes"] for line in record["lines"]}
    slots = record["limits"]["num_state_slots"]
    layers = [config.has_gdn(i) for i in range(config.num_layers)]
    assert slots == {"value": 64 if any(layers) else 0, "provenance": "default"}
    gdn = config.gdn
    state = 0 if gdn is None else gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim * 4 + (gdn.conv_kernel - 1) * gdn.conv_dim * 2
    assert lines.get("states", 0) == slots["value"] * (sum(layers) * state + (12 if any(layers) else 0))
    page = layers.count(False) * 2 * 16 * config.num_kv_heads * config.head_dim * 2 + 5
    assert record["pages"]["page_bytes"] == page
    assert lines["weights"] == 2 * config.num_parameters
    assert lines["step workspace"] == reference_workspace(config, resolve_limits(config, budget_bytes=200 * 2**30, device="cuda").limits, "bfloat16")
    kept = record["limits"]["num_snapshots"]
    assert (kept["value"] > 0, kept["provenance"]) == (any(layers), "memory" if any(layers) else "default")
    assert lines.get("snapshots", 0) == kept["value"] * (sum(layers) * state + (9 if any(layers) else 0))
    assert record["snapshots"] == ({"num_snapshots": kept["value"], "snapshot_bytes": sum(layers) * state + 9, "grid": 64} if any(layers) else None)
    said = f"at most at {kept['value']} place" in run("plan", str(place), "--memory", "200GiB", "--backend", "reference").out
    assert said == any(layers)


@pytest.mark.parametrize("name", NEW)
def test_the_plan_counts_what_the_engine_holds(name: str, tmp_path: Path) -> None:
    """Of every buffer that the ledger gave, the bytes that the plan has; in bfloat16, where states are wider than the model."""
    engine = open_engine(write_config(tmp_path, name), dtype="bfloat16", max_batch=3, num_pages=9)
    made = plan_memory(engine.model, engine.limits, "bfloat16")
    lines = {line.name: line.bytes for line in made.lines}
    held = {row.name: row for row in engine.ledger.rows()}
    assert lines["pages"] == sum(held[n].bytes for n in ("kv_keys", "kv_values", "page_references", "page_sealed"))
    names = ("conv_histories", "recurrent_states", "state_owner", "state_length")
    assert lines.get("states", 0) == sum(held[n].bytes for n in names if n in held)
    kept = ("conv_snapshots", "recurrent_snapshots", "snapshot_length", "snapshot_written", "snapshot_pins")
    assert lines.get("snapshots", 0) == sum(held[n].bytes for n in kept if n in held)
    if name in HYBRID:
        assert engine.limits.num_snapshots == 9 * 16 // 64
        assert (held["recurrent_snapshots"].dtype, held["conv_snapshots"].dtype) == ("float32", "bfloat16")
        assert (held["recurrent_states"].dtype, held["conv_histories"].dtype) == ("float32", "bfloat16")
        assert held["recurrent_states"].bytes == 4 * math.prod((2, 4, 6, 16, 24))  # 2 layers, a bucket of 4 slots, 6 heads of 16 x 24
        assert held["conv_histories"].bytes == 2 * math.prod((2, 4, 3, 2 * 2 * 16 + 6 * 24))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("chunk", "context", "change"), [(128, 512, {}), (16, 16, {}), (16, 16, {"num_experts": 512}), (16, 16, {"intermediate_size": 4000})])
@pytest.mark.parametrize("name", NEW)
def test_the_workspace_is_the_models_own_formula(name: str, chunk: int, context: int, change: dict[str, int], dtype: str) -> None:
    """That of its docstring, which tests/hybrid/test_memory.py measures, at the largest step: one row that fills it. Each kind of layer is once the largest."""
    config = ModelConfig.from_dict(json.loads(KINDS[name].config(**{**KINDS[name].shape, **change}).to_json_string(use_diff=False)))
    given = {"max_step_tokens": chunk, "max_chunk_tokens": chunk, "max_context": context, "page_size": PAGE_SIZE, "max_logit_tokens": 1}
    largest = bound(config, getattr(torch, dtype), [(context - chunk, chunk)])
    assert reference_workspace(config, resolve_limits(config, explicit=given).limits, dtype) == largest + SAMPLER_BYTES * config.vocab_size


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 192])
def test_pages_and_chunks_have_a_grid_in_common(page_size: int, tmp_path: Path) -> None:
    config = ModelConfig.from_file(write_config(tmp_path, "qwen3_next"))
    limits = resolve_limits(config, explicit={"page_size": page_size}).limits
    assert limits.snapshot_grid % 64 == limits.snapshot_grid % page_size == 0
    assert limits.snapshot_grid in (64, page_size)


@pytest.mark.parametrize("page_size", [3, 48, 63, 65, 96])
def test_a_page_that_shares_no_grid_with_chunks_is_refused(page_size: int, tmp_path: Path) -> None:
    """For models with states alone, whoever names it: an argument, a whole Limits, the environment."""
    config = ModelConfig.from_file(write_config(tmp_path / "hybrid", "qwen3_next"))
    other = resolve_limits(config).limits
    said = f"page_size = {page_size}: must divide 64 or be a multiple of it for a model with Gated DeltaNet layers"
    for given in ({"page_size": page_size}, replace(other, page_size=page_size)):
        with pytest.raises(LimitError, match=said):
            resolve_limits(config, explicit=given)
    with pytest.raises(LimitError, match=said):
        resolve_limits(config, environ={"TWINFER_PAGE_SIZE": str(page_size)})
    assert resolve_limits(ModelConfig.from_file(write_config(tmp_path / "dense", "qwen3_moe")), explicit={"page_size": page_size})


def test_pages_and_snapshots_share_a_budget(tmp_path: Path) -> None:
    """Slots and the pages of a longest request first, then a quarter of the rest for snapshots. Whatever is given is not lowered."""
    config = ModelConfig.from_file(config_file("qwen3_5_moe", tmp_path))
    first = {"max_context": 32768, "max_batch": 8}

    def found(memory: int, **more: int) -> tuple[Limits, dict[str, str], MemoryPlan]:
        resolved = resolve_limits(config, explicit={**first, **more}, budget_bytes=memory)
        made = plan_memory(config, resolved.limits, "bfloat16", memory)
        return resolved.limits, dict(resolved.provenance), made

    bare = replace(resolve_limits(config, explicit=first).limits, num_pages=32768 // 16, num_snapshots=0)
    made = plan_memory(config, bare, "bfloat16")
    least, page, snapshot = made.total, made.page_bytes, made.snapshot_bytes
    for spare in (0, page, 4 * snapshot - 1, 4 * snapshot, 41 * snapshot, 2000 * snapshot):
        limits, provenance, made = found(least + spare)
        assert limits.num_snapshots == spare // 4 // snapshot
        assert limits.num_pages == 32768 // 16 + (spare - limits.num_snapshots * snapshot) // page
        assert (limits.num_state_slots, limits.max_batch) == (8, 8)
        assert provenance["num_pages"] == provenance["num_snapshots"] == "memory"
        assert 0 <= least + spare - made.total < page
    # What one longest request needs is not there: no snapshots, and as many pages as there are.
    limits, *_ = found(least - page)
    assert (limits.num_pages, limits.num_snapshots) == (32768 // 16 - 1, 0)
    # A number that was given stays; the other one gets the rest, as far as it is of use.
    limits, provenance, _ = found(least + 41 * snapshot, num_snapshots=3)
    assert (limits.num_snapshots, provenance["num_snapshots"]) == (3, "argument")
    assert limits.num_pages == 32768 // 16 + 38 * snapshot // page
    limits, provenance, _ = found(least + 41 * snapshot, num_pages=2048)
    assert (limits.num_snapshots, provenance["num_snapshots"]) == (41, "memory")
    limits, *_ = found(least + 2000 * snapshot, num_pages=2048)
    assert limits.num_snapshots == 2048 * 16 // 64, "more than one for each point of the grid can't be hit"
    with pytest.raises(LimitError, match="num_snapshots = 42 needs"):
        found(least + 41 * snapshot, num_pages=2048, num_snapshots=42)


def test_snapshots_without_a_budget(tmp_path: Path) -> None:
    """A quarter of what pages get, or a few of large ones; from the environment if it says so; none off the engine that keeps no states."""
    small, large = ModelConfig.from_file(write_config(tmp_path / "small", "qwen3_next")), ModelConfig.from_file(config_file("qwen3_next", tmp_path))
    found = resolve_limits(small, dtype="float32").limits
    each = plan_memory(small, found, "float32").snapshot_bytes
    assert found.num_snapshots == min(2**26 // each, found.num_pages * 16 // 64)
    assert resolve_limits(large, explicit={"max_context": 4096}).limits.num_snapshots == 4
    assert resolve_limits(large, explicit={"num_pages": 11}).limits.num_snapshots == 11 * 16 // 64
    assert resolve_limits(large, explicit={"page_size": 256, "num_pages": 3}).limits.num_snapshots == 3
    found_by = resolve_limits(small, environ={"TWINFER_NUM_SNAPSHOTS": "0", "TWINFER_SNAPSHOT_INTERVAL": "640"})
    assert (found_by.limits.num_snapshots, found_by.provenance["num_snapshots"]) == (0, "environment TWINFER_NUM_SNAPSHOTS")
    assert (found_by.limits.snapshot_interval, found_by.provenance["snapshot_interval"]) == (640, "environment TWINFER_SNAPSHOT_INTERVAL")


def test_state_slots_are_found_by_the_chain(tmp_path: Path) -> None:
    config = ModelConfig.from_file(write_config(tmp_path, "qwen3_next"))
    found = resolve_limits(config, explicit={"max_batch": 5, "buckets": (2, 6)}, environ={})
    assert (found.limits.num_state_slots, found.provenance["num_state_slots"]) == (6, "default")
    for batch, slots in ((6, 6), (7, 8)):
        assert resolve_limits(config, explicit={"max_batch": batch, "buckets": (2, 6, 8)}).limits.num_state_slots == slots
    found = resolve_limits(config, environ={"TWINFER_NUM_STATE_SLOTS": "2"})
    assert (found.limits.num_state_slots, found.provenance["num_state_slots"]) == (2, "environment TWINFER_NUM_STATE_SLOTS")
    found = resolve_limits(config, explicit={"num_state_slots": 3}, environ={"TWINFER_NUM_STATE_SLOTS": "2"})
    assert (found.limits.num_state_slots, found.provenance["num_state_slots"]) == (3, "argument")
    with pytest.raises(LimitError, match="num_state_slots = 0: must be at least 1"):
        Engine.from_pretrained(tmp_path, random_seed=1, limits=replace(found.limits, num_state_slots=0))
