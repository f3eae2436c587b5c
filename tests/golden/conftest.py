"""Shared by the golden tests: where the models lie and what is loaded once. No assertion lives here."""

from pathlib import Path

import numpy as np
import pytest

from twinfer.golden.manifest import Case, Goldens, load_goldens

ROOT = Path(__file__).resolve().parents[2] / "golden"
MODELS = ("qwen3", "micro")


@pytest.fixture(scope="session", params=MODELS)
def goldens(request: pytest.FixtureRequest) -> Goldens:
    """The goldens of each bundled model in turn."""
    return load_goldens(ROOT / request.param)


@pytest.fixture(scope="session")
def micro() -> Goldens:
    """The goldens of the small model."""
    return load_goldens(ROOT / "micro")


def rebuilt_logits(case: Case, precision: str = "fp64") -> tuple[np.ndarray, np.ndarray]:
    """Logits [P, V] that agree with `case` to the last few bits, and their positions [P]: stored values at the top k, -60 nat elsewhere."""
    golden = {"fp64": case.fp64, "fp32": case.fp32, "bf16": case.bf16}[precision]
    logits = np.full((len(golden.positions), golden.vocab_size), -60.0) + golden.logsumexp[:, None]
    np.put_along_axis(logits, golden.top_ids, golden.logprobs + golden.logsumexp[:, None], axis=1)
    # The mass outside the top k goes to the least likely listed place, so that the logsumexp is the stored one.
    rest = 1.0 - np.exp(golden.logprobs).sum(axis=1)
    free = np.argmin(logits, axis=1)
    logits[np.arange(len(logits)), free] = np.log(np.maximum(rest, 1e-26)) + golden.logsumexp
    return logits, golden.positions
