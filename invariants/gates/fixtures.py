"""Fixtures of the gates; the plugin loads them when an engine was given, and only then. One engine, one oracle a session."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinfer.golden import BUNDLED, MICRO
from twinfer.invariants.gates.adapter import CAPABILITIES, DTYPES, Factory, Setup
from twinfer.invariants.gates.judge import Judge
from twinfer.invariants.gates.oracle import Oracle
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import NotReached, Subject

MODELS = {"qwen3": BUNDLED, "micro": MICRO}


def find_factory(text: str) -> Factory:
    """The factory that `MODULE:FACTORY` or `FILE.py:FACTORY` names. Raises pytest.UsageError."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise pytest.UsageError(f"--twinfer-engine {text}: must be MODULE:FACTORY or FILE.py:FACTORY")
    try:
        module: Any = _load(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        factory = getattr(module, name)
    except Exception as error:
        raise pytest.UsageError(f"--twinfer-engine {text}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise pytest.UsageError(f"--twinfer-engine {text}: {name} is a {type(factory).__name__}, not a function that makes an adapter")
    made: Factory = factory
    return made


def find_model(text: str) -> Path:
    """The directory of a bundled model, or of another checkpoint with goldens. Raises pytest.UsageError."""
    path = MODELS.get(text, Path(text))
    if not (path / "goldens" / "manifest.json").is_file():
        raise pytest.UsageError(
            f"--twinfer-model {text}: must be {', '.join(MODELS)}, or a checkpoint directory with goldens (python -m twinfer.golden.make)"
        )
    return path


def find_setup(config: pytest.Config) -> Setup:
    """What every engine of this session is asked for. Raises pytest.UsageError."""
    dtype = config.getoption("--twinfer-dtype")
    if dtype is not None and dtype not in DTYPES:
        raise pytest.UsageError(f"--twinfer-dtype {dtype}: must be one of {', '.join(DTYPES)}")
    return Setup(find_model(config.getoption("--twinfer-model")), dtype)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def twinfer_oracle(pytestconfig: pytest.Config) -> Oracle:
    """What is right."""
    return Oracle(find_model(pytestconfig.getoption("--twinfer-model")))


@pytest.fixture(scope="session")
def twinfer_subject(pytestconfig: pytest.Config) -> Iterator[Subject]:
    """The engine under test, kept from gate to gate."""
    subject = Subject(find_factory(pytestconfig.getoption("--twinfer-engine")), find_setup(pytestconfig))
    yield subject
    subject.discard()


@pytest.fixture
def engine(twinfer_subject: Subject, request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The engine under test for one gate, which is skipped if a capability is missing. A request that is left over costs the engine its life."""
    # From the outside in: what a whole file needs is said before what one of its gates needs beyond that.
    for marker in reversed(list(request.node.iter_markers("twinfer_requires"))):
        for capability in marker.args:
            if capability not in twinfer_subject.capabilities:
                pytest.skip(f"needs {capability}: {CAPABILITIES[capability]}")
    twinfer_subject.begin()
    yield twinfer_subject
    if any(not flight.finished for flight in twinfer_subject.flights.values()):
        twinfer_subject.discard()


@pytest.fixture
def judge(engine: Subject, twinfer_oracle: Oracle) -> Judge:
    """Holds answers against the oracle, within the tolerances of the engine's dtype."""
    return Judge(twinfer_oracle, _dtype(engine))


@pytest.fixture
def prompts(request: pytest.FixtureRequest, twinfer_oracle: Oracle) -> Prompts:
    """Prompts that no other gate uses."""
    goldens = twinfer_oracle.goldens
    longest = max(goldens.documents.values(), key=lambda case: len(case.token_ids))
    return Prompts(request.node.name, longest.token_ids.tolist(), goldens.manifest["model"]["vocab_size"])


def _dtype(engine: Subject) -> str:
    assert engine.capabilities is not None  # makes the engine if there is none
    return str(engine.adapter.dtype)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A gate whose situation did not come about is skipped by name, and counted apart from missing capabilities."""
    try:
        return (yield)
    except NotReached as error:
        pytest.skip(f"not reached: {error}")
