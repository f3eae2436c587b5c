"""One Gated DeltaNet layer and some sequences for tests and probes: inputs, a state whose unwritten places are NaN, steps over any rows. Judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from twinfer.kernels.gdn.kernel import gdn_commits, gdn_longs, gdn_singles
from twinfer.kernels.gdn.plain import recurrence
from twinfer.kernels.gdn.state import GdnState, Precision, precision_of, state_shapes
from twinfer.kernels.gdn.tasks import LISTS, Counts, Lists, plan_lists
from twinfer.kernels.gdn.tiles import CommitTile, LongTile, SingleTile
from twinfer.kernels.gdn.workspace import Workspace, workspace_shapes

Row = tuple[int, int, int]  # sequence (-1: padding), start, tokens


@dataclass(frozen=True)
class Heads:
    nk: int = 1
    nv: int = 2
    dk: int = 32
    dv: int = 16


HEADS = Heads()
_LONG, _SINGLE, _COMMIT = LongTile(16, 4, 4, 2), SingleTile(True, 16, 16, 4, 2, 16), CommitTile(16, 16, 4)


@dataclass(frozen=True)
class Tiles:
    """Of one launch each; the defaults fit every head dim."""

    long: LongTile = _LONG
    single: SingleTile = _SINGLE
    commit: CommitTile = _COMMIT


SMALL = Tiles()


@dataclass(frozen=True)
class Inputs:
    """Of one sequence, as `gdn_inputs` leaves them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.q, self.k, self.v, self.log_decay, self.beta))

    def cut(self, begin: int, end: int) -> Inputs:
        return Inputs(*(x[begin:end] for x in self))


def random_inputs(num_tokens: int, heads: Heads, dtype: torch.dtype, seed: int, hard: bool = False, device: str = "cpu") -> Inputs:
    """hard: keys of nearly one direction, beta near 1 and slow decay, which makes I + A ill-conditioned."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = torch.nn.functional.normalize(random(num_tokens, heads.nk, heads.dk), dim=-1) * heads.dk**-0.5
    k = random(num_tokens, heads.nk, heads.dk)
    if hard:
        k = random(1, heads.nk, heads.dk) + 0.3 * k
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.sigmoid(random(num_tokens, heads.nv) + (3 if hard else 0)).to(dtype).float()
    rate = torch.exp(torch.rand(heads.nv, generator=generator, device=device) * 4 - 4)
    log_decay = -rate * torch.nn.functional.softplus(random(num_tokens, heads.nv) - (4 if hard else 1))
    return Inputs(q.to(dtype), k.to(dtype), random(num_tokens, heads.nv, heads.dv).to(dtype), log_decay, beta)


def poisoned(shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}


@dataclass
class Layer:
    """Sequences in slots of one layer. Slots lie in another order than sequences, and one is nobody's. All is NaN until a kernel writes it."""

    sequences: Sequence[Inputs]
    exact: bool = False
    out_dtype: torch.dtype | None = None
    slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.sequences[0]
        (nk, dk), (nv, dv) = first.k.shape[1:], first.v.shape[1:]
        self.heads, self.dtype, self.device = Heads(nk, nv, dk, dv), first.k.dtype, str(first.k.device)
        self.precision: Precision = precision_of(self.dtype, self.exact)
        number = len(self.sequences)
        self.slots = self.slots or [(number - i) % (number + 1) for i in range(number)]
        shapes = state_shapes(nk, nv, dk, dv, self.dtype, self.precision)
        self.state = GdnState(**poisoned({name: (dtype, (number + 1, *shape)) for name, (dtype, shape) in shapes.items()}, self.device))

    def plan(self, rows: Sequence[Row], spare: int = 1) -> tuple[Lists, Counts]:
        """Lists with `spare` places behind the last entry, which hold the lowest integer."""
        starts, lengths = np.array([r[1] for r in rows]), np.array([r[2] for r in rows])
        slots = np.array([self.slots[r[0]] if r[0] >= 0 else -1 for r in rows])
        most = int(lengths.sum()) + len(rows)
        lists = Lists(*(np.full((most, width), np.iinfo(np.int32).min, np.int32) for width in LISTS.values()))
        counts = plan_lists(starts, lengths, slots, lists)
        return Lists(*(array[: number + spare] for array, number in zip(lists, counts, strict=True))), counts

    def step(self, rows: Sequence[Row], tiles: Tiles = SMALL) -> list[torch.Tensor]:
        """Outputs of each row; a padding row's tokens are NaN and must stay so."""
        lists, counts = self.plan(rows)
        gathered = []
        for sequence, start, length in rows:
            part = self.sequences[max(sequence, 0)].cut(start, start + length)
            gathered.append(part if sequence >= 0 else Inputs(*(torch.full_like(x, torch.nan) for x in part)))
        q, k, v, log_decay, beta = (torch.cat(parts).contiguous() for parts in zip(*gathered, strict=True))
        out = torch.full(v.shape, torch.nan, dtype=self.out_dtype or self.dtype, device=self.device)
        shapes = workspace_shapes(len(lists.tasks), len(lists.singles), self.heads.nv, self.heads.dv, self.dtype, self.precision)
        workspace = Workspace(**poisoned(dict(shapes), self.device))
        tasks, longs, singles, commits = (torch.tensor(array, device=self.device) for array in lists)
        numbers = torch.tensor(counts, dtype=torch.int32, device=self.device)
        arguments = (q, k, v, log_decay, beta, self.state, workspace)
        if counts.longs:
            gdn_longs(*arguments, tasks, longs, numbers, out, tiles.long)
        if counts.singles:
            gdn_singles(*arguments, singles, numbers, out, tiles.single)
            gdn_commits(self.state, commits, numbers, tiles.commit)
        return list(torch.split(out, [row[2] for row in rows]))

    def anchor(self, sequence: int) -> list[torch.Tensor]:
        """A sequence's anchor, and its pieces where there are some."""
        s = self.state
        return [x[self.slots[sequence]] for x in (s.anchor, s.anchor_high, s.anchor_low) if x is not None]


def expected(inputs: Inputs, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a whole sequence, and the state at its last multiple of 64, by the recurrence in `dtype`."""
    heads = Heads(*inputs.k.shape[1:2], *inputs.v.shape[1:2], *inputs.k.shape[2:], *inputs.v.shape[2:])
    state = torch.zeros(heads.nv, heads.dk, heads.dv, dtype=dtype, device=inputs.k.device)
    whole = len(inputs.q) // 64 * 64
    outputs = []
    for begin, end in ((0, whole), (whole, len(inputs.q))):
        if begin == whole:
            anchor = state
        if begin < end:
            out, state = recurrence(*inputs.cut(begin, end), state)
            outputs.append(out)
    return torch.cat(outputs), anchor
