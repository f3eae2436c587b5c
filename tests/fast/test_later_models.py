"""The logic gate for the model types beyond dense Qwen3: in float32 each gives the reference's log probabilities and tokens. Not speed, not bits.

The models are tiny, made by transformers with every parameter random, with dims that kernels have. Schedules are those of test_logic_gate.py: chunks,
mixed steps, padding, preemption; both engines compute the plans of the fast one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fast.pair import GATE, Pair
from tests.hybrid import tiny
from twinfer.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPT = [int(i * 37 + 11) % 97 for i in range(140)]
KERNEL_DIMS: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
GDN_DIMS: dict[str, Any] = {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**KERNEL_DIMS, **GDN_DIMS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [1]},
    "qwen3_5": {**KERNEL_DIMS, **GDN_DIMS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True},
    "qwen3_5_moe": {**KERNEL_DIMS, **GDN_DIMS, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
    "qwen3_moe": {**KERNEL_DIMS, "num_hidden_layers": 2, "mlp_only_layers": [1]},
}


TIGHT = {"qwen3_moe": 6}  # pages that are too few for the three requests; with states, which are not shared, 8


@pytest.fixture(scope="module", params=CHANGES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / request.param, request.param, CHANGES[request.param])


@pytest.mark.parametrize("tight", [False, True])
def test_chunks_mixed_steps_padding_and_preemption(checkpoint: Path, tight: bool) -> None:
    """Roomy: padded steps as graphs have them, planned ahead. Tight: each step as it is, and somebody is preempted."""
    look_ahead, num_pages = (0, TIGHT.get(checkpoint.name, 8)) if tight else (1, 9)
    pair = Pair(checkpoint, graphs=not tight, tokenizer=False, look_ahead=look_ahead, page_size=8, num_pages=num_pages, max_chunk_tokens=8, max_context=48)

    def join(step: int) -> None:
        if step == 1 + look_ahead:
            pair.engine.add(PROMPT[50:57], replace(GREEDY, max_tokens=11))  # whole in one step
        if step == 3 + look_ahead:
            pair.engine.add(PROMPT[:18], GREEDY)

    pair.serve((PROMPT[:20], replace(GREEDY, max_tokens=14 if tight else 9)), before_step=join)
    plans = pair.new_plans()
    assert any((plan.length == 7).any() and (plan.start[plan.length == 7] == 0).any() for plan in plans), "no prompt was computed whole"
    assert sum(int((plan.length == 8).sum()) for plan in plans) >= 2, "no prompt was computed in chunks"
    assert any(plan.length.max() > 1 and plan.length.min() == 1 for plan in plans), "no step was mixed"
    if tight:
        assert pair.engine.scheduler.num_preemptions > 0
    else:
        assert any(plan.num_tokens == plan.num_rows == 3 for plan in plans), "no step of three rows was padded to four"
    found = pair.compare()
    assert found.num_positions >= 45
    assert found.largest <= GATE, f"{found.largest:.1e} nat from the reference"
    pair.close()
