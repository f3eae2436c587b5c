"""Limits: the numbers that the scheduler obeys and that every buffer is sized from. One object, read by both; not how they are chosen.

How a value is found (argument, environment, model, memory, default) is `twinfer.invariants.resolve`. No buffer's capacity has an override:
to change a buffer, change the limit, and with it what the scheduler may do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from twinfer.errors import LimitError

STATE_CHUNK = 64
"""Tokens of a chunk of Gated DeltaNet, anchored at position 0: a state is whole, with no chunk open, at multiples of it alone."""


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) for integers, b > 0."""
    return -(-a // b)


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes for captured graphs: 1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 64 to 1024, then doubling; the last is at least max_batch."""
    sizes = [1, 2, 4]
    size = 8
    while True:
        sizes.append(size)
        if size >= max_batch:
            break
        size += 8 if size < 64 else 16 if size < 256 else 64 if size < 1024 else size
    return tuple(s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < max_batch)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may hold at most. Raises LimitError naming the field, the value and the limit.

    max_batch           rows of a step, and requests that run at once
    max_step_tokens     tokens of a step, over all rows
    max_chunk_tokens    tokens of one row of a step
    warmup_tokens       tokens of the warm-up forward; no buffer depends on it
    max_context         tokens of one request in cache, prompt and output together
    max_step_context    sum of the contexts of a step's rows, by reference (shared pages count once for each row)
    max_logit_tokens    tokens whose logits exist at once; more are computed in tiles of this size
    page_size           tokens of a page
    num_pages           pages of the pool (the padding page comes on top)
    num_state_slots     state slots of the pool: sequences of a model with Gated DeltaNet layers that run at once (0 without such layers)
    num_snapshots       snapshots of states that the prefix cache keeps (0: none, and nothing is found in the cache of a model with states)
    snapshot_interval   tokens of a prompt after which a snapshot is taken, whatever is wanted of it: what is computed again at most
    speculative_tokens  draft tokens of a verify row
    look_ahead          steps planned while another runs
    max_logprobs        alternatives reported for a position
    max_logit_bias      entries of one request's logit bias, its tokens banned by min_tokens included
    buckets             batch sizes that graphs are captured for, ascending, the last at least max_batch
    """

    max_batch: int
    max_step_tokens: int
    max_chunk_tokens: int
    warmup_tokens: int
    max_context: int
    max_step_context: int
    max_logit_tokens: int
    page_size: int
    num_pages: int
    num_state_slots: int = 0
    num_snapshots: int = 0
    snapshot_interval: int = 8192
    speculative_tokens: int = 0
    look_ahead: int = 0
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        may_be_zero = ("num_state_slots", "num_snapshots", "speculative_tokens", "look_ahead", "max_logprobs", "max_logit_bias")
        for field in fields(self):
            if field.name == "buckets":
                continue
            value = getattr(self, field.name)
            low = 0 if field.name in may_be_zero else 1
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
                raise LimitError(f"{field.name} = {value!r} must be an integer of at least {low} and below 2^31")
        if not self.buckets:
            object.__setattr__(self, "buckets", default_buckets(self.max_batch))
        if list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise LimitError(f"buckets = {self.buckets} must be positive and strictly ascending")
        if self.buckets[-1] < self.max_batch:
            raise LimitError(f"buckets end at {self.buckets[-1]}, they must reach max_batch = {self.max_batch}")
        decode_tokens = self.max_batch * (1 + self.speculative_tokens)
        if self.max_step_tokens < decode_tokens:
            raise LimitError(
                f"max_step_tokens = {self.max_step_tokens} must be at least max_batch * (1 + speculative_tokens) = {decode_tokens}, "
                "so that every running request fits into a step"
            )
        if self.max_chunk_tokens > self.max_step_tokens:
            raise LimitError(f"max_chunk_tokens = {self.max_chunk_tokens} must be at most max_step_tokens = {self.max_step_tokens}")
        if self.max_step_context < self.max_context:
            raise LimitError(f"max_step_context = {self.max_step_context} must be at least max_context = {self.max_context}")

    def bucket(self, num_rows: int) -> int:
        """The smallest bucket of at least `num_rows` rows. Raises LimitError above the last."""
        for size in self.buckets:
            if size >= num_rows:
                return size
        raise LimitError(f"{num_rows} rows exceed the largest bucket, {self.buckets[-1]}")

    def logit_tiles(self, count: int) -> list[tuple[int, int]]:
        """The tiles (first, end) in which `count` positions are sampled or scored."""
        size = self.max_logit_tokens
        return [(first, min(first + size, count)) for first in range(0, count, size)]

    @property
    def snapshot_grid(self) -> int:
        """Tokens between the lengths at which a state may be kept: whole chunks of Gated DeltaNet and, as one divides the other, whole pages."""
        return max(self.page_size, STATE_CHUNK)

    @property
    def pages_per_context(self) -> int:
        """Pages that one request may hold: its context and what look-ahead and speculation write beyond it."""
        return ceil_div(self.max_context + self.look_ahead + self.speculative_tokens, self.page_size)
