"""Random calls of every operation: shapes around the sizes that its kernel works in, and what no call may read turned to NaN. Judges nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.kernels.test_operations import DTYPES
from twinfer.kernels.attention.operation import ATTENTION
from twinfer.kernels.attention.tiles import BN, HEAD_DIMS, SPLIT, padded_group
from twinfer.kernels.embedding.operation import EMBEDDING
from twinfer.kernels.experts.operation import COMBINE, DOWN, GATE_UP
from twinfer.kernels.experts.tiles import COMBINE_BLOCK, Tiling
from twinfer.kernels.experts.tiles import INTERPRETER as EXPERTS_INTERPRETER
from twinfer.kernels.experts.tiles import entries as tilings
from twinfer.kernels.matmul.kernel import launch
from twinfer.kernels.matmul.operation import MATMUL
from twinfer.kernels.matmul.tiles import INTERPRETER, SHARED_LIMIT, Tile, entries, family
from twinfer.kernels.norm.operation import ADD_RMS_NORM, RMS_NORM
from twinfer.kernels.operation import Case, Example, Operation
from twinfer.kernels.output_gate.kernel import BLOCK as GATE_BLOCK
from twinfer.kernels.output_gate.operation import OUTPUT_GATE
from twinfer.kernels.page_table.kernel import BLOCK as PAGE_TABLE_BLOCK
from twinfer.kernels.page_table.operation import UPDATE_PAGE_TABLE
from twinfer.kernels.rope.operation import QK_NORM_ROPE_WRITE
from twinfer.kernels.rope.tiles import head_tile
from twinfer.kernels.router.operation import GROUP, ROUTE
from twinfer.kernels.sampling import plain as plain_sampling
from twinfer.kernels.sampling.operation import LOGPROBS, SAMPLE
from twinfer.kernels.sampling.sampler import MAX_LOGPROBS, Scratch, scratch_shapes
from twinfer.kernels.sampling.tiles import Tiles
from twinfer.kernels.swiglu.kernel import BLOCK as SWIGLU_BLOCK
from twinfer.kernels.swiglu.operation import SWIGLU
from twinfer.noise import Purpose

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
SCALE = 1 if DEVICE == "cpu" else 4  # a GPU's calls may be larger; the interpreter's time is the number of programs
NEAR = 2e-5  # twice the margin within which a token may differ from fp64 arithmetic (kernels/sampling/sampler.py)
LOWEST = torch.iinfo(torch.int32).min
POWERS = tuple(2**i for i in range(13))


def multiples(size: int, most: int) -> range:
    """Of a tile's size, up to `most`."""
    return range(size, most + 1, size)


def edges(*sizes: int, most: int, least: int = 1) -> st.SearchStrategy[int]:
    """Every one of the sizes, one more, one less; from `least` to `most`."""
    return st.sampled_from(list(dict.fromkeys(size + d for size in sizes for d in (0, 1, -1) if least <= size + d <= most)))


def around(*sizes: int, most: int, least: int = 1) -> st.SearchStrategy[int]:
    """`edges`, or any number."""
    return edges(*sizes, most=most, least=least) | st.integers(least, most)


@dataclass(frozen=True)
class Draw:
    """All that a call is made from, so that a failing one can be written down.

    case   of the operation's `make`
    spare  rows that nobody uses, behind every tensor
    gaps   of the tensors whose strides the kernel takes, by name
    more   what is not the operation's, by name
    """

    case: Case
    dtype: torch.dtype
    seed: int
    spare: int
    gaps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def generator(self) -> torch.Generator:
        return torch.Generator(DEVICE).manual_seed(self.seed)


@dataclass(frozen=True)
class Subject:
    """An operation and its random calls.

    draws      what `example` takes
    usual      draws in CI; together the subjects take half a minute in the interpreter
    example    of a draw
    call       the Triton form of a draw
    tolerance  by dtype
    unit       the tolerance is relative to the largest value, or to this where it is larger
    """

    operation: Operation
    draws: st.SearchStrategy[Draw]
    usual: int
    example: Callable[[Draw], Example]
    call: Callable[[Draw], Callable[..., None]]
    tolerance: Mapping[str, float]
    unit: float = 0.0


SUBJECTS: dict[str, Subject] = {}


def subject(name: str, operation: Operation, draws: Callable[[], st.SearchStrategy[Draw]], usual: int, **others: Any) -> None:
    """Enters a subject; by default its examples, its call and its tolerance are the operation's own."""
    defaults = {
        "example": lambda draw: operation.make(draw.case, draw.dtype, draw.generator()),
        "call": lambda draw: operation.triton,
        "tolerance": operation.tolerance,
    }
    SUBJECTS[name] = Subject(operation, draws(), usual, **{**defaults, **others})


def drawn(draw: st.DrawFn, case: Case, dtypes: tuple[torch.dtype, ...] = DTYPES, **others: Any) -> Draw:
    """A Draw of this case; what is the same for all operations is drawn here."""
    return Draw(case, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 3)), **others)


# -------------------------------------------------------------------------------------------------- a token at a time


@st.composite
def embeddings(draw: st.DrawFn) -> Draw:
    num_tokens = draw(st.integers(1, 5 * SCALE))
    width = draw(edges(*multiples(1024, 3100), most=3100) | around(*POWERS[:11], most=3100))
    return drawn(draw, {"T": num_tokens, "V": draw(st.integers(1, 40)), "h": width, "fed": draw(st.integers(0, num_tokens))})


def embedding_example(draw: Draw) -> Example:
    """The operation's; weights of tokens that nobody asks for are NaN, and feeds that nobody takes are no token."""
    example = EMBEDDING.make(draw.case, draw.dtype, draw.generator())
    ids, feed, weight = (example.tensors[name] for name in ("token_ids", "feed", "weight"))
    taken = (-ids.long() - 1)[ids < 0]
    used = torch.cat([ids[ids >= 0].long(), feed[taken].long()])
    weight[~_named(used, len(weight))] = torch.nan
    # The plain form reads feed[0] for a token that is given, and drops it.
    free = ~_named(taken, len(feed))
    free[0] = False
    feed[free] = LOWEST
    return example


def _named(ids: torch.Tensor, size: int) -> torch.Tensor:
    """[size] bool: whether an id is among `ids`."""
    return torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)


@st.composite
def norms(draw: st.DrawFn) -> Draw:
    width = draw(around(*POWERS, most=4200))
    return drawn(draw, {"T": draw(st.integers(1, 4 * SCALE)), "h": width, "scale": draw(st.sampled_from([1.0, 1e-3, 1000.0])), "centred": draw(st.booleans())})


@st.composite
def activations(draw: st.DrawFn) -> Draw:
    width = draw(edges(*multiples(SWIGLU_BLOCK, 3100), most=3100) | around(*POWERS[:11], most=3100))
    return drawn(draw, {"T": draw(st.integers(1, 4 * SCALE)), "I": width, "scale": draw(st.sampled_from([1.0, 100.0]))})


@st.composite
def output_gates(draw: st.DrawFn) -> Draw:
    head_dim = draw(st.sampled_from([16, *HEAD_DIMS]))
    heads = draw(around(*multiples(GATE_BLOCK // head_dim, 70), most=70))
    case = {"T": draw(st.integers(1, 4 * SCALE)), "H": heads, "K": draw(st.integers(1, 3)), "d": head_dim, "scale": draw(st.sampled_from([1.0, 100.0]))}
    return drawn(draw, case)


# ------------------------------------------------------------------------------------------------------ cache and pages

PAGE_SIZES = around(*POWERS[:9], *multiples(48, 256), most=256)
GAP = st.sampled_from([0, 1, 3])


@st.composite
def cache_writes(draw: st.DrawFn) -> Draw:
    """Heads around the numbers that a program takes, whatever the group; keys and values with strides of their own."""
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    heads, _ = head_tile(head_dim)
    page_size = draw(PAGE_SIZES)
    num_tokens = draw(st.integers(1, 3 * SCALE))
    case = {
        "T": num_tokens,
        "H": draw(around(*multiples(heads, 2 * heads), most=2 * heads + 1)),
        "K": draw(around(heads, most=heads + 1)),
        "d": head_dim,
        "page": page_size,
        "pages": -(-num_tokens // page_size) + draw(st.integers(0, 3)),
        "norm": draw(st.booleans()),
        "by_head": draw(st.booleans()),
        "wide_table": draw(st.booleans()),
        "rotary": draw(st.sampled_from([head_dim, head_dim // 4, head_dim // 2 + 2])),
        "gated": draw(st.booleans()),
        "centred": draw(st.booleans()),
    }
    gaps = {name: (draw(GAP), draw(GAP), draw(GAP), 0) for name in ("keys", "values")}
    return drawn(draw, case, gaps=gaps, more={"padding": draw(st.integers(0, num_tokens))})


def cache_write_example(draw: Draw) -> Example:
    """The operation's; the last tokens are padding: NaN, all in the slot of the first of them."""
    example = QK_NORM_ROPE_WRITE.make(draw.case, draw.dtype, draw.generator())
    first = draw.case["T"] - draw.more["padding"]
    slots = example.tensors["write_slots"]
    example.tensors["qkv"][first:] = torch.nan
    for slot in slots[first : first + 1].tolist():
        slots[first:] = slot
        for name in ("keys", "values"):  # a number that is lost, so that a NaN is something written
            example.tensors[name][slot // draw.case["page"], slot % draw.case["page"]] = 0.0
    return example


@st.composite
def page_changes(draw: st.DrawFn) -> Draw:
    num_changes = draw(around(*multiples(PAGE_TABLE_BLOCK, 1024), most=1100))
    slots = draw(st.integers(1, 6))
    width = -(-num_changes // slots) + draw(st.integers(0, 20))
    return drawn(draw, {"n": num_changes, "slots": slots, "width": width}, (torch.float32,))


# ------------------------------------------------------------------------------------------------------------ attention


@st.composite
def attentions(draw: st.DrawFn, spread: bool) -> Draw:
    """Rows of one token, chunks and rows of none; they begin and end around tiles of keys, splits and tiles of queries."""
    group = draw(st.integers(1, 16) | st.sampled_from([24, 32, 64]))
    rows = draw(st.sampled_from([r for r in (16, 32, 64) if r >= padded_group(group)]))
    tokens = rows // padded_group(group)
    most = 600 * SCALE
    chosen: list[tuple[int, int]] = []
    for i in range(draw(st.sampled_from([2, 3, 1]) | st.integers(1, 3 * SCALE))):
        length = draw(st.just(1) | around(*multiples(tokens, 2 * tokens), most=2 * tokens + 1) | st.integers(0 if i else 1, 2 * tokens))
        by_start = draw(st.booleans())
        at = draw(edges(*multiples(SPLIT, most), most=most) | around(*multiples(SPLIT, most), *multiples(BN, most), most=most, least=0))
        chosen.append((length, at + length if by_start else max(at, length)))
    case = {
        "rows": tuple(chosen),
        "K": draw(st.integers(1, 2)),
        "G": group,
        "d": draw(st.sampled_from(HEAD_DIMS)),
        "page": draw(PAGE_SIZES),
        "window": draw(st.sampled_from([0, 0, 1]) | around(BN, SPLIT, most=400)),
        "spread": spread,
        "programs": draw(st.integers(1, 5)),
    }
    if DEVICE == "cpu":
        case["tile"] = (rows, 4, 1)
    cache = (draw(GAP), draw(GAP), draw(GAP), 0)  # keys and values of an engine have the same strides
    return drawn(draw, case, gaps={"keys": cache, "values": cache, "page_table": (draw(GAP), draw(GAP))})


def attention_example(draw: Draw) -> Example:
    """The operation's, where the device has a tile for it: a GPU's shared memory may not hold a large group."""
    try:
        return ATTENTION.make(draw.case, draw.dtype, draw.generator())
    except ValueError as error:
        assume("shared memory" not in str(error))
        raise


# --------------------------------------------------------------------------------------------------------------- matmul


def matmul_tiles(dtype: torch.dtype) -> list[Tile]:
    """Every tile of this device, or of all in the interpreter, which also has its own."""
    if DEVICE == "cuda":
        return list(entries(family(torch.cuda.get_device_capability()), dtype))
    served = torch.bfloat16 if dtype == torch.float16 else dtype
    return list(dict.fromkeys([INTERPRETER, *(tile for name in SHARED_LIMIT for tile in entries(name, served))]))


@st.composite
def products(draw: st.DrawFn) -> Draw:
    """Sizes around the multiples of a tile, in groups of few or many token tiles."""
    dtype = draw(st.sampled_from(DTYPES))
    tile = replace(draw(st.sampled_from(matmul_tiles(dtype))), group=draw(st.sampled_from([1, 2, 8])))

    def size(of: int, most: int) -> int:
        return draw(around(*multiples(of, most), most=most + 1))

    case = {
        "M": size(tile.bm, 3 * tile.bm),
        "N": size(tile.bn, 2 * tile.bn),
        "K": size(tile.bk, 2 * tile.bk),
        "bias": draw(st.booleans()),
        "wide": draw(st.booleans()),
    }
    return drawn(draw, case, (dtype,), more={"tile": tile})


def product_example(draw: Draw) -> Example:
    """The operation's without signs: where a small result is the difference of large ones, the tolerance would not hold for either form."""
    example = MATMUL.make(draw.case, draw.dtype, draw.generator())
    for name in {"x", "weight", "bias"} & set(example.tensors):
        example.tensors[name].abs_()
    return example


def product_call(draw: Draw) -> Callable[..., None]:
    return partial(_product, tile=draw.more["tile"])


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None) -> None:
    launch(x, weight, out, bias, tile)


# -------------------------------------------------------------------------------------------------------------- experts


def choosing(draw: st.DrawFn, most_tokens: int, most_experts: int) -> dict[str, Any]:
    """T, E, k, padding, and how many experts tokens crowd at."""
    num_experts = draw(st.integers(1, most_experts))
    k = draw(st.integers(1, min(16, num_experts)))
    num_tokens = draw(st.sampled_from([3, 2, 1]) | st.integers(2, most_tokens))
    padding = draw(st.lists(st.integers(0, num_tokens - 1), max_size=num_tokens, unique=True)) if draw(st.booleans()) else []
    return {"T": num_tokens, "E": num_experts, "k": k, "padding": padding, "crowd": draw(st.just(num_experts) | st.integers(k, num_experts))}


@st.composite
def routings(draw: st.DrawFn) -> Draw:
    """Experts around powers of two; logits that are columns of something wider, far apart or on a coarse grid."""
    num_experts = draw(around(*POWERS[:9], most=300))
    chosen = choosing(draw, 4 * SCALE, 20)
    case = chosen | {
        "E": num_experts,
        "k": draw(st.integers(1, min(16, num_experts))),
        "normalise": draw(st.booleans()),
        "values": draw(st.sampled_from([None, 3, 40])),
        "spread": draw(st.sampled_from([2.0, 60.0])),
    }
    return drawn(draw, case, gaps={"logits": (draw(GAP), draw(st.sampled_from([0, 1, 16])))})


@st.composite
def groupings(draw: st.DrawFn) -> Draw:
    return drawn(draw, choosing(draw, 60 * SCALE, 40) | {"rows": draw(st.sampled_from([16, 32, 64, 128]))}, (torch.float32,))


@st.composite
def expert_products(draw: st.DrawFn, gated: bool) -> Draw:
    """Sizes around the multiples of a tile."""
    dtype = draw(st.sampled_from(DTYPES))
    tiling: Tiling = draw(st.sampled_from(expert_tilings(dtype)))
    tile = tiling.gate_up if gated else tiling.down
    tile = replace(tile, group=draw(st.sampled_from([1, 2, 8])))
    n, k = (draw(around(*multiples(of, 2 * of), most=2 * of + 1)) for of in (tile.bn, tile.bk))
    case = choosing(draw, 40 * SCALE, 6) | ({"h": k, "m": n} if gated else {"h": n, "m": k})
    return drawn(draw, case | {"tiling": replace(tiling, **{"gate_up" if gated else "down": tile})}, (dtype,))


def expert_tilings(dtype: torch.dtype) -> list[Tiling]:
    """Every tiling of this device, or of all in the interpreter, which also has its own."""
    if DEVICE == "cuda":
        return list(tilings(family(torch.cuda.get_device_capability()), dtype))
    served = torch.bfloat16 if dtype == torch.float16 else dtype
    return list(dict.fromkeys([EXPERTS_INTERPRETER, *(tiling for name in SHARED_LIMIT for tiling in tilings(name, served))]))


def expert_product_example(operation: Operation, draw: Draw) -> Example:
    """The operation's without signs, as `product_example`."""
    example = operation.make(draw.case, draw.dtype, draw.generator())
    for name in {"x", "weight", "activated"} & set(example.tensors):
        example.tensors[name].abs_()
    return example


@st.composite
def sums(draw: st.DrawFn) -> Draw:
    """With a shared expert, its gates are a column of something wider."""
    width = draw(edges(*multiples(COMBINE_BLOCK, 2100), most=2100) | around(*POWERS[:11], most=2100))
    case = choosing(draw, 4 * SCALE, 20) | {"h": width, "shared": draw(st.sampled_from([True, True, False]))}
    return drawn(draw, case, gaps={"shared_gate": (draw(GAP), draw(st.sampled_from([1, 16, 0])))})


# ------------------------------------------------------------------------------------------------------------- sampling

DIGIT = 8 if DEVICE == "cpu" else 4  # the interpreter's time is the levels of a search; a GPU's registers hold few sums
TILES = (
    Tiles(chunk=64, block=32, digit=DIGIT, digits=16, sparse=4, sparse_programs=2, warps=4),
    Tiles(chunk=128, block=128, digit=DIGIT, digits=64, sparse=8, sparse_programs=1, warps=4),
    Tiles(chunk=256, block=64, digit=DIGIT, digits=256, sparse=64, sparse_programs=1, warps=4),
)


@st.composite
def samplings(draw: st.DrawFn, alternatives: bool) -> Draw:
    """A vocabulary around the multiples of chunks and blocks; rows of logits that lie apart; some positions are padding."""
    tiles = draw(st.sampled_from(TILES))
    vocabulary = draw(around(*multiples(tiles.chunk, 260), *multiples(tiles.block, 260), *multiples(tiles.digits, 260), most=260))
    num_positions = draw(st.sampled_from([2, 3, 1]) | st.integers(1, 3 * SCALE))
    padding = draw(st.lists(st.integers(0, num_positions - 1), max_size=num_positions, unique=True))
    case: dict[str, Any] = {"n": num_positions, "V": vocabulary, "tiles": "small"}
    if alternatives:
        case["k"] = draw(around(*(k for k in (1, 20, MAX_LOGPROBS) if k <= vocabulary), most=min(MAX_LOGPROBS, vocabulary), least=0))
    else:
        case["adjusted"] = draw(st.booleans())
    return drawn(draw, case, gaps={"logits": (draw(GAP), draw(st.sampled_from([1, 7, 64, 0])))}, more={"tiles": tiles, "padding": padding})


def _sampling_example(draw: Draw, operation: Operation) -> tuple[Example, torch.Tensor]:
    """The operation's in other tiles; logits and row of padding are NaN and -1. Also which rows no position has, [rows] bool."""
    example = operation.make(draw.case, draw.dtype, draw.generator())
    tiles = draw.more["tiles"]
    scratch = {f"scratch_{n}": s for n, s in scratch_shapes(draw.case["n"], draw.case["V"], tiles).items()}
    assert set(scratch) <= set(example.tensors) and len(scratch) == len(Scratch.__slots__)
    for name, (dtype, shape) in scratch.items():
        example.tensors[name] = torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min + 7, dtype=dtype, device=DEVICE)
    example.constants["tiles"] = tiles
    rows = example.tensors["rows"]
    padding = torch.tensor(draw.more["padding"], dtype=torch.long, device=DEVICE)
    unused = _named(rows[padding].long(), draw.case["n"])
    rows[padding] = -1
    example.tensors["logits"][padding] = torch.nan
    return example, unused


def sample_example(draw: Draw) -> Example:
    """Parameters of rows that no position has are no numbers. Draws that fp64 arithmetic itself decides by a hair are not made."""
    example, unused = _sampling_example(draw, SAMPLE)
    t = example.tensors
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "sample", "slots"):
        t[name][unused] = torch.nan if t[name].dtype.is_floating_point else LOWEST
    assume(not any(_by_a_hair(t, i, int(row)) for i, row in enumerate(t["rows"].tolist()) if row >= 0))
    return example


def _by_a_hair(t: Mapping[str, torch.Tensor], i: int, row: int) -> bool:
    """Whether top-p, moved by NEAR, or noise that is NEAR off could change position i's token."""
    temperature = float(t["temperature"][row])
    scores = plain_sampling._adjusted(t["logits"][i].double(), row, t.get("mask"), dict(t))
    if temperature == 0 or not scores.isfinite().any():
        return False
    scores = scores / temperature
    top_k, top_p, min_p = int(t["top_k"][row]), float(t["top_p"][row]), float(t["min_p"][row])
    low, high = (plain_sampling._kept(scores, top_k, p, min_p) for p in ((top_p - NEAR, top_p + NEAR) if top_p < 1 else (1.0, 1.0)))
    noise = plain_sampling.gumbel(int(t["seed"][row]), int(t["sample"][row]), int(t["positions"][i]), int(Purpose.DRAW), len(scores), scores.device)
    best = torch.where(high, scores + noise, -torch.inf).sort(descending=True).values[:2]
    return bool((low != high).any() or (len(best) > 1 and best[0] - best[1] < NEAR))


def logprobs_example(draw: Draw) -> Example:
    """Logits of positions whose row does not ask are NaN too."""
    example, _ = _sampling_example(draw, LOGPROBS)
    t = example.tensors
    t["logits"][t["asked"][t["rows"].clamp(min=0).long()] < 0] = torch.nan
    return example


subject("embedding", EMBEDDING, embeddings, 15, example=embedding_example)
subject("rms_norm", RMS_NORM, norms, 20)
subject("add_rms_norm", ADD_RMS_NORM, norms, 15)
subject("swiglu", SWIGLU, activations, 30)
subject("output_gate", OUTPUT_GATE, output_gates, 15)
subject("qk_norm_rope_write", QK_NORM_ROPE_WRITE, cache_writes, 20, example=cache_write_example)
subject("update_page_table", UPDATE_PAGE_TABLE, page_changes, 20)
# The operation's was set with fewer results. In float32 the interpreter's dot adds up to 256 products one by one: the worst of 400 draws was 3.8e-6 away,
# the same draw 2.5e-7 with dots in float64.
_ATTENTION = {"example": attention_example, "tolerance": {**ATTENTION.tolerance, "float32": 1e-5}}
subject("attention, serial", ATTENTION, partial(attentions, False), 20, **_ATTENTION)
subject("attention, spread", ATTENTION, partial(attentions, True), 20, **_ATTENTION)
subject("matmul", MATMUL, products, 30, example=product_example, call=product_call)
subject("route", ROUTE, routings, 20)
subject("group", GROUP, groupings, 15)
for _operation, _gated in ((GATE_UP, True), (DOWN, False)):
    subject(_operation.name, _operation, partial(expert_products, _gated), 20, example=partial(expert_product_example, _operation))
subject("combine", COMBINE, sums, 15)
subject("sample", SAMPLE, partial(samplings, False), 15, example=sample_example)
subject("logprobs", LOGPROBS, partial(samplings, True), 15, example=logprobs_example, unit=10.0)
