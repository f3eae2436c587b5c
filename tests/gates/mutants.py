"""Broken engines: the reference with one fault each, and the gates that must go red for it. Not a test.

Where it can be, a fault is one that some engine had in public, put where it was: in the scheduler, the page pool or the forward pass. A mutant is a
factory for --twinfer-engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinfer.errors import RequestRefused, StepFailed
from twinfer.invariants.gates.adapter import Answer, Ask, Event, Pages, Refused, Setup
from twinfer.invariants.gates.adapters import EngineAdapter, reference

Break = Callable[[EngineAdapter, Setup], Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault and the gates (file::test) that find it. `breaks` changes the adapter, or gives another one for it."""

    name: str
    breaks: Break
    killers: tuple[str, ...]

    def __call__(self, setup: Setup) -> Any:
        adapter = reference(setup)
        return self.breaks(adapter, setup) or adapter


MUTANTS: dict[str, Mutant] = {}


def mutant(*killers: str) -> Callable[[Break], Break]:
    """Enters a function as a mutant of its name."""

    def enter(breaks: Break) -> Break:
        MUTANTS[breaks.__name__] = Mutant(breaks.__name__, breaks, killers)
        return breaks

    return enter


def watch(adapter: EngineAdapter, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Has every forward pass's hidden vectors [tokens, h] go through `change(flat, hidden)`."""
    model: Any = adapter.engine.executor.model
    forward = model.forward

    def changed(step: Any, cache: Any, *more: Any) -> torch.Tensor:
        return change(step, forward(step, cache, *more))

    model.forward = changed


def lengths(flat: Any) -> list[int]:
    """Tokens of each row of a step."""
    return [b - a for a, b in zip(flat.row_indptr[:-1].tolist(), flat.row_indptr[1:].tolist(), strict=True)]


# ---- numbers -----------------------------------------------------------------------------------------------------------------


@mutant("test_golden.py::test_next_token_after_each_length", "test_golden.py::test_generated_tokens")
def log_probabilities_are_off_by_a_hundredth(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate
    adapter.generate = lambda asks: [replace(a, logprobs=[p + 0.01 for p in a.logprobs]) for a in generate(asks)]


@mutant("test_golden.py::test_next_token_after_a_long_prompt", "test_golden.py::test_logprobs_of_a_prompt")
def positions_end_at_1500(adapter: Any, setup: Setup) -> None:
    """A table of rotations that is shorter than what is admitted."""
    model = adapter.engine.executor.model
    forward = model.forward

    def clamped(step: Any, cache: Any, *more: Any) -> torch.Tensor:
        return forward(replace(step, positions=step.positions.clip(max=1499)), cache, *more)

    model.forward = clamped


@mutant("test_golden.py::test_logprobs_of_a_prompt")
def prompt_scores_are_one_late(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate

    def late(asks: Sequence[Ask]) -> list[Answer]:
        answers = generate(asks)
        return [a if a.prompt_logprobs is None else replace(a, prompt_logprobs=[0.0, *a.prompt_logprobs[:-1]]) for a in answers]

    adapter.generate = late


@mutant("test_isolation.py::test_the_same_call_gives_the_same_bits")
def the_last_bit_drifts(adapter: Any, setup: Setup) -> None:
    generate, calls = adapter.generate, [0]

    def drifting(asks: Sequence[Ask]) -> list[Answer]:
        calls[0] += 1
        return [replace(a, logprobs=[p * (1 + calls[0] * 2.0**-50) for p in a.logprobs]) for a in generate(asks)]

    adapter.generate = drifting


@mutant("test_isolation.py::test_a_batch_gives_the_bits_of_single_requests")
def the_batch_decides_the_last_bit(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate
    adapter.capabilities = adapter.capabilities | {"one_arithmetic"}
    adapter.generate = lambda asks: [replace(a, logprobs=[p * (1 + len(asks) * 2.0**-50) for p in a.logprobs]) for a in generate(asks)]


@mutant("test_prefix_cache.py::test_a_warm_prompt_hits_and_says_the_same")
def a_hit_decides_the_last_bit(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate
    adapter.capabilities = adapter.capabilities | {"one_arithmetic"}
    adapter.generate = lambda asks: [replace(a, logprobs=[p * (1 + a.num_cached_tokens * 2.0**-50) for p in a.logprobs]) for a in generate(asks)]


# ---- prefix cache ------------------------------------------------------------------------------------------------------------


@mutant("test_prefix_cache.py::test_equal_pages_under_different_prefixes")
def a_page_is_found_by_its_own_tokens(adapter: Any, setup: Setup) -> None:
    """Its hash leaves out the pages before it."""
    prefix = adapter.engine.scheduler.prefix
    extend = prefix.extend
    prefix.extend = lambda before, tokens: extend(b"", tokens)


@mutant("test_prefix_cache.py::test_a_cache_salt_keeps_tenants_apart")
def the_salt_is_ignored(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate
    adapter.generate = lambda asks: generate([replace(ask, cache_salt="") for ask in asks])


@mutant(
    "test_prefix_cache.py::test_a_warm_prompt_hits_and_says_the_same",
    "test_prefix_cache.py::test_hits_around_a_page_boundary",
    "test_chunking.py::test_chunks_behind_a_hit",
)
def a_hit_lacks_the_last_row_of_its_page(adapter: Any, setup: Setup) -> None:
    scheduler, cache = adapter.engine.scheduler, adapter.engine.executor.cache
    match = scheduler._match

    def lacking(sequence: Any) -> list[int]:
        hits: list[int] = match(sequence)
        for layer in (*cache.keys, *cache.values):
            layer[hits[-1:], -1] = 0.0
        return hits

    scheduler._match = lacking


@mutant("test_prefix_cache.py::test_a_second_turn_behind_generated_tokens")
def a_page_that_ends_with_the_last_token_is_sealed(adapter: Any, setup: Setup) -> None:
    """Full by its tokens, but the last one was never computed."""
    scheduler = adapter.engine.scheduler
    release = scheduler._release

    def sealing(sequence: Any) -> None:
        pages = len(sequence.tokens) // scheduler.limits.page_size
        if len(sequence.tokens) % scheduler.limits.page_size == 0 and len(scheduler.table.page_list(sequence.slot)) == pages:
            scheduler._seal(sequence, pages - 1, pages)
        release(sequence)

    scheduler._release = sealing


@mutant("test_prefix_cache.py::test_a_hit_outlives_the_request_that_wrote_it")
def pages_belong_to_who_wrote_them(adapter: Any, setup: Setup) -> None:
    """They are free when their writer ends, whoever else lists them."""
    pool = adapter.engine.scheduler.pool

    def freed(pages: Sequence[int]) -> None:
        for page in pages:
            if pool.references[page]:
                pool.references[page] = 0
                pool.sealed[page] = False
                if adapter.engine.scheduler.prefix.digest_of(page) is not None:
                    adapter.engine.scheduler.prefix.forget(page)
                pool._free.append(page)

    pool.release = freed


@mutant("test_prefix_cache.py::test_staggered_arrivals_list_more_pages_than_there_are")
def the_page_list_is_as_long_as_the_pool(adapter: Any, setup: Setup) -> None:
    executor, failed = adapter.engine.executor, []
    launch, collect = executor.launch, executor.collect

    def checked(plan: Any) -> None:
        listed = int((-(-(plan.start + plan.length) // executor.limits.page_size)).sum())
        failed.append(listed > executor.limits.num_pages + plan.num_rows)
        launch(plan)

    def told() -> Any:
        output = collect()
        if failed.pop(0):
            raise StepFailed("page list overflow")
        return output

    executor.launch, executor.collect = checked, told


@mutant("test_prefix_cache.py::test_recycled_pages_hold_nothing_of_their_last_owner")
def an_evicted_page_can_still_be_found(adapter: Any, setup: Setup) -> None:
    scheduler = adapter.engine.scheduler

    def share(pages: Sequence[int]) -> None:
        for page in pages:
            scheduler.pool._cached.pop(page, None)
            scheduler.pool.references[page] += 1

    def seal(page: int, digest: bytes) -> bool:
        scheduler.prefix._page_of[digest] = page
        return True

    scheduler.pool._on_evict = lambda page: None
    scheduler.pool.share, scheduler.prefix.seal = share, seal


# ---- steps -------------------------------------------------------------------------------------------------------------------


@mutant("test_chunking.py::test_prompts_around_chunk_boundaries", "test_chunking.py::test_chunks_behind_a_hit")
def positions_of_later_chunks_are_off_by_one(adapter: Any, setup: Setup) -> None:
    model = adapter.engine.executor.model
    forward = model.forward

    def shifted(step: Any, cache: Any, *more: Any) -> torch.Tensor:
        positions, at = step.positions.copy(), 0
        for length in lengths(step):
            if length > 1 and positions[at] > 0:
                positions[at : at + length] += 1
            at += length
        return forward(replace(step, positions=positions), cache, *more)

    model.forward = shifted


@mutant("test_mixed_steps.py::test_prefill_beside_decode", "test_mixed_steps.py::test_rows_that_come_and_go")
def a_mixed_step_takes_the_token_before_the_last(adapter: Any, setup: Setup) -> None:
    """Where a prompt ends is counted in rows of one token as soon as a decode row is there."""

    def rolled(flat: Any, hidden: torch.Tensor) -> torch.Tensor:
        each = lengths(flat)
        return hidden.roll(1, 0) if 1 in each and max(each) > 1 else hidden

    watch(adapter, rolled)


@mutant("test_mixed_steps.py::test_prompts_that_exceed_one_chunk_together")
def a_step_has_room_for_one_chunk(adapter: Any, setup: Setup) -> None:
    """A buffer by the cap of a chunk: a slice beyond it is shorter than asked for, and what lies there is something else."""
    room = adapter.engine.limits.max_chunk_tokens

    def short(flat: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:room], torch.zeros_like(hidden[room:])])

    watch(adapter, short)


@mutant("test_mixed_steps.py::test_decode_batches")
def rows_beyond_eight_repeat_the_eighth(adapter: Any, setup: Setup) -> None:
    """A graph that was captured for eight rows."""

    def eight(flat: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:8], hidden[7:8].expand(len(hidden) - 8, -1)]) if max(lengths(flat)) == 1 and len(hidden) > 8 else hidden

    watch(adapter, eight)


# ---- isolation ---------------------------------------------------------------------------------------------------------------


@mutant("test_isolation.py::test_batch_mates_change_nothing")
def shorter_prompts_of_a_batch_lose_their_last_token(adapter: Any, setup: Setup) -> None:
    """Padding on the wrong side."""
    generate = adapter.generate

    def padded(asks: Sequence[Ask]) -> list[Answer]:
        longest = max(len(ask.prompt) for ask in asks)
        return list(generate([ask if len(ask.prompt) in (1, longest) else replace(ask, prompt=ask.prompt[:-1]) for ask in asks]))

    adapter.generate = padded


@mutant("test_isolation.py::test_a_bad_request_is_refused_and_the_engine_serves_on")
def a_prompt_that_is_too_long_is_cut(adapter: Any, setup: Setup) -> None:
    add, generate = adapter.add, adapter.generate

    def cut(ask: Ask) -> Ask:
        return replace(ask, prompt=ask.prompt[: setup.max_context - ask.max_tokens])

    adapter.add = lambda ask: add(cut(ask))
    adapter.generate = lambda asks: generate([cut(ask) for ask in asks])


@mutant("test_isolation.py::test_a_bad_request_is_refused_and_the_engine_serves_on")
def a_bad_token_takes_everybody_down(adapter: Any, setup: Setup) -> None:
    add = adapter.add

    def fatal(ask: Ask) -> Hashable:
        try:
            return add(ask)  # type: ignore[no-any-return]
        except Refused:
            adapter.engine._lose(IndexError("index out of range"))
            raise

    adapter.add = fatal


@mutant("test_isolation.py::test_an_abort_changes_nobody_else")
def an_abort_clears_a_neighbours_page(adapter: Any, setup: Setup) -> None:
    abort = adapter.abort

    def clearing(request: Hashable) -> None:
        abort(request)
        scheduler = adapter.engine.scheduler
        for sequence in scheduler.running()[:1]:
            for layer in adapter.engine.executor.cache.values:
                layer[int(scheduler.table.page_list(sequence.slot)[0])] = 0.0

    adapter.abort = clearing


@mutant("test_isolation.py::test_a_prompt_that_was_aborted_half_way_comes_again")
def an_abort_seals_what_it_has(adapter: Any, setup: Setup) -> None:
    """Every page that a half-computed prompt holds, written or not."""
    scheduler = adapter.engine.scheduler
    release = scheduler._release

    def sealing(sequence: Any) -> None:
        if sequence.num_generated == 0:
            scheduler._seal(sequence, 0, len(scheduler.table.page_list(sequence.slot)))
        release(sequence)

    # Pages that are sealed already are not sealed again.
    seal = scheduler.prefix.seal
    scheduler.prefix.seal = lambda page, digest: False if scheduler.prefix.digest_of(page) is not None else seal(page, digest)
    scheduler._release = sealing


# ---- pages -------------------------------------------------------------------------------------------------------------------


@mutant("test_pages.py::test_free_held_and_cached_add_up_at_every_step")
def shared_pages_are_counted_twice(adapter: Any, setup: Setup) -> None:
    pool = adapter.engine.scheduler.pool
    adapter.pages = lambda: Pages(pool.num_pages, pool.num_free, int(pool.references.sum()), pool.num_cached)


@mutant("test_pages.py::test_an_abort_gives_its_pages_back")
def an_abort_loses_a_page(adapter: Any, setup: Setup) -> None:
    abort = adapter.abort

    def losing(request: Hashable) -> None:
        abort(request)
        adapter.engine.scheduler.pool.allocate(1)

    adapter.abort = losing


@mutant("test_pages.py::test_a_refusal_holds_nothing")
def a_refusal_keeps_a_page(adapter: Any, setup: Setup) -> None:
    request = adapter.engine.request

    def keeping(*arguments: Any) -> Any:
        try:
            return request(*arguments)
        except RequestRefused:
            adapter.engine.scheduler.pool.allocate(1)
            raise

    adapter.engine.request = keeping


@mutant("test_pages.py::test_without_a_prefix_cache_all_pages_come_back")
def pages_are_kept_with_the_cache_off(adapter: Any, setup: Setup) -> None:
    adapter.engine.scheduler.prefix_cache = True


@mutant("test_pages.py::test_a_pool_that_is_too_small_for_all_serves_all")
def who_is_preempted_is_forgotten(adapter: Any, setup: Setup) -> None:
    scheduler = adapter.engine.scheduler
    scheduler._preempt = lambda sequence: scheduler.drop([sequence])


@mutant("test_prefix_cache.py::test_a_warm_prompt_hits_and_says_the_same")
def nothing_is_ever_cached(adapter: Any, setup: Setup) -> None:
    """The gates' own validity: a prefix cache that never hits gives right answers."""
    adapter.engine.scheduler.prefix_cache = False


@mutant("test_golden.py::test_generated_tokens")
def the_last_token_never_comes(adapter: Any, setup: Setup) -> None:
    generate = adapter.generate
    adapter.generate = lambda asks: [replace(a, tokens=a.tokens[:-1], logprobs=a.logprobs[:-1]) for a in generate(asks)]


@mutant("test_mixed_steps.py::test_rows_that_come_and_go")
def a_step_tells_of_somebody_unknown(adapter: Any, setup: Setup) -> None:
    step = adapter.step
    adapter.step = lambda: [*step(), Event("nobody", (1,))]
