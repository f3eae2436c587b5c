"""Every boundary length of the goldens (one token, a page and one around it, chunks, 1025, 2049) through the whole engine, alone, chunked and batched."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from twinfer.golden.compare import FP32, FP64, Tolerance, compare
from twinfer.golden.manifest import Case, Goldens, load_goldens
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .recorder import GOLDEN, Recorder, open_engine, teacher_forced

PRECISIONS = [("float64", "fp64", FP64), ("float32", "fp32", FP32)]
LENGTHS = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025, 2049}


@lru_cache
def goldens(model: str) -> Goldens:
    return load_goldens(GOLDEN / model)


def by_length(model: str) -> dict[int, Case]:
    """The golden cases that are cut at a boundary, by their lengths."""
    return {len(case.token_ids): case for case in goldens(model).cases.values() if case.document in ("tragedy", "comedy")}


def check(case: Case, dtype: str, against: str, tolerance: Tolerance, **limits: int) -> None:
    """A case alone, with chunks and pages as given: every position that the golden holds."""
    logits = teacher_forced(case_model(case), dtype, case.token_ids, **limits)
    expected = len({"fp64": case.fp64, "fp32": case.fp32}[against].positions)
    assert compare(case, logits, against=against, tolerance=tolerance).check().num_positions == expected


def case_model(case: Case) -> str:
    """The bundled model that a case belongs to."""
    return "qwen3" if case.fp64.vocab_size == 2048 else "micro"


@pytest.mark.parametrize("model", ["qwen3", "micro"])
def test_the_goldens_hold_every_length(model: str) -> None:
    assert set(by_length(model)) == LENGTHS


@pytest.mark.parametrize(("dtype", "against", "tolerance"), PRECISIONS, ids=["fp64", "fp32"])
@pytest.mark.parametrize("length", [1025, 2049])
@pytest.mark.parametrize("model", ["qwen3", "micro"])
def test_one_past_a_power_of_two(model: str, length: int, dtype: str, against: str, tolerance: Tolerance) -> None:
    """Whole in a context that it just fills, in chunks that leave one token over, and in chunks that leave all but one."""
    case = by_length(model)[length]
    chunks = [(length - 1) // 8] if dtype == "float64" else [length - 1, 129]  # a whole prompt of 2049 in fp64 takes seconds: test_golden.py has it
    shapes = [{"max_step_tokens": chunk, "max_chunk_tokens": chunk} for chunk in chunks]
    if model == "micro" and dtype == "float32":
        shapes.append({"max_step_tokens": length, "max_chunk_tokens": length, "max_context": length + 1, "num_pages": -(-(length + 1) // 16)})
    for limits in shapes:
        check(case, dtype, against, tolerance, **limits)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_length_in_chunks(chunk: int, page_size: int) -> None:
    """micro in fp64: lengths one below, at and one past a page and a chunk, for chunks that end on pages and between them."""
    limits = {"max_step_tokens": chunk, "max_chunk_tokens": chunk, "page_size": page_size, "num_pages": 320 // page_size, "max_context": 320}
    engine = open_engine("micro", "float64", **limits)
    engine.scheduler.prefix_cache = False  # each case is computed whole
    recorder = Recorder(engine)
    for sequence, length in enumerate(sorted(n for n in LENGTHS if n <= (65 if chunk == 1 else 257))):
        case = by_length("micro")[length]
        engine.generate([case.token_ids.tolist()], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        result = compare(case, recorder.of(sequence), tolerance=FP64).check()
        assert result.num_positions == len(case.fp64.positions) == length


@pytest.mark.parametrize(("model", "dtype", "against", "tolerance"), [("qwen3", *PRECISIONS[1]), ("micro", *PRECISIONS[0]), ("micro", *PRECISIONS[1])])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_all_lengths_in_one_batch(model: str, dtype: str, against: str, tolerance: Tolerance, prefix_cache: bool) -> None:
    """Sixteen prompts at once in mixed steps: without the cache every position is compared, with it those that no hit spared."""
    engine = open_engine(model, dtype, max_batch=16, max_step_tokens=192, max_chunk_tokens=65, num_pages=320)
    engine.scheduler.prefix_cache = prefix_cache
    recorder = Recorder(engine)
    cases = {engine.add(Request(tuple(case.token_ids.tolist()), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))): case
             for case in by_length(model).values()}
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.num_prefix_hits > 0) is prefix_cache
    compared = 0
    for sequence, case in cases.items():
        positions = sorted(position for position in recorder.logits[sequence] if position < len(case.token_ids))
        assert prefix_cache or positions == list(range(len(case.token_ids)))
        assert positions[-1] == len(case.token_ids) - 1
        logits = np.stack([recorder.logits[sequence][position][0] for position in positions])
        compared += compare(case, logits, positions, against=against, tolerance=tolerance).check().num_positions
    assert compared > 300
