"""The float32 gate (1e-3 nat against transformers) can fail: one injected fault at a time, each must push the difference over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.flatten import FlatStep
from twinfer.reference import qwen3
from twinfer.reference.cache import KVCache
from twinfer.reference.qwen3 import Qwen3

from . import tiny
from .driver import run_alone

GATE = 1e-3  # nat
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3)).tolist()
PIECES = [40] + [1] * 20
Change = Callable[[Qwen3, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", params=["checkpoint", "windowed"])
def case(request: pytest.FixtureRequest) -> tuple[Path, torch.Tensor]:
    path: Path = request.getfixturevalue(request.param)
    return path, tiny.hf_logits(tiny.load_hf(path, "float32"), TOKENS, PIECES[0])


def difference(case: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch, change: Change | None) -> float:
    found = Checkpoint.open(case[0])
    model = Qwen3(found.config, found.weights(torch.float32))
    if change is not None:
        change(model, monkeypatch)
    return tiny.nats(run_alone(model, TOKENS, PIECES, page_size=3), case[1])


def rope_one_ahead_in_decode(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    # All positions moved alike would change nothing: rope is relative. The fault is a decode step that disagrees with the prefill before it.
    right = Qwen3.forward

    def forward(self: Qwen3, step: FlatStep, *rest: Any) -> torch.Tensor:
        return right(self, dataclasses.replace(step, positions=step.positions + (step.num_tokens == 1)), *rest)

    patch.setattr(Qwen3, "forward", forward)


def rope_pairs_interleaved(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + turned * sin[:, None]

    patch.setattr(qwen3, "rotate", rotate)


def eps_ten_times(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    assert model.config.rms_norm_eps == 1e-6
    model.config = dataclasses.replace(model.config, rms_norm_eps=1e-5)


def scale_two_percent_up(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.attend
    patch.setattr(qwen3, "attend", lambda q, k, v, seen, scale: right(q, k, v, seen, scale * 1.02))


def no_k_norm_in_one_layer(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = Qwen3._norm
    patch.setattr(Qwen3, "_norm", lambda self, x, name: x if name == "model.layers.1.self_attn.k_norm" else right(self, x, name))


def mask_shows_the_next_token(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.visible
    patch.setattr(qwen3, "visible", lambda queries, keys, window: right(queries + 1, keys, None if window is None else window + 1))


def mask_hides_the_token_itself(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.visible

    def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        seen = right(queries, keys, window)
        return seen & ((keys[None, :] < queries[:, None]) | (queries[:, None] == 0))

    patch.setattr(qwen3, "visible", visible)


def oldest_key_dropped(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.visible

    def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        seen = right(queries, keys, window)
        oldest = seen.int().argmax(dim=1)  # [L], each query's first visible key
        lonely = seen.sum(dim=1) == 1  # a query must see something
        seen[torch.arange(len(seen))[~lonely], oldest[~lonely]] = False
        return seen

    patch.setattr(qwen3, "visible", visible)


def oldest_key_dropped_in_decode(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
        drop = int(q.shape[0] == 1 and k.shape[0] > 1)
        return right(q, k[drop:], v[drop:], seen[:, drop:], scale)

    patch.setattr(qwen3, "attend", attend)


def neighbour_slot_read(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = KVCache.gather

    def gather(self: KVCache, layer: int, pages: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = right(self, layer, pages, context)
        if context > 2:
            k[-2], v[-2] = k[-3].clone(), v[-3].clone()
        return k, v

    patch.setattr(KVCache, "gather", gather)


def gate_and_up_swapped(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    names = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}

    def other(name: str) -> str:
        for one, two in names.items():
            if one in name:
                return name.replace(one, two)
        return name

    model.weights = {other(name): tensor for name, tensor in model.weights.items()}


def one_plus_weight_norm(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.rms_norm
    patch.setattr(qwen3, "rms_norm", lambda x, weight, eps: right(x, 1 + weight, eps))


def kv_heads_tiled(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
    right = qwen3.attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return right(q, k.repeat(1, group, 1), v.repeat(1, group, 1), seen, scale)

    patch.setattr(qwen3, "attend", attend)


FAULTS: list[Change] = [
    rope_one_ahead_in_decode,
    rope_pairs_interleaved,
    eps_ten_times,
    scale_two_percent_up,
    no_k_norm_in_one_layer,
    mask_shows_the_next_token,
    mask_hides_the_token_itself,
    oldest_key_dropped,
    oldest_key_dropped_in_decode,
    neighbour_slot_read,
    gate_and_up_swapped,
    one_plus_weight_norm,
    kv_heads_tiled,
]


def test_no_fault(case: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(case, monkeypatch, None) <= 1e-4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault: Change, case: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(case, monkeypatch, fault) > GATE  # a NaN would fail this: each fault here must be visible as a number


def test_window_one_too_wide(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny.hf_logits(tiny.load_hf(windowed, "float32"), TOKENS, PIECES[0])

    def change(model: Qwen3, patch: pytest.MonkeyPatch) -> None:
        model.config = dataclasses.replace(model.config, windows=tuple(w and w + 1 for w in model.config.windows))

    assert difference((windowed, expected), monkeypatch, change) > GATE
