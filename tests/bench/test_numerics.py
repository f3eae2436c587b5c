"""The numerics gates on a CPU, with float16 in place of bf16 (the interpreter has none): they pass for the fast engine, and fail for a fault of each kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinfer.bench import numerics
from twinfer.bench.models import BUNDLED, Model, fast_engine, load_model, reference_engine
from twinfer.bench.numerics import Check, gates, head_factor, kernel_check, kind_of, our_kernels, random_prompts, scaled, top1, widened
from twinfer.bench.record import read
from twinfer.bench.tap import record, score
from twinfer.engine.checkpoint import EMBEDDING, HEAD, random_weights
from twinfer.golden.manifest import load_goldens

MICRO = BUNDLED.parent / "micro"
DOCUMENT = "tragedy"
LENGTHS = (17, 8)


@pytest.fixture(scope="module")
def micro() -> Model:
    return load_model(str(MICRO), "float16")


def random_micro() -> Model:
    """The micro shape with random weights, so flat that its head has to be scaled."""
    model = load_model(str(MICRO), "float16")
    return replace(model, name="random", weights=random_weights(model.config, 3, torch.float16), random_seed=3)


def by_metric(checks: list[Check]) -> dict[tuple[str, str], Check]:
    return {(c.check, c.metric): c for c in checks}


@pytest.fixture(scope="module")
def random_checks() -> dict[tuple[str, str], Check]:
    model = random_micro()
    return by_metric(list(gates(model, random_prompts(model.config.vocab_size, LENGTHS))))


def test_every_gate_passes_on_random_weights(random_checks: dict[tuple[str, str], Check]) -> None:
    # So few positions have no near tie that float16 turns round: the floor of the regret is zero, which does not pass.
    assert [c.metric for c in random_checks.values() if not c.passed] == ["regret"]
    assert random_checks["numerics_float16", "regret"].floor == 0
    assert random_checks["head", "factor"].value > 1
    assert 0.5 < random_checks["head", "top1_probability"].value < 0.7
    logic = random_checks["logic_fp32", "max"]
    assert 0 < logic.value < 1e-4
    assert logic.detail is not None and logic.detail["positions"] == sum(LENGTHS)
    for metric in ("mean", "p99", "worst_request_mean"):
        check = random_checks["numerics_float16", metric]
        assert check.floor is not None and check.limit == pytest.approx(1.5 * check.floor)


def test_a_fault_of_the_fast_engine_fails_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(model: Model, *arguments: Any, **others: Any) -> Any:
        name = "model.layers.0.self_attn.k_norm.weight"
        return fast_engine(replace(model, weights=model.weights | {name: model.weights[name] * 1.1}), *arguments, **others)

    monkeypatch.setattr(numerics, "fast_engine", faulty)
    model = random_micro()
    found = by_metric(list(gates(model, random_prompts(model.config.vocab_size, (9, 5)))))
    assert not found["logic_fp32", "max"].passed
    assert not found["numerics_float16", "mean"].passed


def test_stored_goldens_are_compared_at_enough_positions(micro: Model) -> None:
    case = load_goldens(MICRO).documents[DOCUMENT].before("short", 24)
    prompt = [case.token_ids.tolist()]
    engine = reference_engine(micro, numerics.limits_of(prompt), prefix_cache=False)
    scores = score(engine, prompt, [case.fp32])
    assert all(c.passed for c in numerics.golden_checks("micro", "fp32", [case.fp32], scores, least=10))
    assert not any(c.passed for c in numerics.golden_checks("micro", "fp32", [case.fp32], scores, least=800))
    worse = [replace(s, logprobs=s.logprobs + 0.5) for s in scores]
    failed = {c.metric for c in numerics.golden_checks("micro", "fp32", [case.fp32], worse, least=10) if not c.passed}
    assert failed == {"mean", "p99"}


def test_both_engines_show_the_logits_of_every_position(micro: Model) -> None:
    wide = widened(micro)
    prompts = random_prompts(micro.config.vocab_size, (7, 3))
    limits = numerics.limits_of(prompts)
    right = record(reference_engine(wide, limits, prefix_cache=False), prompts, 5)
    again = score(fast_engine(wide, limits, prefix_cache=False), prompts, right)
    for golden, scores in zip(right, again, strict=True):
        assert np.allclose(golden.logprobs, scores.logprobs, atol=1e-4)
        assert np.array_equal(golden.top1_ids, scores.top1_ids)
    few = [replace(right[0], positions=right[0].positions[:0], top_ids=right[0].top_ids[:0])]
    assert score(reference_engine(wide, limits), prompts[:1], few)[0].logprobs.shape == (0, 5)


def test_a_position_that_never_came_is_an_error(micro: Model) -> None:
    prompts = random_prompts(micro.config.vocab_size, (4,))
    limits = numerics.limits_of(prompts)
    (golden,) = record(reference_engine(micro, limits), prompts, 3)
    beyond = replace(golden, positions=golden.positions + 1)
    with pytest.raises(RuntimeError, match="1 positions were not computed"):
        score(reference_engine(micro, limits), prompts, [beyond])


def test_a_floor_of_zero_fails(micro: Model) -> None:
    prompts = random_prompts(micro.config.vocab_size, (6,))
    engine = reference_engine(micro, numerics.limits_of(prompts), prefix_cache=False)
    right = record(engine, prompts, 4)
    same = score(engine, prompts, right)
    checks = list(numerics.numerics_checks("micro", "float16", right, same, same))
    assert {c.floor for c in checks} == {0.0}
    assert not any(c.passed for c in checks)


def test_the_head_is_scaled_to_the_wanted_probability() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    for wanted in (0.3, 0.6, 0.9):
        assert top1(logits, head_factor(logits, wanted)) == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(ValueError, match="all equal"):
        head_factor(torch.zeros(3, 10))


def test_a_scaled_head_leaves_the_embedding(micro: Model) -> None:
    wide = widened(micro)
    assert (wide.weights[HEAD] is wide.weights[EMBEDDING]) == (micro.weights[HEAD] is micro.weights[EMBEDDING])
    model = scaled(micro, 2.0)
    assert torch.equal(model.weights[HEAD], micro.weights[HEAD] * 2)
    assert torch.equal(model.weights[EMBEDDING], micro.weights[EMBEDDING])


def test_kernels_are_ours_by_name() -> None:
    ours = our_kernels()
    assert {"attention_kernel", "matmul_kernel", "rms_norm_kernel", "draw_kernel", "swiglu_kernel", "qk_norm_rope_write_kernel"} <= ours
    kinds = {
        "matmul_kernel": "ours",
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNN": "cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "cublas",
        "Memcpy HtoD (Pinned -> Device)": "copy",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>": "gather",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "foreign",
        "flash_fwd_kernel": "foreign",
        "my_matmul_kernel": "foreign",
    }
    assert {name: kind_of(name, ours) for name in kinds} == kinds


def test_a_foreign_kernel_fails_and_so_does_none_of_ours() -> None:
    good = {"attention_kernel": 3, "nvjet_sm90_tst": 2, "Memset (Device)": 1}
    assert kernel_check("m", good, cublas_allowed=True).passed
    assert not kernel_check("m", good, cublas_allowed=False).passed
    assert not kernel_check("m", good | {"triton_poi_fused_add_0": 1}, cublas_allowed=True).passed
    assert not kernel_check("m", {"Memset (Device)": 1}, cublas_allowed=True).passed
    assert not kernel_check("m", {}, cublas_allowed=True).passed


@pytest.mark.parametrize("passed", [True, False])
def test_the_command_prints_a_line_a_check_and_records_them(
    passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("micro", "logic_fp32", "max", 2e-5, "nat", passed, 1e-3, None, {"positions": 7})
    monkeypatch.setattr(numerics, "gates", lambda model, **others: iter([check]))
    arguments = ["--model", str(MICRO), "--device", "cpu", "--dtype", "float32", "--record", "--records", str(tmp_path), "--commit", "0123456789ab"]
    assert numerics.main(arguments) == (0 if passed else 1)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[0]) == {"model": "micro", "check": "logic_fp32", "metric": "max", "value": 2e-5, "unit": "nat", "passed": passed, "limit": 1e-3,
                                    "detail": {"positions": 7}}  # fmt: skip
    assert any("logic_fp32" in line and ("passed" if passed else "FAILED") in line for line in lines[1:])
    (kept,) = [kept for file in tmp_path.iterdir() for kept in read(file)]
    assert (kept.workload, kept.metric, kept.value, kept.detail["passed"]) == ("gate_logic_fp32", "max", 2e-5, passed)


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics.main(["--model", "/nowhere", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
