"""Symbols: the names that formulas of bounds are made of, each with its dimension, and how their values are read. Not the formulas.

Three families: limits (what the scheduler obeys), the model's shape, and facts (what one plan asks for, computed in `facts`).
"""

from __future__ import annotations

from dataclasses import fields

from twinfer.config import ModelConfig
from twinfer.invariants.expr import Const, Expr, Sym, ceil_div
from twinfer.invariants.unit import ELEMENTS, ONE, PAGE_REFERENCES, PAGES, ROWS, SNAPSHOTS, STATE_SLOTS, TASKS, TOKENS
from twinfer.limits import Limits

# Limits.
MAX_BATCH = Sym("max_batch", ROWS)
MAX_BUCKET = Sym("max_bucket", ROWS, "bucket(max_batch)")
MAX_STEP_TOKENS = Sym("max_step_tokens", TOKENS)
MAX_CHUNK_TOKENS = Sym("max_chunk_tokens", TOKENS / ROWS)
WARMUP_TOKENS = Sym("warmup_tokens", TOKENS)
MAX_CONTEXT = Sym("max_context", TOKENS / ROWS)
MAX_STEP_CONTEXT = Sym("max_step_context", TOKENS)
MAX_LOGIT_TOKENS = Sym("max_logit_tokens", TOKENS)
PAGE_SIZE = Sym("page_size", TOKENS / PAGES)
NUM_PAGES = Sym("num_pages", PAGES)
NUM_STATE_SLOTS = Sym("num_state_slots", STATE_SLOTS)
NUM_SNAPSHOTS = Sym("num_snapshots", SNAPSHOTS)
SPECULATIVE_TOKENS = Sym("speculative_tokens", TOKENS / ROWS)
LOOK_AHEAD = Sym("look_ahead", TOKENS / ROWS)  # a step planned ahead writes one more token in each row
MAX_LOGPROBS = Sym("max_logprobs", ELEMENTS / TOKENS)
SPREAD_ROWS = Sym("spread_rows", ROWS)  # short rows of the largest step whose attention spreads their splits over programs
MAX_LOGIT_BIAS = Sym("max_logit_bias", ELEMENTS / ROWS)

# The model's shape. Widths of an entry have no unit: only what is counted by a plan does.
NUM_ATTENTION_LAYERS = Sym("num_attention_layers", ONE)
NUM_GDN_LAYERS = Sym("num_gdn_layers", ONE)
CONV_HISTORY = Sym("conv_history", ONE)  # tokens before its own that the convolution of Gated DeltaNet reads
CONV_DIM = Sym("conv_dim", ONE)
PROJECTION_DIM = Sym("projection_dim", ONE)  # of Gated DeltaNet's input projections together
NUM_KEY_HEADS = Sym("num_key_heads", ONE)
NUM_VALUE_HEADS = Sym("num_value_heads", ONE)
KEY_HEAD_DIM = Sym("key_head_dim", ONE)
VALUE_HEAD_DIM = Sym("value_head_dim", ONE)
NUM_KV_HEADS = Sym("num_kv_heads", ONE)
NUM_HEADS = Sym("num_heads", ONE)
HEAD_DIM = Sym("head_dim", ONE)
HIDDEN_SIZE = Sym("hidden_size", ONE)
NUM_PROJECTED_HEADS = Sym("num_projected_heads", ONE)  # queries with their gates, keys, values
ROTARY_DIM = Sym("rotary_dim", ONE)
MLP_SIZE = Sym("mlp_size", ONE)  # of the widest dense feed forward, a shared expert included
VOCAB_SIZE = Sym("vocab_size", ELEMENTS)
NUM_EXPERTS = Sym("num_experts", ONE)
EXPERTS_A_TOKEN = Sym("num_per_token", ONE, "experts_per_token")
EXPERT_SIZE = Sym("intermediate_size", ONE, "expert_size")  # width of one expert
NUM_ROUTER_ROWS = Sym("num_router_rows", ONE)  # logits of a token: one an expert and the shared one's gate, padded
NUM_SHARED = Sym("num_shared", ONE)  # shared experts, 0 or 1

# Facts of one plan, in the order of `facts.PlanFacts`.
NUM_ROWS = Sym("num_rows", ROWS)
PADDED_ROWS = Sym("padded_rows", ROWS, "bucket(num_rows)")
UNIFORM_ROWS = Sym("uniform_rows", ROWS)
NUM_TOKENS = Sym("num_tokens", TOKENS)
LARGEST_LENGTH = Sym("largest_length", TOKENS / ROWS)
LARGEST_CONTEXT = Sym("largest_context", TOKENS / ROWS)
STEP_CONTEXT = Sym("step_context", TOKENS)
PAGE_REFS = Sym("page_references", PAGE_REFERENCES)
LARGEST_POSITION = Sym("largest_position", TOKENS / ROWS)
LARGEST_SLOT = Sym("largest_slot", ROWS)
LARGEST_PAGE = Sym("largest_page", PAGES)
NUM_SAMPLED = Sym("num_sampled", TOKENS)
LARGEST_SAMPLES = Sym("largest_samples", TOKENS / ROWS)
SPREAD_SPLITS = Sym("spread_splits", TASKS)
LOGIT_TILE = Sym("logit_tile", TOKENS)
NUM_SCORED = Sym("num_scored", TOKENS)
BIAS_ENTRIES = Sym("bias_entries", ELEMENTS)
LARGEST_BIAS = Sym("largest_bias", ELEMENTS / ROWS)
SEEN_ENTRIES = Sym("seen_entries", TOKENS)
LARGEST_LOGPROBS = Sym("largest_logprobs", ELEMENTS / TOKENS)
USED_STATE_SLOTS = Sym("used_state_slots", STATE_SLOTS)
DELTA_ENTRIES = Sym("delta_entries", PAGE_REFERENCES)
DELTA_LENGTHS = Sym("delta_lengths", ROWS)
USED_SNAPSHOTS = Sym("used_snapshots", SNAPSHOTS)
NUM_RESTORES = Sym("num_restores", ROWS)  # a row restores its own state, and saves it, at most once
NUM_SAVES = Sym("num_saves", ROWS)
STATE_TASKS = Sym("state_tasks", TASKS)  # chunks of 64 that rows of more than one token lie in

# One of a unit, and what several formulas share.
ONE_ROW = Const(1, ROWS)
ONE_PAGE = Const(1, PAGES)
ONE_POSITION = Const(1, TOKENS / ROWS)
ONE_TOKEN_A_ROW = Const(1, TOKENS / ROWS)
ONE_REFERENCE_A_ROW = Const(1, PAGE_REFERENCES / ROWS)
OVERSHOOT: Expr = LOOK_AHEAD + SPECULATIVE_TOKENS  # tokens that a row may write beyond what its request keeps
ROW_EXTENT: Expr = MAX_CONTEXT + LOOK_AHEAD + SPECULATIVE_TOKENS
VERIFY_TOKENS: Expr = ONE_TOKEN_A_ROW + SPECULATIVE_TOKENS
# max_step_context limits what requests keep; each row may list its overshoot on top
STEP_EXTENT: Expr = MAX_STEP_CONTEXT + MAX_BATCH * OVERSHOOT

# 0 in a model without Gated DeltaNet, without experts, or without a dense feed forward
GDN_SYMBOLS = (CONV_HISTORY, CONV_DIM, PROJECTION_DIM, NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_HEAD_DIM, VALUE_HEAD_DIM)
EXPERT_SYMBOLS = (NUM_EXPERTS, EXPERTS_A_TOKEN, EXPERT_SIZE, NUM_ROUTER_ROWS, NUM_SHARED)
OPTIONAL_SYMBOLS = (*GDN_SYMBOLS, *EXPERT_SYMBOLS, MLP_SIZE)
_DENSE = (NUM_ATTENTION_LAYERS, NUM_GDN_LAYERS, NUM_KV_HEADS, NUM_HEADS, NUM_PROJECTED_HEADS, HEAD_DIM, ROTARY_DIM, HIDDEN_SIZE, MLP_SIZE, VOCAB_SIZE)
MODEL_SYMBOLS = (*_DENSE, *GDN_SYMBOLS, *EXPERT_SYMBOLS)
# Paged attention cuts keys into splits; a task is a tile of queries, or one split of it. Steps with fewer programs than ENOUGH are spread: measured on an
# H200 (bench/probes/RESULTS.md). `twinfer.kernels.attention` reads these numbers and the rule `spread_rows` here, so that the auditor counts what it lists.
ATTENTION_SPLIT = 256
ATTENTION_KEYS = 64  # of a tile
ENOUGH_PROGRAMS = 128
SPLIT = Const(ATTENTION_SPLIT, TOKENS / TASKS)
SPLIT_REST = Const(ATTENTION_SPLIT - 1, TOKENS / ROWS)  # keys that the last split of a row may lack
ROW_SPLITS: Expr = ceil_div(ROW_EXTENT, SPLIT)  # of one tile of a row
ONE_TASK_A_TOKEN = Const(1, TASKS / TOKENS)
# Gated DeltaNet computes rows of several tokens in chunks that begin at multiples of 64: a row of n tokens lies in (n + 126) / 64 of them at most.
STATE_CHUNK = 64
CHUNK = Const(STATE_CHUNK, TOKENS / TASKS)
CHUNK_LESS = Const(STATE_CHUNK - 1, TOKENS)  # ceil((n - 63) / 64) is n / 64 rounded down
CHUNK_REST = Const(2 * STATE_CHUNK - 2, TOKENS / ROWS)
TILES_A_ROW: Expr = VERIFY_TOKENS * Const(1, ROWS / TOKENS)  # of queries, at most one a token

_NUMERIC_LIMITS = tuple(field.name for field in fields(Limits) if field.name != "buckets")


def spread_rows(max_rows: int, num_kv_heads: int, page_size: int, tiles_a_row: int = 1) -> int:
    """A step with at most so many short rows, of max_rows, has their splits spread over programs; with more, none. Short is at most a verify row.

    All of them where a tile of keys crosses pages: its address arithmetic is what one program a tile cannot hide (page 1 and 16: 149 against 170 us).
    """
    if page_size % ATTENTION_KEYS:
        return max_rows
    return min(max_rows, (ENOUGH_PROGRAMS - 1) // (num_kv_heads * tiles_a_row))


def limit_env(limits: Limits, model: ModelConfig | None = None) -> dict[str, int]:
    """The value of every limit symbol. Without a model, spread_rows is the largest that any has."""
    env = {name: int(getattr(limits, name)) for name in _NUMERIC_LIMITS}
    env[MAX_BUCKET.name] = limits.bucket(limits.max_batch)
    # One tile a row, the fewest that there may be; one row at least, so that there is a buffer.
    env[SPREAD_ROWS.name] = max(1, spread_rows(limits.max_batch, 1 if model is None else model.num_kv_heads, limits.page_size))
    return env


def model_env(model: ModelConfig | None) -> dict[str, int]:
    """The value of every model symbol; none without a model."""
    if model is None:
        return {}
    env = {symbol.name: int(getattr(model, symbol.name)) for symbol in _DENSE}
    for part, symbols in ((model.gdn, GDN_SYMBOLS), (model.experts, EXPERT_SYMBOLS)):
        env |= {symbol.name: 0 if part is None else int(getattr(part, symbol.name)) for symbol in symbols}
    return env
