"""State slots and snapshots on the fast engine: padding touches none, a slot that is taken over is as good as new, a hit goes on from its snapshot.

The model is the hybrid micro: Gated DeltaNet and attention, experts and not, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE, GATE, Pair
from twinfer.fast.buffers import STATES
from twinfer.golden.hybrid import write
from twinfer.invariants.faults.switch import Switch, edited
from twinfer.request import FinishReason
from twinfer.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
TEXT = list(b"Now is the winter of our discontent made glorious summer by this sun of York; and all")
BY_SLOT = tuple(name for name in STATES if not name.endswith("_snapshots"))


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"))


def opened(micro: Path, **limits: int) -> Any:
    some = {"max_batch": 4, "max_step_tokens": 96, "max_chunk_tokens": 96, "max_context": 128, "page_size": 16, "num_pages": 32, "look_ahead": 0}
    return twinfer.fast.Engine.from_pretrained(micro, dtype="float32", device=DEVICE, limits={**some, **limits}, audit="full", graphs=True, tokenizer=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32).clone()


def test_padding_rows_touch_no_slot(micro: Path) -> None:
    """Three rows, padded to four: what lies in the slot that nobody has, and in every other row's, is what the rows themselves left."""
    with opened(micro) as engine:
        for i in range(3):
            engine.add(TEXT[i : i + 2 + i], replace(GREEDY, max_tokens=4))
        engine.step()
        engine.step()
        tensors = engine.executor._buffers.tensors
        (free,) = engine.scheduler.states.free()
        for name in BY_SLOT:
            tensors[name][:, free] = torch.nan  # what a padding row would read
        before = {name: bits(tensors[name][:, free]) for name in BY_SLOT}
        events = engine.step()
        assert len(events) == 3
        assert all(event.error is None for event in events)
        for name in BY_SLOT:
            assert torch.equal(bits(tensors[name][:, free]), before[name]), f"{name}: the slot of nobody was written"


@pytest.mark.parametrize("length", [1, 3])
def test_a_slot_that_is_taken_over_is_as_good_as_new(micro: Path, length: int) -> None:
    """Also where the first chunk is one token: nothing of a slot is read that its own sequence has not written."""
    prompt = TEXT[:length]
    with opened(micro) as engine:
        (fresh,) = engine.generate([prompt], replace(GREEDY, logprobs=1))
        for name in BY_SLOT:
            engine.executor._buffers.tensors[name].fill_(torch.nan)
        (again,) = engine.generate([prompt], replace(GREEDY, logprobs=1))
    assert fresh.completions[0].finish_reason is FinishReason.LENGTH
    assert again.completions == fresh.completions


def first_token_of_a_used_slot(micro: Path) -> None:
    test_a_slot_that_is_taken_over_is_as_good_as_new(micro, 1)


def test_a_hit_goes_on_from_its_snapshot(micro: Path) -> None:
    """Another prompt that begins alike, whose state at 64 tokens comes from a snapshot, gives the reference's log probabilities."""
    pair = Pair(
        micro, graphs=False, tokenizer=False, max_batch=2, max_step_tokens=96, max_chunk_tokens=96, max_context=96, page_size=16, num_pages=24,
        num_snapshots=4,
    )  # fmt: skip
    for prompt in (TEXT[:67], [*TEXT[:66], 7]):
        for name in BY_SLOT:  # whoever had the slot left something else there
            pair.engine.executor._buffers.tensors[name].fill_(torch.nan)  # type: ignore[attr-defined]
        pair.serve((prompt, replace(GREEDY, max_tokens=2)))
    assert any(plan.saves.size for plan in pair.new_plans())
    assert [plan.restores.size for plan in pair.new_plans() if plan.restores.size] == [2]
    assert pair.engine.scheduler.num_prefix_hits == 64
    found = pair.compare()
    assert found.num_positions >= 67 + 3
    assert found.largest <= GATE
    pair.close()


_STATES, _STAGE = "twinfer.fast.states:States.", "twinfer.fast.inputs:StepInputs._stage_rows"
MUTANTS: dict[str, tuple[Switch, Callable[[Path], None]]] = {
    "a padding row has somebody's slot": (edited(_STAGE, "[num_rows:] = PADDING_ROW", "[num_rows:] = 3"), test_padding_rows_touch_no_slot),
    "a history before position 0 is read": (
        edited("twinfer.kernels.gdn_inputs.kernel:convolved", "position >= back", "position >= back - 1"), first_token_of_a_used_slot,
    ),
    "a snapshot without its history": (
        edited(_STATES + "save", 't["conv_snapshots"][:, snapshot].copy_(t["conv_histories"][:, slot])', "pass"), test_a_hit_goes_on_from_its_snapshot,
    ),
    "a slot keeps the piece of the state before": (
        edited(_STATES + "restore", 't["recurrent_states"][:, slot].copy_(anchor)', "pass"), test_a_hit_goes_on_from_its_snapshot,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(mutant: str, micro: Path) -> None:
    fault, gate = MUTANTS[mutant]
    with fault(), pytest.raises(AssertionError):
        gate(micro)
