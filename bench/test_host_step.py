"""What the host costs between two forwards: 256 decode rows at 16k contexts, 256k page references. The target, 300 us, is recorded, not asserted."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.bench.host_step import PARTS, HostStep

ROUNDS = 300  # each is one step on: a row enters a new page every 16th


@pytest.fixture(scope="module")
def host() -> HostStep:
    """One scheduler for the whole file: its requests have room for every round."""
    return HostStep()


@pytest.mark.parametrize("parts", [*[(part,) for part in PARTS], PARTS[:3]], ids="+".join)
def test_host_step(benchmark: Any, host: HostStep, parts: tuple[str, ...]) -> None:
    benchmark.group = "host, 256 decode rows at 16k"

    def setup() -> None:
        host.advance_to(parts[0])

    benchmark.pedantic(lambda: host.run(*parts), setup=setup, rounds=ROUNDS, warmup_rounds=20)
    host.advance_to("plan")
    benchmark.extra_info["page_references"] = len(host.page_indices)
    assert host.current.num_rows == host.current.num_tokens == 256, "every row decoded until the end"
