"""Faults of bounds: buffers sized by the wrong quantity."""

from __future__ import annotations

from twinfer.invariants.bounds import BUFFERS, BY_NAME
from twinfer.invariants.expr import Const, Expr, by_reference, ceil_div, minimum
from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import sized
from twinfer.invariants.symbols import (
    LOGIT_TILE,
    MAX_BATCH,
    MAX_BUCKET,
    MAX_CONTEXT,
    MAX_STEP_CONTEXT,
    NUM_PAGES,
    ONE_REFERENCE_A_ROW,
    ONE_ROW,
    PAGE_SIZE,
    ROW_EXTENT,
    SPLIT,
    SPLIT_REST,
    SPREAD_ROWS,
    SPREAD_SPLITS,
    STEP_EXTENT,
    VERIFY_TOKENS,
    WARMUP_TOKENS,
)
from twinfer.invariants.unit import ROWS, TASKS, TOKENS

_ALL = ("proofs", "random plans fit", "random demand")
_FORMULAS = ("proofs", "random demand")
_ROW_LIST = by_reference(ceil_div(ROW_EXTENT, PAGE_SIZE))
_ONE_TOKEN_A_ROW = Const(1, TOKENS / ROWS)
# Buffers of what a plan spreads, and of a tile of positions.
_SPREAD = tuple(bound.name for bound in BUFFERS if bound.demand == SPREAD_SPLITS)
_TILES = tuple(bound.name for bound in BUFFERS if bound.demand == LOGIT_TILE)
_WITHOUT_OVERSHOOT = ceil_div(minimum(MAX_STEP_CONTEXT, SPREAD_ROWS * MAX_CONTEXT) + (SPREAD_ROWS - ONE_ROW) * SPLIT_REST, SPLIT)

# The capacities of the two outages.
POOL_LIST: Expr = by_reference(NUM_PAGES) + MAX_BATCH * ONE_REFERENCE_A_ROW
WARMUP_SIZE: Expr = WARMUP_TOKENS


def _bound(name: str, what: str, bound: str, capacity: Expr, red: tuple[str, ...] = _ALL, link: str = "") -> Fault:
    return Fault(name, what, "bound", red, sized(bound, capacity=capacity), link)


FAULTS: tuple[Fault, ...] = (
    _bound(
        "page list by the pool",
        "The page list is sized by the pool's pages, so rows that share a prefix list more than it holds.",
        "page_indices",
        POOL_LIST,
        (*_ALL, "shared prefixes"),
        "https://github.com/pegainfer-project/pegainfer/pull/482",
    ),
    _bound(
        "tokens by the warm-up forward",
        "The step's tokens are sized by the capped profiling forward, so a mixed step of several rows is larger.",
        "token_ids",
        WARMUP_SIZE,
        (*_ALL, "capped profiling"),
        "https://github.com/Sandermage/genesis-vllm-patches/issues/33",
    ),
    _bound("positions by the warm-up forward", "Positions are sized by the capped profiling forward.", "positions", WARMUP_SIZE, (*_ALL, "capped profiling")),
    _bound(
        "activations by the warm-up forward",
        "The residual stream has a row for each token of the profiling forward, not of the largest step.",
        "residual",
        WARMUP_SIZE,
        (*_FORMULAS, "capped profiling"),
        "https://github.com/Sandermage/genesis-vllm-patches/issues/33",
    ),
    _bound("page list without padding", "Padding rows of a bucket list the padding page, for which there is no room.", "page_indices", MAX_BATCH * _ROW_LIST),
    _bound(
        "page list rounded down",
        "The last, partly filled page of each row is forgotten: floor for ceil.",
        "page_indices",
        MAX_BUCKET * (_ROW_LIST - ONE_REFERENCE_A_ROW),
    ),
    _bound(
        "page list by the sum of contexts",
        "Pages are counted as if rows shared partly filled ones.",
        "page_indices",
        by_reference(ceil_div(STEP_EXTENT, PAGE_SIZE)),
    ),
    _bound(
        "page list without overshoot",
        "Look-ahead and verify tokens may begin a page that nothing was reserved for.",
        "page_indices",
        MAX_BUCKET * by_reference(ceil_div(MAX_CONTEXT, PAGE_SIZE)),
        link="https://github.com/vllm-project/vllm-ascend/pull/11466",
    ),
    _bound("tokens by decode rows", "Tokens are sized as if a step never held a chunk of a prompt.", "token_ids", MAX_BUCKET * VERIFY_TOKENS),
    _bound(
        "row pointers without the last",
        "Row pointers have an entry a row, none for the end of the last one.",
        "row_indptr",
        MAX_BUCKET,
        link="https://github.com/flashinfer-ai/flashinfer/issues/362",
    ),
    _bound(
        "page pointers by a batch that is no bucket",
        "A batch is padded to its bucket, so max_batch rows are too few where it is none.",
        "page_indptr",
        MAX_BATCH + Const(1, ROWS),
        link="https://github.com/pegainfer-project/pegainfer/pull/1005",
    ),
    _bound(
        "contexts by a batch that is no bucket",
        "A graph reads a context for each padding row too.",
        "context",
        MAX_BATCH,
        _FORMULAS,
        "https://github.com/vllm-project/vllm/pull/28202",
    ),
    _bound(
        "rows by the profile cap",
        "Rows are sized as if the profiling forward had had as many rows as tokens.",
        "row_slot",
        WARMUP_TOKENS * Const(1, ROWS / TOKENS),
        _FORMULAS,
    ),
    _bound(
        "rope table without overshoot",
        "The last draft token has a position beyond max_context, past the table's end.",
        "rope_table",
        MAX_CONTEXT,
        _FORMULAS,
        "https://github.com/pegainfer-project/pegainfer/issues/220",
    ),
    _bound(
        "one sample a row",
        "A verify row samples at each of its draft tokens and one more.",
        "sampled_tokens",
        MAX_BUCKET * _ONE_TOKEN_A_ROW,
        _FORMULAS,
    ),
    _bound(
        "seen tokens by the step's tokens",
        "Tokens that rows have seen grow with their contexts, not with the tokens of the step.",
        "seen_ids",
        BY_NAME["step_tokens"].capacity,
        _FORMULAS,
    ),
    _bound("cache without the padding page", "Padding writes page 0, so the pool has one page less than it says.", "kv_keys", NUM_PAGES, _FORMULAS),
    _bound(
        "page table as wide as max_context",
        "A row's list may hold the pages of its overshoot tokens as well.",
        "page_table_width",
        ceil_div(MAX_CONTEXT, PAGE_SIZE),
        _FORMULAS,
        "https://github.com/vllm-project/vllm-ascend/pull/11466",
    ),
    Fault(
        "split partials by the pool",
        "Attention's splits are counted by reference: rows that share a prefix have one each for every split of it.",
        "bound",
        ("proofs", "staging"),
        sized(*_SPREAD, capacity=ceil_div(NUM_PAGES * PAGE_SIZE + (SPREAD_ROWS - ONE_ROW) * SPLIT_REST, SPLIT)),
    ),
    Fault(
        "splits without each row's last",
        "A row's last split is not full, so its keys are more splits than their sum makes up.",
        "bound",
        _FORMULAS,
        sized(*_SPREAD, capacity=ceil_div(STEP_EXTENT, SPLIT)),
    ),
    Fault(
        "one split a row",
        "A long context is cut into many splits.",
        "bound",
        _FORMULAS,
        sized(*_SPREAD, capacity=SPREAD_ROWS * Const(1, TASKS / ROWS)),
    ),
    Fault("splits without overshoot", "Look-ahead and verify tokens are keys too.", "bound", ("proofs",), sized(*_SPREAD, capacity=_WITHOUT_OVERSHOOT)),
    Fault(
        "logits of one position a row",
        "A tile of positions may hold several of one row.",
        "bound",
        _FORMULAS,
        sized(*_TILES, capacity=MAX_BUCKET * _ONE_TOKEN_A_ROW),
    ),
)
