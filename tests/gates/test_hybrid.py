"""Gates over a model that keeps states, on the reference: its prefix cache finds prompts at multiples of 64 tokens. Made-up weights till some are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gates.runs import run_gates
from tests.golden.family import model_directory
from twinfer.golden.hybrid import write
from twinfer.invariants.gates import adapters
from twinfer.invariants.gates.adapter import Answer, Ask, Setup

GATES = ("test_prefix_cache.py", "test_chunking.py", "test_pages.py")
NAME = "qwen3_next"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(NAME, tmp_path_factory.mktemp("hybrid"))


def test_the_gates_of_pages_and_prefix_cache_pass(model: Path, tmp_path: Path) -> None:
    outcome = run_gates(adapters.reference, tmp_path, gates=GATES, model=str(model))
    assert outcome.code == pytest.ExitCode.OK, outcome.why
    assert set(outcome.gates.values()) == {"passed"}
    assert len(outcome.tests("passed")) == 15


class Beside(adapters.EngineAdapter):
    """Says that hits are multiples of a page."""

    def __init__(self, setup: Setup) -> None:
        import twinfer.reference

        super().__init__(twinfer.reference.Engine, setup, one_arithmetic=False)
        del self.hit_grid


class Forgetful(Beside):
    """Says that nothing came from the cache."""

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        from dataclasses import replace

        return [replace(answer, num_cached_tokens=0) for answer in super().generate(asks)]


@pytest.mark.parametrize("wrong", [Beside, Forgetful])
def test_an_adapter_that_says_otherwise_fails(wrong: type[Beside], model: Path, tmp_path: Path) -> None:
    outcome = run_gates(wrong, tmp_path, gates=("test_prefix_cache.py::test_hits_around_a_page_boundary",), model=str(model))
    failed = [why for gate, why in outcome.why.items() if outcome.gates[gate] == "failed"]
    assert len(failed) == 8, "all but that of a prompt of less than a page"
    assert all("came from the cache" in why for why in failed)


def test_one_request_at_a_time_hits(tmp_path: Path) -> None:
    """On the made-up hybrid model of the bundled files: the same prompt again, and a second turn."""
    adapter = adapters.reference(Setup(write(tmp_path / "hybrid")))
    prompt = tuple(range(100, 230))
    (cold,) = adapter.generate([Ask(prompt, 70)])
    (warm,) = adapter.generate([Ask(prompt, 70)])
    (turn,) = adapter.generate([Ask((*prompt, *cold.tokens, 1, 2), 1)])
    assert (cold.num_cached_tokens, warm.num_cached_tokens, turn.num_cached_tokens) == (0, 128, 192)
    assert cold.tokens == warm.tokens
    assert (adapter.page_size, adapter.hit_grid) == (16, 64)
    adapter.close()
