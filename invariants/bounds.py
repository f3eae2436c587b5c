"""The bounds of every buffer that twinfer keeps, as data, and the scheduler's contract that they rest on. Not their checking or allocation.

Order matters to errors only: the contract comes first, so that a plan over a limit is told by the limit's name, not by a buffer that follows it.
"""

from __future__ import annotations

from twinfer.invariants.bound import EXECUTORS, MODEL_DTYPE, WIDE_DTYPE, Bound
from twinfer.invariants.expr import Const, Expr, by_reference, ceil_div, maximum, minimum
from twinfer.invariants.symbols import (
    BIAS_ENTRIES,
    CHUNK,
    CHUNK_LESS,
    CHUNK_REST,
    CONV_DIM,
    CONV_HISTORY,
    DELTA_ENTRIES,
    DELTA_LENGTHS,
    EXPERT_SIZE,
    EXPERTS_A_TOKEN,
    HEAD_DIM,
    HIDDEN_SIZE,
    KEY_HEAD_DIM,
    LARGEST_BIAS,
    LARGEST_CONTEXT,
    LARGEST_LENGTH,
    LARGEST_LOGPROBS,
    LARGEST_PAGE,
    LARGEST_POSITION,
    LARGEST_SAMPLES,
    LARGEST_SLOT,
    LOGIT_TILE,
    MAX_BATCH,
    MAX_BUCKET,
    MAX_CHUNK_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_TOKENS,
    MAX_LOGPROBS,
    MAX_STEP_TOKENS,
    MLP_SIZE,
    NUM_ATTENTION_LAYERS,
    NUM_EXPERTS,
    NUM_GDN_LAYERS,
    NUM_HEADS,
    NUM_KEY_HEADS,
    NUM_KV_HEADS,
    NUM_PAGES,
    NUM_PROJECTED_HEADS,
    NUM_RESTORES,
    NUM_ROUTER_ROWS,
    NUM_ROWS,
    NUM_SAMPLED,
    NUM_SAVES,
    NUM_SCORED,
    NUM_SHARED,
    NUM_SNAPSHOTS,
    NUM_STATE_SLOTS,
    NUM_TOKENS,
    NUM_VALUE_HEADS,
    ONE_PAGE,
    ONE_POSITION,
    ONE_REFERENCE_A_ROW,
    ONE_ROW,
    ONE_TASK_A_TOKEN,
    ONE_TOKEN_A_ROW,
    PADDED_ROWS,
    PAGE_REFS,
    PAGE_SIZE,
    PROJECTION_DIM,
    ROTARY_DIM,
    ROW_EXTENT,
    ROW_SPLITS,
    SEEN_ENTRIES,
    SPLIT,
    SPLIT_REST,
    SPREAD_ROWS,
    SPREAD_SPLITS,
    STATE_TASKS,
    STEP_CONTEXT,
    STEP_EXTENT,
    TILES_A_ROW,
    UNIFORM_ROWS,
    USED_SNAPSHOTS,
    USED_STATE_SLOTS,
    VALUE_HEAD_DIM,
    VERIFY_TOKENS,
    VOCAB_SIZE,
)
from twinfer.invariants.unit import ELEMENTS, ONE, PAGE_REFERENCES, PAGES, ROWS, SNAPSHOTS, STATE_SLOTS, TASKS, TOKENS
from twinfer.plan import SAMPLING_DTYPES

PROFILE_OUTAGE = "a vLLM patch set (Qwen3.6 hybrid): sized at the 4096 tokens of the profiling forward, a mixed step had 5536; out of bounds after 85 minutes"
POOL_OUTAGE = "openinfer #403: sized by the pool; 256 requests over one warm 3000-word prompt overflowed it, every later request failed, /health stayed 200"

# What padding lists. A step whose rows are all as short as a verify row is padded to its bucket of rows. A mixed step is padded to a number of tokens
# that is at most max_step_tokens, so its capacity holds it; rows and samples it pads none.
PADDING_ROWS: Expr = PADDED_ROWS - NUM_ROWS
STEP_TOKENS: Expr = maximum(NUM_TOKENS, UNIFORM_ROWS * VERIFY_TOKENS)
TOKEN_CAPACITY: Expr = maximum(MAX_STEP_TOKENS, MAX_BUCKET * VERIFY_TOKENS)
SAMPLE_CAPACITY: Expr = MAX_BUCKET * VERIFY_TOKENS
SAMPLES: Expr = NUM_SAMPLED + PADDING_ROWS * ONE_TOKEN_A_ROW

PAGE_LIST: Expr = by_reference(ceil_div(ROW_EXTENT, PAGE_SIZE))  # of one row
PAGE_INDICES: Expr = minimum(
    MAX_BUCKET * PAGE_LIST,
    # ceil(c / p) <= (c + p - 1) / p: each row adds at most one partly filled page to what the contexts fill together
    by_reference(ceil_div(STEP_EXTENT, PAGE_SIZE)) + MAX_BUCKET * ONE_REFERENCE_A_ROW,
)

# What attention lists and keeps where splits are spread over programs. Few rows spread (SPREAD_ROWS), so their contexts are bounded by that too. Each
# split but a row's last is full, so R rows have at most (keys + 255 R) / 256 of them, rounded down.
SPREAD_CAPACITY: Expr = minimum(ceil_div(STEP_EXTENT + (SPREAD_ROWS - ONE_ROW) * SPLIT_REST, SPLIT), SPREAD_ROWS * ROW_SPLITS)
SAMPLING_CHUNKS: Expr = ceil_div(VOCAB_SIZE, Const(4096, ELEMENTS))
# The search's digits (16 values, 16 levels of 4 bits) and the most alternatives that its scratch holds: twinfer.kernels.sampling has the same numbers.
SAMPLING_SCRATCH: dict[str, tuple[str, tuple[Expr, ...]]] = {
    "scores": ("float64", (VOCAB_SIZE,)),
    "adjusted": ("int32", ()),
    "best": ("float64", (SAMPLING_CHUNKS,)),
    "best_id": ("int32", (SAMPLING_CHUNKS,)),
    "bad": ("int32", (SAMPLING_CHUNKS,)),
    "bad_id": ("int32", (SAMPLING_CHUNKS,)),
    "mode": ("int32", ()),
    "top": ("float64", ()),
    "cut": ("int64", ()),
    "cut_id": ("int32", ()),
    "bins": ("int64", (Const(2), SAMPLING_CHUNKS, Const(16))),
    "state": ("int64", (Const(16), Const(2))),
    "draw": ("float64", (SAMPLING_CHUNKS,)),
    "draw_id": ("int32", (SAMPLING_CHUNKS,)),
    "peaks": ("int64", (SAMPLING_CHUNKS, Const(32))),
    "mass": ("int64", (SAMPLING_CHUNKS,)),
}

# Chunks of rows of several tokens: each token of a step is in one, and each row begins and ends in one that it need not fill. Rounded down.
ROWS_OF_CHUNK = Const(64)
STATE_TASK_CAPACITY: Expr = minimum(MAX_STEP_TOKENS * ONE_TASK_A_TOKEN, ceil_div(MAX_STEP_TOKENS + MAX_BATCH * CHUNK_REST - CHUNK_LESS, CHUNK))

CONTRACT: tuple[Bound, ...] = (
    Bound("rows", ROWS, "", MAX_BATCH, NUM_ROWS, "Everything by row is sized from it.", assumed=True),
    Bound("step_tokens", TOKENS, "", MAX_STEP_TOKENS, NUM_TOKENS, "A step's rows are co-scheduled: their sum counts, not the longest.", assumed=True),
    Bound(
        "row_tokens",
        TOKENS / ROWS,
        "",
        maximum(MAX_CHUNK_TOKENS, VERIFY_TOKENS),
        LARGEST_LENGTH,
        "A longer chunk would hold up the decode rows of its step.",
        assumed=True,
    ),
    Bound(
        "row_context",
        TOKENS / ROWS,
        "",
        ROW_EXTENT,
        LARGEST_CONTEXT,
        "A row may write its look-ahead and verify tokens beyond max_context, and nothing beyond those.",
        assumed=True,
    ),
    Bound(
        "step_context",
        TOKENS,
        "",
        STEP_EXTENT,
        STEP_CONTEXT,
        "Whatever is counted by reference grows with the sum of the rows' contexts: at 256 rows of 262144 tokens, split partials alone take 4 GB.",
        assumed=True,
    ),
    Bound(
        "row_samples",
        TOKENS / ROWS,
        "",
        VERIFY_TOKENS,
        LARGEST_SAMPLES,
        "A row samples one token, a verify row one for each draft token more.",
        assumed=True,
    ),
    Bound("row_bias", ELEMENTS / ROWS, "", MAX_LOGIT_BIAS, LARGEST_BIAS, "Tokens banned by min_tokens count as well as the caller's.", assumed=True),
    Bound("logprobs", ELEMENTS / TOKENS, "", MAX_LOGPROBS, LARGEST_LOGPROBS, "The alternatives of a position are a row of fixed width.", assumed=True),
    Bound("state_slots", STATE_SLOTS, "", NUM_STATE_SLOTS, USED_STATE_SLOTS, "A dense model has none; a slot it named would be nobody's.", assumed=True),
    Bound("snapshots", SNAPSHOTS, "", NUM_SNAPSHOTS, USED_SNAPSHOTS, "A copy from or into a snapshot beyond the last is someone else's memory.", assumed=True),
)


def _tokens(name: str, dtype: str, why: str) -> Bound:
    return Bound(name, TOKENS, dtype, TOKEN_CAPACITY, STEP_TOKENS, why, PROFILE_OUTAGE, owners=EXECUTORS, staged=True)


def _pointers(name: str, why: str, indexes: str, owners: tuple[str, ...] = ("fast",)) -> Bound:
    return Bound(name, ROWS, "int32", MAX_BUCKET + ONE_ROW, PADDED_ROWS + ONE_ROW, why, owners=owners, staged=True, indexes=indexes)


def _by_row(name: str, dtype: str, owners: tuple[str, ...] = ("fast",)) -> Bound:
    return Bound(name, ROWS, dtype, MAX_BUCKET, PADDED_ROWS, "One entry a row; a graph reads an entry for each padding row too.", owners=owners, staged=True)


def _by_slot(name: str, dtype: str, owners: tuple[str, ...] = ("engine",), host_only: bool = False) -> Bound:
    why = "One entry a batch slot; slots are numbered below max_batch."
    return Bound(name, ROWS, dtype, MAX_BATCH, LARGEST_SLOT + ONE_ROW, why, owners=owners, host_only=host_only)


def _by_sample(name: str, dtype: str, *width: Expr) -> Bound:
    why = "A verify row samples at each draft token and one more; each padding row lists one."
    return Bound(name, TOKENS, dtype, SAMPLE_CAPACITY, SAMPLES, why, shape=(SAMPLE_CAPACITY, *width), staged=True)


def _by_score(name: str, dtype: str, *width: Expr) -> Bound:
    why = "Every token of a step may be a prompt token whose next one is scored."
    return Bound(name, TOKENS, dtype, MAX_STEP_TOKENS, NUM_SCORED, why, shape=(MAX_STEP_TOKENS, *width), staged=True)


def _by_bias(name: str, dtype: str) -> Bound:
    why = "Every row may bring as many entries as a request may."
    return Bound(name, ELEMENTS, dtype, MAX_BATCH * MAX_LOGIT_BIAS, BIAS_ENTRIES, why, staged=True)


def _by_seen(name: str) -> Bound:
    why = "Distinct tokens that a row has seen are at most its context, so their sum is bounded as the contexts are, not by max_step_tokens."
    return Bound(name, TOKENS, "int32", STEP_EXTENT, SEEN_ENTRIES, why, staged=True)


def _by_change(name: str) -> Bound:
    why = "A delta names each place of the page table once, so it is at most as large as the table: many prompts admitted in one step come near it."
    return Bound(name, PAGE_REFERENCES, "int32", MAX_BATCH * PAGE_LIST, DELTA_ENTRIES, why, staged=True)


def _activation(name: str, why: str, *width: Expr, dtype: str = MODEL_DTYPE) -> Bound:
    return Bound(name, TOKENS, dtype, TOKEN_CAPACITY, STEP_TOKENS, why, shape=(TOKEN_CAPACITY, *width))


def _by_split(name: str, dtype: str, *width: Expr, staged: bool = False) -> Bound:
    why = (
        "Splits are counted by reference: every short row that spreads has one for each 256 keys of its context, for each of the tiles that its tokens are "
        "cut into (one a token at most). Longer rows are spread only where these leave room."
    )
    return Bound(name, TASKS, dtype, SPREAD_CAPACITY, SPREAD_SPLITS, why, shape=(SPREAD_CAPACITY, TILES_A_ROW, *width), staged=staged)


def _by_logit(name: str, dtype: str, *width: Expr) -> Bound:
    why = "Positions are sampled a tile at a time, and the vocabulary in chunks of 4096 tokens."
    return Bound(f"sampling_{name}", TOKENS, dtype, MAX_LOGIT_TOKENS, LOGIT_TILE, why, shape=(MAX_LOGIT_TOKENS, *width))


def _kv(name: str) -> Bound:
    pages = NUM_PAGES + ONE_PAGE
    why = "The pool's pages, counted once however many rows list them, and the padding page 0 that padding rows read and write."
    shape = (NUM_ATTENTION_LAYERS, pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return Bound(name, PAGES, MODEL_DTYPE, pages, LARGEST_PAGE + ONE_PAGE, why, shape=shape, owners=EXECUTORS)


def _state(name: str, dtype: str, why: str, *width: Expr) -> Bound:
    shape = (NUM_GDN_LAYERS, NUM_STATE_SLOTS, *width)
    return Bound(name, STATE_SLOTS, dtype, NUM_STATE_SLOTS, USED_STATE_SLOTS, why, shape=shape, owners=EXECUTORS)


def _by_chunk(name: str, dtype: str, *width: Expr, staged: bool = False) -> Bound:
    why = "A row of n tokens lies in at most (n + 126) / 64 chunks, in no more than it has tokens; a row of one token is in none."
    return Bound(name, TASKS, dtype, STATE_TASK_CAPACITY, STATE_TASKS, why, PROFILE_OUTAGE, shape=(STATE_TASK_CAPACITY, *width), staged=staged)


def _open_chunk(name: str, dtype: str, why: str, *width: Expr) -> Bound:
    shape = (NUM_GDN_LAYERS, NUM_STATE_SLOTS, *width)
    return Bound(name, STATE_SLOTS, dtype, NUM_STATE_SLOTS, USED_STATE_SLOTS, why, shape=shape)


def _single(name: str, *width: Expr) -> Bound:
    return Bound(name, ROWS, "float32", MAX_BUCKET, PADDED_ROWS, "Between the two launches of rows of one token.", shape=(MAX_BUCKET, *width))


def _state_list(name: str, why: str, width: int) -> Bound:
    return Bound(name, ROWS, "int32", MAX_BUCKET, PADDED_ROWS, why, shape=(MAX_BUCKET, Const(width)), staged=True)


def _snapshot(name: str, dtype: str, *width: Expr) -> Bound:
    shape = (NUM_GDN_LAYERS, NUM_SNAPSHOTS, *width)
    why = "What a state slot holds, once for each snapshot that the prefix cache may keep, whoever runs: a hit needs the state at its very length."
    return Bound(name, SNAPSHOTS, dtype, NUM_SNAPSHOTS, USED_SNAPSHOTS, why, shape=shape, owners=EXECUTORS)


def _by_copy(name: str, demand: Expr) -> Bound:
    return Bound(name, ROWS, "", MAX_BATCH, demand, "A row copies its own state at most once each way, so a step has at most as many copies as rows.")


def _by_state(name: str, dtype: str, why: str) -> Bound:
    return Bound(name, STATE_SLOTS, dtype, NUM_STATE_SLOTS, USED_STATE_SLOTS, why, owners=("engine",))


def _by_snapshot(name: str, dtype: str, why: str) -> Bound:
    return Bound(name, SNAPSHOTS, dtype, NUM_SNAPSHOTS, USED_SNAPSHOTS, f"One entry a snapshot: {why}.", owners=("engine",))


def _by_page(name: str, dtype: str) -> Bound:
    why = "One entry a page of the pool and one for the padding page."
    return Bound(name, PAGES, dtype, NUM_PAGES + ONE_PAGE, LARGEST_PAGE + ONE_PAGE, why, owners=("engine",))


_SLOT = {
    "computed": "int32",
    "planned": "int32",
    "known": "int32",
    "known_limit": "int32",
    "unread": "int32",
    "last_step": "int64",
    "last_token": "int32",
    "needs_host": "bool",
    "identity": "int64",
    "scored_logprobs": "int32",
    "state_slot": "int32",
    "next_snapshot": "int32",
    "restored_from": "int32",
    **SAMPLING_DTYPES,
}

BUFFERS: tuple[Bound, ...] = (
    Bound(
        "page_indices",
        PAGE_REFERENCES,
        "int32",
        PAGE_INDICES,
        PAGE_REFS + PADDING_ROWS * ONE_REFERENCE_A_ROW,
        "A page that n rows share is listed n times, so the pool's size says nothing about this list; padding rows list the padding page.",
        POOL_OUTAGE,
        owners=("reference",),
        staged=True,
    ),
    _tokens("token_ids", "int32", "The tokens of the largest step that may be planned; no profiling or warm-up size has a place here."),
    _tokens("positions", "int32", "One position a token."),
    _tokens("write_slots", "int64", "One slot a token; int64, since 2^18 pages of 16 tokens by 8 x 128 elements overflow 32 bits as an offset."),
    Bound(
        "token_row",
        TOKENS,
        "int32",
        TOKEN_CAPACITY,
        STEP_TOKENS,
        "Which row each token is of, none for a padding token: it writes to no state and goes through no expert.",
        PROFILE_OUTAGE,
        staged=True,
    ),
    _pointers("row_indptr", "One more than the rows: the last entry is the number of tokens.", "token_ids", EXECUTORS),
    _by_row("context", "int32", EXECUTORS),
    _pointers("page_indptr", "One more than the rows: the last entry is the number of page references.", "page_indices", ("reference",)),
    Bound(
        "page_table",
        ROWS,
        "int32",
        MAX_BATCH,
        LARGEST_SLOT + ONE_ROW,
        "A page list a batch slot, as long as the longest context with its overshoot; the executor keeps a replica.",
        shape=(MAX_BATCH, ceil_div(ROW_EXTENT, PAGE_SIZE)),
        owners=("engine", *EXECUTORS),
        host_only=True,
    ),
    Bound(
        "device_page_table",
        ROWS,
        "int32",
        MAX_BATCH,
        LARGEST_SLOT + ONE_ROW,
        "The same on the device, where attention reads page lists: the concatenated list, counted by reference, in place.",
        POOL_OUTAGE,
        shape=(MAX_BATCH, ceil_div(ROW_EXTENT, PAGE_SIZE)),
    ),
    Bound(
        "page_table_width",
        PAGES / ROWS,
        "",
        ceil_div(ROW_EXTENT, PAGE_SIZE),
        ceil_div(LARGEST_CONTEXT, PAGE_SIZE),
        "The width of the page table: pages that one row lists.",
    ),
    _by_slot("page_counts", "int32", ("engine", *EXECUTORS), host_only=True),
    _by_slot("token_feed", "int32", EXECUTORS),
    *(_by_change(name) for name in ("delta_slot", "delta_index", "delta_page")),
    Bound("delta_lengths", ROWS, "", MAX_BATCH, DELTA_LENGTHS, "A plan tells each slot's new length once."),
    _kv("kv_keys"),
    _kv("kv_values"),
    _state("conv_histories", MODEL_DTYPE, "What the convolution read last, of each sequence that runs.", CONV_HISTORY, CONV_DIM),
    _state(
        "recurrent_states",
        WIDE_DTYPE,
        "A matrix a value head of each sequence that runs, whatever its context: each token changes all of it, so it is kept wide.",
        NUM_VALUE_HEADS,
        KEY_HEAD_DIM,
        VALUE_HEAD_DIM,
    ),
    _open_chunk("state_keys", MODEL_DTYPE, "Keys of each sequence's open chunk.", NUM_KEY_HEADS, ROWS_OF_CHUNK, KEY_HEAD_DIM),
    _open_chunk("state_decay_sums", "float32", "Logarithms of the decay since the chunk began.", NUM_VALUE_HEADS, ROWS_OF_CHUNK),
    _open_chunk("state_beta", "float32", "Write strengths of its tokens.", NUM_VALUE_HEADS, ROWS_OF_CHUNK),
    *(
        _open_chunk(f"state_{name}_{piece}", MODEL_DTYPE, f"{what}; in a 16-bit model in two pieces, in float32 the second is idle.", *width)
        for piece in ("high", "low")
        for name, what, width in (
            ("t", "Rows of the open chunk's triangular solve", (NUM_VALUE_HEADS, ROWS_OF_CHUNK, ROWS_OF_CHUNK)),
            ("x", "Rows of the part of it left of the open block of 16", (NUM_VALUE_HEADS, Const(16), ROWS_OF_CHUNK)),
            ("r", "What each of its tokens would add to the state", (NUM_VALUE_HEADS, ROWS_OF_CHUNK, VALUE_HEAD_DIM)),
        )
    ),
    _open_chunk(
        "state_anchor_high",
        MODEL_DTYPE,
        "The state as products read it, in the model's dtype: half the bytes of a step; in float32 it is idle.",
        NUM_VALUE_HEADS,
        KEY_HEAD_DIM,
        VALUE_HEAD_DIM,
    ),
    _snapshot("conv_snapshots", MODEL_DTYPE, CONV_HISTORY, CONV_DIM),
    _snapshot("recurrent_snapshots", WIDE_DTYPE, NUM_VALUE_HEADS, KEY_HEAD_DIM, VALUE_HEAD_DIM),
    _by_copy("restores", NUM_RESTORES),
    _by_copy("saves", NUM_SAVES),
    _by_state("state_owner", "int64", "One entry a state slot: whose it is."),
    _by_state("state_length", "int32", "One entry a state slot: how many tokens its state has behind it when every launched step is over."),
    _by_snapshot("snapshot_length", "int32", "how many tokens it has behind it"),
    _by_snapshot("snapshot_written", "bool", "whether the step that saves it was launched"),
    _by_snapshot("snapshot_pins", "int32", "how many pending steps read or write it"),
    _by_page("page_references", "int32"),
    _by_page("page_sealed", "bool"),
    _activation("residual", "The residual stream, one vector a token.", HIDDEN_SIZE),
    _activation("normed", "What a norm gives, the input of the projections.", HIDDEN_SIZE),
    _activation("projected", "What o_proj and down_proj give, before it is added to the residual stream.", HIDDEN_SIZE),
    _activation("qkv", "Queries, keys and values as projected, with a gate behind each query where the model has them.", NUM_PROJECTED_HEADS, HEAD_DIM),
    _activation("queries", "Queries, normed and rotated.", NUM_HEADS, HEAD_DIM),
    _activation("attended", "What attention gives.", NUM_HEADS, HEAD_DIM),
    _activation("gate_up", "Both projections of the MLP.", Const(2), MLP_SIZE),
    _activation("activated", "Their gated product.", MLP_SIZE),
    _activation("gdn_projected", "What Gated DeltaNet's input projections give: channels of its convolution, gate, b and a.", PROJECTION_DIM),
    _activation("gdn_queries", "Its queries, convolved and normed.", NUM_KEY_HEADS, KEY_HEAD_DIM),
    _activation("gdn_keys", "Its keys, convolved and normed.", NUM_KEY_HEADS, KEY_HEAD_DIM),
    _activation("gdn_values", "Its values, convolved.", NUM_VALUE_HEADS, VALUE_HEAD_DIM),
    _activation("gdn_decay", "Logarithm of what each token leaves of each head's state.", NUM_VALUE_HEADS, dtype="float32"),
    _activation("gdn_strength", "How far each token moves what a head recalls.", NUM_VALUE_HEADS, dtype="float32"),
    _activation("gdn_mixed", "What Gated DeltaNet reads from its states, before and after its gated norm.", NUM_VALUE_HEADS, VALUE_HEAD_DIM),
    _by_chunk("gdn_tasks", "int32", Const(4), staged=True),
    _state_list("gdn_longs", "Rows of several tokens.", 6),
    _state_list("gdn_singles", "Rows of one token.", 3),
    _state_list("gdn_commits", "Rows of one token that fills its chunk.", 2),
    Bound("gdn_counts", ROWS, "int32", ONE_ROW, ONE_ROW, "How long each of the four lists is.", shape=(ONE_ROW, Const(4)), staged=True),
    _by_chunk("gdn_sums", "float32", ROWS_OF_CHUNK, NUM_VALUE_HEADS),
    _by_chunk("gdn_strengths", "float32", ROWS_OF_CHUNK, NUM_VALUE_HEADS),
    *(
        _by_chunk(f"gdn_{name}_{piece}", MODEL_DTYPE, NUM_VALUE_HEADS, ROWS_OF_CHUNK, ROWS_OF_CHUNK) for name in ("t", "m") for piece in ("high", "low")
    ),
    _by_chunk("gdn_diagonal", "float32", NUM_VALUE_HEADS, ROWS_OF_CHUNK),
    _single("gdn_weights", NUM_VALUE_HEADS, ROWS_OF_CHUNK),
    _single("gdn_streamed", NUM_VALUE_HEADS, Const(2), VALUE_HEAD_DIM),
    _activation("router_logits", "One logit an expert, and the shared expert's gate.", NUM_ROUTER_ROWS),
    _activation("expert_shares", "How much of each chosen expert a token gets.", EXPERTS_A_TOKEN),
    _activation("expert_numbers", "The experts that a token goes through.", EXPERTS_A_TOKEN, dtype="int32"),
    _activation("expert_pairs", "Pairs of a token and an expert, by expert.", EXPERTS_A_TOKEN, dtype="int32"),
    _activation("expert_tiles", "Tiles of pairs of one expert, at most one a pair.", EXPERTS_A_TOKEN, Const(3), dtype="int32"),
    Bound("expert_tile_count", ROWS, "int32", ONE_ROW, ONE_ROW, "How many tiles a layer of the step has."),
    Bound("expert_offsets", ROWS, "int32", ONE_ROW, ONE_ROW, "Where each expert's pairs begin and end.", shape=(ONE_ROW, NUM_EXPERTS + Const(1))),
    _activation("expert_activated", "What each pair's first product gives, gated.", EXPERTS_A_TOKEN, EXPERT_SIZE),
    _activation("expert_outputs", "What each pair's second product gives, in its own place.", EXPERTS_A_TOKEN, HIDDEN_SIZE),
    _activation("shared_output", "What the shared expert gives.", NUM_SHARED * HIDDEN_SIZE),
    Bound(
        "serial_tasks",
        TASKS,
        "int32",
        TOKEN_CAPACITY * ONE_TASK_A_TOKEN,
        STEP_TOKENS * ONE_TASK_A_TOKEN,
        "A tile of queries holds at least one token.",
        shape=(TOKEN_CAPACITY * ONE_TASK_A_TOKEN, Const(4)),
        staged=True,
    ),
    Bound(
        "decode_tasks",
        ROWS,
        "int32",
        MAX_BUCKET,
        PADDED_ROWS,
        "A row of one token is one tile, a verify row at most one a token.",
        shape=(MAX_BUCKET, TILES_A_ROW, Const(4)),
        staged=True,
    ),
    _by_split("spread_tasks", "int32", Const(4), staged=True),
    _by_split("partial_values", "float32", NUM_HEADS, HEAD_DIM),
    _by_split("partial_largest", "float32", NUM_HEADS),
    _by_split("partial_sum", "float32", NUM_HEADS),
    _by_split("partial_arrived", "int32", NUM_KV_HEADS),
    Bound(
        "logit_inputs",
        TOKENS,
        MODEL_DTYPE,
        MAX_LOGIT_TOKENS,
        LOGIT_TILE,
        "The hidden vectors of a tile of positions, side by side.",
        shape=(MAX_LOGIT_TOKENS, HIDDEN_SIZE),
    ),
    Bound(
        "logits",
        TOKENS,
        MODEL_DTYPE,
        MAX_LOGIT_TOKENS,
        LOGIT_TILE,
        "Logits exist a tile at a time: all positions of a step of 8192 tokens would take 5 GB at a vocabulary of 151936.",
        shape=(MAX_LOGIT_TOKENS, VOCAB_SIZE),
    ),
    Bound(
        "rope_table",
        TOKENS / ROWS,
        MODEL_DTYPE,
        ROW_EXTENT,
        LARGEST_POSITION + ONE_POSITION,
        "Overshoot tokens have positions too; a table of max_context entries is read past its end by the last draft token.",
        "openinfer #250: rows past the end of the rope table, found by a golden of 4097 and 8192 positions",
        shape=(ROW_EXTENT, Const(2), ROTARY_DIM),
    ),
    Bound(
        "token_mask",
        ROWS,
        "uint32",
        MAX_BUCKET,
        PADDED_ROWS,
        "One bit a token of the config's vocabulary, which is padded: a mask as wide as the tokenizer's is read past its end.",
        shape=(MAX_BUCKET, ceil_div(VOCAB_SIZE, Const(32, ELEMENTS))),
        staged=True,
    ),
    *(_by_row(f"row_{name}", dtype) for name, dtype in SAMPLING_DTYPES.items()),
    _by_row("row_slot", "int32"),
    _by_row("row_state_slot", "int32"),
    _by_row("row_scored_logprobs", "int32"),
    Bound(
        "task_counts",
        ROWS,
        "int32",
        ONE_ROW,
        ONE_ROW,
        "How many tasks each of attention's three lists holds, 16 bytes apart.",
        shape=(ONE_ROW, Const(12)),
        staged=True,
    ),
    *(_by_logit(name, dtype, *width) for name, (dtype, width) in SAMPLING_SCRATCH.items()),
    _pointers("bias_indptr", "One more than the rows.", "bias_ids"),
    _by_bias("bias_ids", "int32"),
    _by_bias("bias_values", "float32"),
    _pointers("seen_indptr", "One more than the rows.", "seen_ids"),
    _by_seen("seen_ids"),
    _by_seen("seen_counts"),
    _by_sample("sampled_at", "int64"),
    _by_sample("sampled_row", "int32"),
    _by_sample("sampled_position", "int32"),
    _by_sample("sampled_tokens", "int32"),
    _by_sample("sampled_errors", "int32", Const(3)),
    _by_sample("sampled_logprob", "float64"),
    _by_sample("sampled_top_ids", "int32", MAX_LOGPROBS * Const(1, TOKENS / ELEMENTS)),
    _by_sample("sampled_top_logprobs", "float64", MAX_LOGPROBS * Const(1, TOKENS / ELEMENTS)),
    _by_score("scored_at", "int64"),
    _by_score("scored_row", "int32"),
    _by_score("scored_targets", "int32"),
    _by_score("scored_logprob", "float64"),
    _by_score("scored_top_ids", "int32", MAX_LOGPROBS * Const(1, TOKENS / ELEMENTS)),
    _by_score("scored_top_logprobs", "float64", MAX_LOGPROBS * Const(1, TOKENS / ELEMENTS)),
    *(_by_slot(name, dtype) for name, dtype in _SLOT.items()),
)

BOUNDS: tuple[Bound, ...] = CONTRACT + BUFFERS
BY_NAME: dict[str, Bound] = {bound.name: bound for bound in BOUNDS}
assert len(BY_NAME) == len(BOUNDS) and all(bound.unit != ONE for bound in BOUNDS)
