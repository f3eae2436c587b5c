"""The logic gate on the bundled model, whose heads of 128 are those of the served models. Few steps: one takes about a second here. See test_logic_gate.py."""

from __future__ import annotations

from dataclasses import replace

from tests.fast.pair import GATE, Pair
from twinfer.golden import BUNDLED
from twinfer.sampling import SamplingParams


def test_two_dozen_steps_of_the_bundled_model() -> None:
    """Greedy and seeded, alone and together, prompts and log probabilities; the largest difference seen is 1.1e-5 nat (a CPU)."""
    pair = Pair(BUNDLED, graphs=True, look_ahead=1, max_batch=2, max_step_tokens=8, max_chunk_tokens=8, max_context=48, num_pages=6)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    def join(step: int) -> None:
        if step == 14:
            pair.engine.add([71, 9, 14], replace(greedy, max_tokens=6, temperature=1.0, seed=11, logprobs=3))

    pair.serve(([5, 17, 40, 3, 11, 29, 8, 2, 60, 33, 21], greedy), before_step=join)
    found = pair.compare()
    assert found.num_steps >= 20
    assert found.num_positions >= 38
    assert found.largest <= GATE, f"{found.largest:.1e} nat from the reference"
    pair.close()
