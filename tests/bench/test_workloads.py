"""Workloads and shapes: the published names and numbers, the same prompts every time. Not how they are driven."""

from __future__ import annotations

import hashlib

import pytest

from twinfer.bench.shapes import SHAPES, shape_config, shape_source
from twinfer.bench.workloads import WORKLOADS, Span, workload

# (requests, concurrency, prompt, output) as in the published comparison
FIXED = {
    "bs1_128_256": (2, 1, 128, 256),
    "conc64_128_256": (200, 64, 128, 256),
    "conc64_2048_256": (200, 64, 2048, 256),
    "conc256_1024_128": (512, 256, 1024, 128),
    "prefill_8192_1": (8, 1, 8192, 1),
    "prefix_burst_256x3000_64": (256, 256, 3000, 64),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_workloads_have_the_published_numbers(name: str) -> None:
    load = WORKLOADS[name]
    requests, concurrency, prompt, output = FIXED[name]
    assert (load.num_requests, load.concurrency) == (requests, concurrency)
    assert load.lengths() == ((prompt, output),) * requests


def test_drawn_lengths_are_those_that_the_peers_were_driven_with() -> None:
    lengths = WORKLOADS["nano_256"].lengths()
    assert len(lengths) == 256
    # the first and the sums of random.Random(0): 256 prompt lengths, then 256 output lengths
    assert lengths[0][0] == 964
    assert (sum(p for p, _ in lengths), sum(o for _, o in lengths)) == (144831, 144160)


def test_prompts_are_the_same_every_time_and_fit_the_vocabulary() -> None:
    load = workload("conc64_128_256_div16")
    items = load.items(2048)
    assert items == load.items(2048)
    assert all(0 <= token < 2048 for item in items for token in item.prompt)
    assert len({item.prompt for item in items}) == len(items)
    digest = hashlib.sha256(",".join(str(t) for item in items for t in item.prompt).encode()).hexdigest()[:16]
    assert digest == "740e9056ed2a568e", "the prompts of a name have changed: records made before can't be compared any more"


def test_a_shared_prompt_is_one_prompt() -> None:
    items = workload("prefix_burst_256x3000_64_div32").items(100)
    assert len({item.prompt for item in items}) == 1
    assert len(items) == 8


def test_a_scaled_workload_has_a_name_of_its_own() -> None:
    load = WORKLOADS["conc64_2048_256"]
    small = load.scaled(16)
    assert small.name == "conc64_2048_256_div16"
    assert small == workload(small.name)
    assert (small.num_requests, small.concurrency, small.prompt, small.output) == (13, 4, Span(128, 128), Span(16, 16))
    assert load.scaled(1) is load
    assert WORKLOADS["prefill_8192_1"].scaled(64).output == Span(1, 1)
    assert WORKLOADS["bs1_128_256"].scaled(1000).output == Span(2, 2)


def test_a_first_round_has_a_name_of_its_own() -> None:
    load = WORKLOADS["conc64_128_256"]
    first = workload("conc64_128_256_first")
    assert first == load.first_round()
    assert (first.name, first.num_requests, first.concurrency, first.prompt) == ("conc64_128_256_first", 64, 64, load.prompt)
    assert workload("nano_256_div16_first").lengths() == workload("nano_256_div16").lengths(), "all of its requests are in flight at once anyway"


@pytest.mark.parametrize("name", ["_first", "conc64_first", "conc64", "conc64_128_256_div", "conc64_128_256_div0", "nothing_div4", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown|scale"):
        workload(name)


# Parameters of the published checkpoints (a tied head counted once)
PARAMETERS = {"qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
              "qwen3-30b-a3b": 30_532_122_624, "qwen3.5-4b": 4_205_751_296, "qwen3.6-27b": 26_895_998_464, "qwen3.6-35b-a3b": 34_660_610_688}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert shape_config(name).num_parameters == PARAMETERS[name]


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qwen3-8b"):
        shape_config("qwen3-9b")


@pytest.mark.parametrize(("name", "layers"), [("qwen3-32b", 64), ("qwen3-32b-2layers", 2), ("qwen3-0.6b-28layers", 28)])
def test_a_shape_may_be_its_first_layers(name: str, layers: int) -> None:
    assert shape_config(name).num_layers == layers


@pytest.mark.parametrize("name", ["", "qwen3-32b-0layers", "qwen3-32b-65layers", "qwen3-9b-2layers", "qwen3-32b-layers"])
def test_what_is_no_shape_is_told(name: str) -> None:
    assert shape_source(name) is None
    with pytest.raises(ValueError, match=r"unknown; known: qwen3-0\.6b"):
        shape_config(name)
