"""The soak profile makes more draws and new ones, where others make the same ones each time. It soaks nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable


@pytest.fixture(params=["default", "soak"])
def profile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The profile that is loaded, as `--hypothesis-profile` does it; afterwards the one that was."""
    before = settings.get_current_profile_name()
    monkeypatch.setenv("SOAK_FACTOR", "3")
    settings.load_profile(request.param)
    yield request.param
    settings.load_profile(before)


def draws() -> list[float]:
    found = []

    @settings(max_examples=examples(10), derandomize=repeatable(), database=None)
    @given(number=st.floats(0, 1))
    def each(number: float) -> None:
        found.append(number)

    each()
    return found


def test_a_soak_makes_more_draws_and_new_ones(profile: str) -> None:
    first, second = draws(), draws()
    assert len(first) == len(second) == (30 if profile == "soak" else 10)
    assert (first != second) == (profile == "soak")
