"""Floors against the published ones for an H200 (4.3 TB/s, 715 TFLOP/s) and against counts made by hand. Not a speed test."""

from __future__ import annotations

import pytest

from twinfer.bench.roofline import CEILINGS, Ceiling, Row, cache_bytes_per_token, distinct_experts, main, step_work, workload_floor
from twinfer.bench.shapes import shape_config
from twinfer.bench.workloads import WORKLOADS, workload
from twinfer.config import ModelConfig

H200 = CEILINGS["nvidia-h200"]


def tiny() -> ModelConfig:
    """2 layers, 4 wide, one head of 2, MLP 8, vocabulary 10, tied: 32 + 96 weights a layer, a head of 40."""
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": 10,
            "hidden_size": 4,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
            "tie_word_embeddings": True,
        }
    )


def test_a_step_counted_by_hand() -> None:
    work = step_work(tiny(), [Row(start=5, length=1), Row(start=0, length=3, samples=False)])
    assert work.weight_bytes == (2 * 128 + 40) * 2
    assert work.weight_flop == 2 * (2 * 128 * 4 + 40)
    # 6 + 3 keys and values read, 4 written, 2 layers x 2 x 2 elements of 2 bytes each; one row of logits
    assert work.cache_bytes == (9 + 4) * 16 + 10 * 2
    # the decode row sees 6 keys, the chunk 1 + 2 + 3; 4 FLOP x 2 elements x 2 layers
    assert work.cache_flop == (6 + 6) * 16


def test_shared_tokens_are_read_once_but_computed_for_each_row() -> None:
    alone = step_work(tiny(), [Row(8, 1)] * 3)
    shared = step_work(tiny(), [Row(8, 1, shared=8)] * 3)
    assert alone.cache_bytes - shared.cache_bytes == 2 * 8 * 16
    assert alone.cache_flop == shared.cache_flop


def test_phases_do_not_hide_each_other() -> None:
    work = step_work(tiny(), [Row(5, 1)])
    assert work.seconds(Ceiling(1.0, 1e9)) == pytest.approx(work.weight_bytes + work.cache_bytes)
    assert work.seconds(Ceiling(1e9, 1.0)) == pytest.approx(work.weight_flop + work.cache_flop)


# Published floors of one decode step at batch 1 and 1024 tokens of context, ms (four figures given there).
@pytest.mark.parametrize(("shape", "published"), [("qwen3-0.6b", 0.305), ("qwen3-4b", 1.906), ("qwen3-8b", 3.555), ("qwen3-32b", 14.939)])
def test_decode_floor_at_1024_tokens(shape: str, published: float) -> None:
    got = step_work(shape_config(shape), [Row(1024, 1)]).seconds(H200) * 1e3
    assert got == pytest.approx(published, rel=0.003)


# Published floors of workloads (the loop replayed with its tail), with the tolerance and where the difference comes from.
PUBLISHED = [
    # the published 3.56 ms is at 1024 tokens of context, the workload's mean is 256
    ("qwen3-8b", "bs1_128_256", "tpot_ms", 3.56, 0.01),
    # the published replay prefills in one go; ours mixes prompts into decode steps, as the scheduler does: within 2.5 % either way
    ("qwen3-8b", "conc64_128_256", "out_tok_s", 11400, 0.025),
    ("qwen3-8b", "conc64_2048_256", "out_tok_s", 3260, 0.025),
    ("qwen3-8b", "conc256_1024_128", "out_tok_s", 4610, 0.025),
    ("qwen3-8b", "prefill_8192_1", "ttft_ms", 187, 0.003),
    # published to two figures, for the same distribution of lengths drawn in another order
    ("qwen3-8b", "nano_256", "out_tok_s", 12600, 0.025),
    ("qwen3-0.6b", "nano_256", "out_tok_s", 36000, 0.025),
    # published for the same blocks with a vocabulary of 151936; experts and states counted as here
    ("qwen3.6-35b-a3b", "bs1_128_256", "tpot_ms", 1.41, 0.02),
    ("qwen3.6-35b-a3b", "conc64_128_256", "out_tok_s", 3760, 0.025),
]


@pytest.mark.parametrize(("shape", "name", "metric", "published", "tolerance"), PUBLISHED)
def test_workload_floors(shape: str, name: str, metric: str, published: float, tolerance: float) -> None:
    floor = workload_floor(shape_config(shape), WORKLOADS[name], H200)
    assert floor[metric] == pytest.approx(published, rel=tolerance)
    assert floor["done"] == WORKLOADS[name].num_requests
    assert floor["errors"] == 0


def test_shared_prompt_floor_is_set_by_products_not_bytes() -> None:
    """Published as "about 30k tok/s if shared pages are read once", without a replay; ours is 38k. Both are far from the 7.9k measured on vLLM."""
    config, load = shape_config("qwen3-8b"), WORKLOADS["prefix_burst_256x3000_64"]
    floor = workload_floor(config, load, H200)
    assert 30000 < floor["out_tok_s"] < 40000
    by_bytes = workload_floor(config, load, Ceiling(H200.bytes_per_s, 1e30))
    assert by_bytes["out_tok_s"] > 1.4 * floor["out_tok_s"]


def test_distinct_experts() -> None:
    config = shape_config("qwen3-30b-a3b")
    assert distinct_experts(config, 0) == 0
    assert distinct_experts(config, 1) == pytest.approx(8)
    assert distinct_experts(config, 2) == pytest.approx(8 + 8 * (1 - 8 / 128)), "the second token's that the first has not chosen"
    assert distinct_experts(config, 8192) == pytest.approx(128)
    assert distinct_experts(shape_config("qwen3-8b"), 5) == 0


def test_a_state_is_read_only_where_there_is_one() -> None:
    config = shape_config("qwen3.5-4b")
    first, second = (step_work(config, [Row(start, 64)]).cache_bytes for start in (0, 64))
    keys = 64 * cache_bytes_per_token(config)
    assert second - first == keys + 24 * 32 * 128 * 128 * 4


def test_a_faster_device_is_never_slower() -> None:
    load = workload("nano_256_div16")
    base = workload_floor(shape_config("qwen3-8b"), load, H200)
    faster = workload_floor(shape_config("qwen3-8b"), load, Ceiling(2 * H200.bytes_per_s, 2 * H200.flop_per_s))
    assert faster["out_tok_s"] == pytest.approx(2 * base["out_tok_s"])


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-8b", "--workload", "bs1_128_256"]) == 0
    assert "3.529" in capsys.readouterr().out
    assert main(["--workload", "nothing"]) == 2
    assert "unknown" in capsys.readouterr().err
