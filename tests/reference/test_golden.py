"""The reference engine against HF's goldens of the bundled and the micro model: logic gate in fp64 and fp32, numerics gate in bf16, bits live.

Every comparison runs through the whole engine: scheduler, pages, flatten, executor. Tolerances stand in twinfer.golden.compare.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from twinfer.golden.compare import FP32, FP64, Tolerance, compare, compare_all, pool
from twinfer.golden.manifest import Goldens, load_goldens
from twinfer.golden.widened import load_stock

from .recorder import DEVICE, GOLDEN, teacher_forced

MODELS = ("qwen3", "micro")
# Positions that the goldens hold (bytes are budgeted); a comparison over fewer would be a gate that shrank.
POSITIONS = {("qwen3", "fp64"): 2450, ("qwen3", "fp32"): 849, ("micro", "fp64"): 401, ("micro", "fp32"): 232}


@lru_cache
def goldens(model: str) -> Goldens:
    return load_goldens(GOLDEN / model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FP64), ("float32", FP32)])
def test_whole_prefill(model: str, dtype: str, tolerance: Tolerance) -> None:
    against = {"float64": "fp64", "float32": "fp32"}[dtype]
    documents = goldens(model).documents.values()
    result = compare_all(documents, lambda ids: teacher_forced(model, dtype, ids), against=against, tolerance=tolerance).check()
    assert result.num_positions == POSITIONS[model, against]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FP64), ("float32", FP32)])
def test_every_boundary_length_alone(model: str, dtype: str, tolerance: Tolerance) -> None:
    against = {"float64": "fp64", "float32": "fp32"}[dtype]
    short = [case for case in goldens(model).cases.values() if len(case.token_ids) <= 260]
    assert len(short) >= 10
    compare_all(short, lambda ids: teacher_forced(model, dtype, ids), against=against, tolerance=tolerance).check()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FP64), ("float32", FP32)])
def test_token_by_token_through_the_cache(dtype: str, tolerance: Tolerance) -> None:
    against = {"float64": "fp64", "float32": "fp32"}[dtype]
    documents = [d for d in goldens("qwen3").documents.values() if against == "fp32" or len(d.token_ids) < 2000]
    if dtype == "float64":
        documents.append(goldens("qwen3").cases["comedy_1025"])
    result = compare_all(
        documents, lambda ids: teacher_forced("qwen3", dtype, ids, max_step_tokens=1, max_chunk_tokens=1), against=against, tolerance=tolerance
    ).check()
    assert result.num_positions >= 800


@pytest.mark.parametrize("chunk", [7, 16, 100])
def test_chunked_prefill(chunk: int) -> None:
    document = next(iter(goldens("qwen3").documents.values())).before("chunked", 1025)
    logits = teacher_forced("qwen3", "float64", document.token_ids, max_step_tokens=chunk, max_chunk_tokens=chunk)
    assert compare(document, logits, tolerance=FP64).check().num_positions == 1025


@pytest.mark.skipif(DEVICE != "cpu", reason="the gate is stated for a CPU; on an H200 the bits differ (bench/records)")
def test_bf16_to_the_bit_against_hf_live() -> None:
    """Same process, one request at a time, same call shapes: whole prefill, then token by token through both caches."""
    from transformers import DynamicCache

    ids = next(iter(goldens("qwen3").documents.values())).token_ids[:900]
    hf = load_stock(GOLDEN / "qwen3", "bfloat16").to(DEVICE)
    with torch.inference_mode():
        tokens = torch.from_numpy(ids)[None].to(DEVICE)
        whole = hf(input_ids=tokens, use_cache=False).logits[0].double().cpu().numpy()
        cache = DynamicCache(config=hf.config)
        steps = [hf(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0, 0] for i in range(len(ids))]
        single = torch.stack(steps).double().cpu().numpy()
    assert np.array_equal(teacher_forced("qwen3", "bfloat16", ids), whole)
    ours = teacher_forced("qwen3", "bfloat16", ids, max_step_tokens=1, max_chunk_tokens=1)
    assert np.array_equal(ours, single)


@pytest.mark.skipif(DEVICE != "cpu", reason="the floor is HF's on a CPU; another device needs a floor of its own, measured in the same run")
def test_bf16_against_stored_goldens_by_the_numerics_metrics() -> None:
    """Within 1.5 times the distance that HF's own bf16 has from HF's fp32 over the same positions.

    Regret is that of one position, so it jumps with the processor: HF's stored bits have 0.0435; on an H200, and on a CPU with one thread where HF's live
    bits are the very same as ours, it is 0.0719. Its limit is 1.5 times that; the fast engine's own (0.2) is wider.
    """
    documents = goldens("qwen3").documents.values()
    floor = pool("HF bf16 against fp32", documents, "fp32", "bf16")
    assert floor.mean > 0
    tolerance = replace(Tolerance.multiple_of("numerics", floor, 1.5), regret=1.5 * max(floor.regret, 0.0719))
    result = compare_all(documents, lambda ids: teacher_forced("qwen3", "bfloat16", ids), against="fp32", tolerance=tolerance).check()
    assert result.num_positions >= 800
