"""Wrong versions of pages, cache, scheduler and flatten: each must turn the engine machine red, else the machine proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from twinfer.engine import admission, ghost, tables, waiting
from twinfer.engine import flatten as flatten_module
from twinfer.engine.engine import Engine
from twinfer.engine.pages import PagePool
from twinfer.engine.prefix import PrefixCache
from twinfer.engine.rows import RowBuilder
from twinfer.engine.scheduler import Scheduler
from twinfer.engine.tables import TableWriter

from . import test_eviction
from .mutate import mutated
from .test_machine import EngineMachine


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    method: str
    old: str
    new: str


MUTANTS = (
    Mutant("digest without its parent", PrefixCache, "extend", "before + tokens", "tokens"),
    Mutant("digest cut to 2 bits", PrefixCache, "extend", "blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()",
           "bytes([blake2b(before + tokens).digest()[0] % 4])"),
    Mutant("sealed one token early", Scheduler, "_advance", "full = after // size", "full = (after + 1) // size"),
    Mutant("sealed when launched, not when written", Scheduler, "delivered", "self._writer.delivered()",
           "self._writer.delivered(); [self._seal(self._sequence_at(int(s)), int(a) // self.limits.page_size, int(a + n) // self.limits.page_size) "
           "for s, a, n in zip(plan.slot, plan.start, plan.length) if self._sequence_at(int(s)).use_cache]"),
    Mutant("whole prompt may be hit", Scheduler, "_match", "(len(sequence.tokens) - 1) //", "len(sequence.tokens) //"),
    Mutant("hit without a reference", PagePool, "share", "self.references[page] += 1", "pass"),
    Mutant("evicted page stays findable", PagePool, "allocate", "self._on_evict(page)", "pass"),
    Mutant("pages leak when a sequence leaves", Scheduler, "_release", "self.pool.release(self.table.page_list(slot).tolist())", "pass"),
    Mutant("pages released twice", Scheduler, "_release", "self._writer.clear(slot)", "self.pool.release(self.table.page_list(slot).tolist()[:1])"),
    Mutant("cached length one short", Scheduler, "_enter", "cached = len(hits) * self.limits.page_size",
           "cached = max(0, len(hits) * self.limits.page_size - 1)"),
    Mutant("hits not counted against the pool", Scheduler, "_admit", "total + unreferenced + owed", "total"),
    Mutant("pages not checked before reserving", Scheduler, "plan", "total <= self.pool.num_available", "True"),
    Mutant("step tokens ignored", Scheduler, "_choose", "(limits.max_step_tokens - before).clip(0)", "(10**6 - before).clip(0)"),
    Mutant("step context ignored", Scheduler, "_choose", "np.searchsorted(reach, limits.max_step_context", "np.searchsorted(reach, 10**9"),
    Mutant("chunk size ignored", Scheduler, "_choose", "np.minimum(lengths[by_kind], limits.max_chunk_tokens)", "lengths[by_kind]"),
    Mutant("admission ignores the step's tokens", Scheduler, "_admit", "limits.max_chunk_tokens, tokens_left, context_left",
           "limits.max_chunk_tokens, context_left"),
    Mutant("preempted sequence is lost", Scheduler, "_preempt", "self._waiting.appendleft(sequence)", "pass"),
    Mutant("token not remembered", RowBuilder, "read_tokens", "self._last_token[slots[latest]] = tokens[latest]", "pass"),
    Mutant("one token too many", Scheduler, "commit", "num_generated >= sequence.max_new", "num_generated > sequence.max_new"),
    Mutant("slot given twice", Scheduler, "_release", "self._free_slots.append(slot)", "self._free_slots.extend([slot, slot])"),
    Mutant("never-fitting request accepted", admission, "max_new_tokens", "if asked > most:", "if False:"),
    Mutant("changes of a refused plan forgotten", TableWriter, "delta", "return TableDelta(self._delivered, slots",
           "self._entries.clear(); self._lengths.clear(); return TableDelta(self._delivered, slots"),
    Mutant("first change of a place wins", tables, "_last_of", "place[::-1], return_index=True", "place, return_index=True"),
    Mutant("written one place late", flatten_module, "flatten_tokens", "np.divmod(place, page_size)", "np.divmod(place + 1, page_size)"),
    Mutant("position local to the chunk", flatten_module, "flatten_tokens", "np.repeat(start - row_indptr[:-1], plan.length)",
           "np.repeat(-row_indptr[:-1], plan.length)"),
    Mutant("page list of the wrong slot", flatten_module, "list_pages", "map(table.page_lists.__getitem__, slots)",
           "map(table.page_lists.__getitem__, slots[::-1])"),
    Mutant("failed step commits", Engine, "_finish", "self._fail(plan, range(plan.num_rows), str(error))", "pass"),
    Mutant("abort keeps pages", Engine, "abort", "self.scheduler.drop([s.sequence for s in streams])", "pass"),
    Mutant("no terminal event", Engine, "_end", "terminal = not live.open", "terminal = False"),
)  # fmt: skip

QUICK = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_machine_kills(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutated(mutant.owner, mutant.method, mutant.old, mutant.new):
        # Modules that imported a function by name must see the mutant too.
        if mutant.owner is flatten_module:
            monkeypatch.setattr(ghost, "flatten", flatten_module.flatten)
        if mutant.owner is admission:
            monkeypatch.setattr(waiting, "max_new_tokens", admission.max_new_tokens)
        with pytest.raises(Exception) as kill:  # any failure is a kill: an assertion, a law, a wrong token
            run_state_machine_as_test(EngineMachine, settings=QUICK)
    # A mutant that is merely broken Python would die of these, and show nothing.
    assert not isinstance(kill.value, NameError | SyntaxError | TypeError | AttributeError), kill.value


# The order of eviction changes no token, so the machine can't see it: the tests of that order kill these, each of the two by itself.
ORDER_MUTANTS = (
    Mutant("most recently used goes first", PagePool, "allocate", "popitem(last=False)", "popitem(last=True)"),
    Mutant("head is cached before its tail", PagePool, "release", "reversed(pages)", "pages"),
    Mutant("a hit keeps its old place in the order", PagePool, "share", "del self._cached[page]", "pass"),
    Mutant("released pages go to the front", PagePool, "release", "self._cached[page] = None",
           "self._cached[page] = None; self._cached.move_to_end(page, last=False)"),
    Mutant("evicted though free pages are left", PagePool, "allocate", "if self._free:", "if self._free and not self._cached:"),
)  # fmt: skip


@pytest.mark.parametrize("killer", [test_eviction.test_evictions_follow_the_last_use_whatever_the_traffic, test_eviction.check_engine_order])
@pytest.mark.parametrize("mutant", ORDER_MUTANTS, ids=lambda m: m.name)
def test_order_of_eviction_kills(mutant: Mutant, killer: Callable[[], None]) -> None:
    with mutated(mutant.owner, mutant.method, mutant.old, mutant.new), pytest.raises(AssertionError):
        killer()
