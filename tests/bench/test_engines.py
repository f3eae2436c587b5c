"""Peers, gate, host step and the run command on real engines and the micro model. Figures are not looked at, only what they are figures of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twinfer.bench import run
from twinfer.bench.gate import Equality, GateFailed, check_operation, compare_engines, compare_with_transformers
from twinfer.bench.host_step import HostStep
from twinfer.bench.load import closed_loop, run_workload
from twinfer.bench.models import BUNDLED, Model, fast_engine, limits_for, load_model, pages_at_once, reference_engine, transformers_model
from twinfer.bench.peers import EnginePeer, TransformersPeer
from twinfer.bench.record import read
from twinfer.bench.shapes import shape_config
from twinfer.bench.workloads import WORKLOADS, Item, Span, Workload, workload
from twinfer.kernels.embedding.operation import EMBEDDING
from twinfer.kernels.operation import Operation
from twinfer.kernels.swiglu.operation import SWIGLU
from twinfer.sampling import SamplingParams

MICRO = BUNDLED.parent / "micro"
LOAD = Workload("test", 5, 3, Span(2, 9), Span(2, 6))


@pytest.fixture(scope="module")
def micro() -> Model:
    return load_model(str(MICRO), "float64")


@pytest.fixture(scope="module")
def theirs(micro: Model) -> Any:
    return transformers_model(micro)


def test_padded_transformers_batches_write_what_our_engine_writes(micro: Model, theirs: Any) -> None:
    items = LOAD.items(micro.config.vocab_size)
    peer = TransformersPeer(theirs, 3, keep=True)
    assert closed_loop(peer, items, 3).metrics()["done"] == len(items)
    engine = reference_engine(micro, limits_for(LOAD))
    for key, item in enumerate(items):
        params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True)
        assert list(engine.generate([item.prompt], params)[0].tokens) == peer.generated[key]


def test_an_engine_under_load_ends_every_request_and_frees_every_page(micro: Model) -> None:
    engine = reference_engine(micro, limits_for(LOAD), audit="full")
    outcome = run_workload(EnginePeer(engine), LOAD, micro.config.vocab_size)
    assert outcome.metrics()["done"] == LOAD.num_requests
    assert [s.num_tokens for s in outcome.served] == [output for _, output in LOAD.lengths()]
    assert engine.scheduler.pool.num_held == 0
    assert engine.scheduler.num_preemptions == 0


def test_a_refused_request_is_an_error_of_that_request_alone(micro: Model) -> None:
    peer = EnginePeer(reference_engine(micro, limits_for(LOAD)))
    outcome = closed_loop(peer, [Item((1, 2), 2), Item((1,) * 100, 2), Item((3,), 2)], 2)
    assert [s.error is None for s in outcome.served] == [True, False, True]
    assert "max_context" in str(outcome.served[1].error)


def test_a_shared_prompt_hits_the_prefix_cache(micro: Model) -> None:
    load = Workload("shared", 3, 3, Span(40, 40), Span(2, 2), shared_prompt=True)
    engine = reference_engine(micro, limits_for(load))
    run_workload(EnginePeer(engine), load, micro.config.vocab_size)
    assert engine.scheduler.num_prefix_hits == 3 * 32  # two whole pages of 16 for each request after the warming one


def test_the_gate_passes_for_equal_engines(micro: Model, theirs: Any) -> None:
    engine = reference_engine(micro, limits_for(LOAD))
    equality = compare_with_transformers(engine, theirs, [(1, 2, 3), (4, 5)], max_tokens=3)
    assert equality.num_positions == (2 + 3) + (1 + 3)
    assert equality.max_nat < 1e-5  # transformers casts to fp32 in places, whatever the dtype
    assert equality.check() is equality


def test_the_gate_fails_for_a_fault(micro: Model, theirs: Any) -> None:
    broken = dict(micro.weights)
    name = "model.layers.0.self_attn.k_norm.weight"
    broken[name] = broken[name] * 1.1
    engine = reference_engine(Model("broken", micro.config, micro.source, broken, None), limits_for(LOAD))
    with pytest.raises(GateFailed, match="differ by"):
        compare_with_transformers(engine, theirs, [(1, 2, 3), (4, 5)], max_tokens=3).check()


def test_the_gate_of_our_own_pair_passes_and_sees_a_fault() -> None:
    micro = load_model(str(MICRO), "float32")
    reference, prompts = reference_engine(micro, limits_for(LOAD)), [(1, 2, 3), (4, 5)]
    right = compare_engines(reference, fast_engine(micro, limits_for(LOAD, fast=True)), prompts, max_tokens=2)
    assert right.check().num_positions == (3 + 2 - 1) + (2 + 2 - 1)
    name = "model.layers.0.self_attn.k_norm.weight"
    broken = replace(micro, weights=micro.weights | {name: micro.weights[name] * 1.1})
    with pytest.raises(GateFailed, match="differ by"):
        compare_engines(reference, fast_engine(broken, limits_for(LOAD, fast=True)), prompts, max_tokens=2).check()


def test_the_gate_of_an_operation_passes_and_sees_a_fault() -> None:
    for operation in (SWIGLU, EMBEDDING):
        example = operation.make(operation.cases[0], torch.float32, torch.Generator().manual_seed(0))
        assert check_operation(operation, example, torch.float32) <= operation.tolerance["float32"]

        def wrong(out: torch.Tensor, operation: Operation = operation, **others: Any) -> None:
            operation.triton(out=out, **others)
            out += 1e-4

        with pytest.raises(GateFailed, match="differ by"):
            check_operation(replace(operation, triton=wrong), example, torch.float32)


@pytest.mark.parametrize("equality", [Equality("a / b", 0, 0.0), Equality("a / b", 5, float("nan")), Equality("a / b", 5, float("inf"))])
def test_the_gate_fails_where_nothing_was_compared_or_nothing_is_a_number(equality: Equality) -> None:
    with pytest.raises(GateFailed):
        equality.check()


def test_limits_hold_the_whole_workload_at_once() -> None:
    limits = limits_for(workload("conc256_1024_128"))
    assert (limits.max_batch, limits.max_context, limits.num_pages) == (256, 1152, 256 * 72)
    assert limits_for(workload("prefill_8192_1")).max_step_tokens == 8192


def test_one_engine_has_room_for_every_workload() -> None:
    limits = limits_for(list(WORKLOADS.values()), fast=True)
    assert (limits.page_size, limits.look_ahead, limits.max_logit_tokens, limits.max_step_tokens) == (64, 1, 256, 8192)
    assert (limits.max_batch, limits.max_context) == (256, 8193)
    for load in WORKLOADS.values():
        alone = limits_for(load, fast=True)
        assert alone.num_pages <= limits.num_pages
        assert alone.max_step_context <= limits.max_step_context
    # 46 whole pages of the shared prompt; of 3065 tokens the rest, two pages, for each request
    assert pages_at_once(WORKLOADS["prefix_burst_256x3000_64"], 64, 1) == 46 + 256 * 2


def test_the_host_step_is_the_step_that_it_says() -> None:
    host = HostStep(batch=8, context=64, page_size=16, room=40)
    for _ in range(20):
        host.run("plan", "audit", "flatten", "page_list")
        flat = host.flat
        assert flat.num_rows == flat.num_tokens == 8
        assert all(64 - 16 < context <= 64 + 25 for context in flat.context.tolist())
        assert len(set(host.page_indices.tolist())) == len(host.page_indices) > 0, "no page is shared"
        host.run("commit")
    with pytest.raises(ValueError, match="not next"):
        host.run("audit")


def test_the_run_command_records_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(MICRO), "--workload", "conc64_128_256,bs1_128_256", "--scale", "32", "--engine", "reference", "--engine", "transformers"]
    assert run.main([*arguments, "--repeats", "2", "--record", "--records", str(tmp_path), "--notes", "a test", "--commit", "0123456789ab"]) == 0
    every = [record for file in tmp_path.iterdir() for record in read(file)]
    records = [r for r in every if r.workload == "conc64_128_256_div32"]
    assert {r.workload for r in every} == {"conc64_128_256_div32", "bs1_128_256_div32"}
    figures = {(r.engine, r.metric) for r in records}
    assert figures == {(e, m) for e in ("reference", "transformers") for m in run.SHOWN}
    assert all(len(r.detail["repeats"]) == 2 for r in records)
    assert {r.commit for r in records} == {"0123456789ab"}
    assert {r.model for r in records} == {"micro"}
    assert all(r.value == 7 for r in records if r.metric == "done")
    assert all("a test" in str(r.notes) for r in records)
    assert "conc64_128_256_div32" in capsys.readouterr().out.replace("\n", "")


def test_the_open_loop_and_a_first_round_have_records_of_their_own(tmp_path: Path) -> None:
    arguments = ["--model", str(MICRO), "--workload", "bs1_128_256_div64", "--record", "--records", str(tmp_path)]
    assert run.main([*arguments, "--rate", "1000"]) == 0
    assert run.main([*arguments, "--first-round", "--engine", "transformers"]) == 0
    records = [record for file in tmp_path.iterdir() for record in read(file)]
    assert {r.workload for r in records} == {"bs1_128_256_div64_rate1000", "bs1_128_256_div64_first"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing"], "unknown"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--engine", "nothing"], "engine"),
        (["--repeats", "0"], "repeats"),
        (["--scale", "0"], "scale"),
        (["--rate", "-1", "--scale", "64"], "rate"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = [] if "--model" in arguments else ["--model", str(MICRO)]
    assert run.main([*first, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_nothing_is_recorded_when_a_request_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: Model) -> None:
    def failing(*arguments: object) -> Any:
        peer = EnginePeer(reference_engine(micro, limits_for(LOAD)))
        yield run.Measured("reference", LOAD, (closed_loop(peer, [Item((1,), 2), Item((1,) * 100, 2)], 2),))

    monkeypatch.setattr(run, "measure", failing)
    assert run.main(["--model", str(MICRO), "--record", "--records", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_fast_engine_is_measured_and_its_bits_are_looked_at() -> None:
    model = load_model(str(MICRO), "float32")
    loads = [Workload("several", 3, 2, Span(3, 5), Span(2, 2)), Workload("one", 1, 1, Span(2, 2), Span(2, 2))]
    several, one = run.measure(model, "fast", loads)
    assert [m.figures["done"] for m in (several, one)] == [3, 1]
    assert several.law2 is True
    assert not several.failed
    assert "model.norm.weight" in model.weights, "the weights are still there for the next engine"


def test_the_look_at_the_bits_can_fail() -> None:
    """An engine whose every step adds a little to the logits, more in a larger step."""
    engine = fast_engine(load_model(str(MICRO), "float32"), limits_for(LOAD, fast=True))
    executor: Any = engine.executor
    show = executor._show_logits

    def disturbed(plan: Any, flat: Any, tap: Any) -> None:
        show(plan, flat, lambda plan, flat, first, logits: tap(plan, flat, first, logits + 1e-4 * plan.num_rows))

    assert run.bits_hold(engine, num_tokens=1) is True
    executor._show_logits = disturbed
    assert run.bits_hold(engine, num_tokens=1) is False


def test_figures_stand_beside_floors_and_peers(micro: Model) -> None:
    outcomes = tuple(closed_loop(EnginePeer(reference_engine(micro, limits_for(LOAD))), LOAD.items(micro.config.vocab_size), 3) for _ in range(2))
    config = shape_config("qwen3-8b")
    measured = run.Measured("fast", WORKLOADS["conc64_128_256"], outcomes)
    (row,) = run.summary_rows("qwen3-8b", config, "nvidia-h200", [measured], 8192)
    cells = dict(zip(run.SUMMARY, row, strict=False))
    speed = sorted(outcome.metrics()["out_tok_s"] for outcome in outcomes)
    assert row[row.index("7,512") + 1] == f"{(speed[0] + speed[1]) / 2 / 7512:.2f}"
    assert cells["metric"] == "out_tok_s"
    assert float(cells["floor"].replace(",", "")) > 7512
    assert run._speed("tpot_ms", 2.0, 5.0) == "2.50"  # less time is more speed
