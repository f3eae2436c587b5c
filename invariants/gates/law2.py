"""The gate of law 2: an engine gives a token's logits the same bits whatever the schedule. It runs schedules and compares digests; it measures no error.

Every request is run alone first. Then the same requests run in batches, in chunks, in mixed steps, behind prefix hits, after preemption, by graphs and
without, and the logits at every position must have the bits of the solo run. Bits are compared as 64-bit digests made on the device from integers, so
that nothing large is kept; two different rows share a digest with a probability of 2^-64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from twinfer.engine.engine import Engine
from twinfer.limits import Limits, ceil_div
from twinfer.request import Event
from twinfer.sampling import SamplingParams

Make = Callable[[Limits, bool], Engine]
"""(limits, whether graphs may be used) -> an engine whose executor has a `tap`; the engine is closed before the next one is made."""
Key = tuple[int, int]  # request, position


@dataclass(slots=True)
class Finding:
    """One schedule: how many positions it computed, and those whose logits differ from the solo run's."""

    schedule: str
    num_positions: int = 0
    different: list[Key] = field(default_factory=list)
    reached: bool = True  # False: what the schedule is for did not happen (no chunk, no mixed step, no hit, no preemption)

    @property
    def holds(self) -> bool:
        return self.reached and self.num_positions > 0 and not self.different


def digests(logits: torch.Tensor) -> list[int]:
    """One 64-bit number a row of [n, V]: the bits of its logits as integers, times odd numbers by column, summed modulo 2^64 (in any order)."""
    bits = logits.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[logits.element_size()]).long()
    column = torch.arange(bits.shape[1], device=bits.device)
    odd = (column * 0x9E3779B97F4A7C15 % 2**63 ^ (column << 17)) | 1
    found: list[int] = ((bits + 0x632BE5AB) * odd).sum(1).tolist()
    return found


class Recorder:
    """Collects digests by (request, position) from an engine's taps. A position that is computed again must give the same bits too, and so must the
    logits that tokens were drawn from, which come from a product of other positions than the step's.
    """

    def __init__(self, engine: Engine, names: Mapping[int, int]) -> None:
        """names: request id of the engine -> request as the gate numbers them; ids that are not in it are company, and not looked at."""
        self.engine, self.names = engine, names
        self.found: dict[Key, set[int]] = {}
        self.decode_batches: set[int] = set()  # rows of the steps in which every row had one token and one was a named request's
        self.chunked = False  # a named request's row ended within its prompt
        self.mixed = False  # decode rows and others were in one step, a named request's among them
        executor: Any = engine.executor
        executor.tap, executor.tap_sampled = self._take, self._take_sampled
        self.num_sampled = 0  # positions whose logits were seen as tokens were drawn from them

    def close(self) -> None:
        """Lets go of the engine's taps."""
        executor: Any = self.engine.executor
        executor.tap = executor.tap_sampled = None

    def _take_sampled(self, plan: Any, flat: Any, at: Any, logits: torch.Tensor) -> None:
        owner = {s.id: s.request_id for s in self.engine.scheduler.running()}
        rows = np.searchsorted(flat.row_indptr, at, side="right") - 1
        found = digests(logits)
        for token, row, digest in zip(at.tolist(), rows.tolist(), found, strict=True):
            name = self.names.get(owner.get(int(plan.sequence[row]), -1))
            if name is not None:
                self.num_sampled += 1
                self.found.setdefault((name, int(flat.positions[token])), set()).add(digest)

    def _take(self, plan: Any, flat: Any, first: int, logits: torch.Tensor) -> None:
        owner = {s.id: s.request_id for s in self.engine.scheduler.running()}
        indptr = flat.row_indptr.tolist()
        rows = digests(logits)
        named = np.array([owner.get(identity) in self.names for identity in plan.sequence.tolist()])
        if named.any():
            if plan.num_tokens == plan.num_rows:
                self.decode_batches.add(plan.num_rows)
            decode = (plan.length == 1) & (plan.num_samples == 1) & (plan.start > 0)
            self.chunked |= bool((named & (plan.num_samples == 0)).any())
            self.mixed |= bool(decode.any() and not decode.all())
        for row, identity in enumerate(plan.sequence.tolist()):
            name = self.names.get(owner.get(identity, -1))
            if name is None:
                continue
            for at in range(max(indptr[row], first), min(indptr[row + 1], first + len(rows))):
                self.found.setdefault((name, int(flat.positions[at])), set()).add(rows[at - first])


class Law2:
    """The gate over a model. `prompts` are the requests; each generates `num_tokens` greedily.

    make     makes engines over one and the same weights
    limits   of the engine that runs everything at once; schedules vary them
    batches  sizes of the batches to run the requests in (filled up with company)
    chunks   sizes of prefill chunks (those that cut no prompt are left out)
    """

    def __init__(
        self,
        make: Make,
        limits: Limits,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int = 16,
        batches: Sequence[int] = (8, 64, 256),
        chunks: Sequence[int] = (16, 64, 1000),
    ) -> None:
        self.make, self.limits, self.prompts = make, limits, [list(p) for p in prompts]
        self.batches = [size for size in batches if size <= limits.max_batch]
        self.chunks = [size for size in chunks if size <= limits.max_chunk_tokens and size < max(map(len, self.prompts))]
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.alone: dict[Key, int] = {}

    def run(self) -> Iterator[Finding]:
        """One finding a schedule, the first of them the solo runs."""
        yield self._solo()
        yield self._compare("alone, without graphs", self.limits, graphs=False, one_by_one=True)
        for size in self.batches:
            yield self._batch(size)
        for chunk in self.chunks:
            yield self._compare(f"chunks of {chunk}", replace(self.limits, max_chunk_tokens=chunk), needs="chunked")
        yield self._mixed()
        if self.limits.num_snapshots or not self.limits.num_state_slots:  # else nothing is ever found: a hit of a model with states needs a snapshot
            yield self._hits()
        yield self._preempted()

    def _solo(self) -> Finding:
        found = self._record(self.limits, True, one_by_one=True).found
        self.alone = {key: min(values) for key, values in found.items()}
        return Finding("alone", len(found), [key for key, values in found.items() if len(values) > 1])

    def _mixed(self) -> Finding:
        """Each request comes while the one before it still has a token to decode, so `stagger` is less than what it generates."""
        limits = replace(self.limits, max_chunk_tokens=min(64, self.limits.max_chunk_tokens))
        return self._compare("mixed steps", limits, company=4, stagger=max(1, min(3, (self.params.max_tokens or 1) - 1)), needs="mixed")

    def _compare(
        self, schedule: str, limits: Limits, *, graphs: bool = True, one_by_one: bool = False, company: int = 0, stagger: int = 0, needs: str = ""
    ) -> Finding:
        """needs: what must have been seen of a named request, "chunked" or "mixed"."""
        recorder = self._record(limits, graphs, one_by_one=one_by_one, company=company, stagger=stagger)
        return self._judge(schedule, recorder.found, reached={"": True, "chunked": recorder.chunked, "mixed": recorder.mixed}[needs])

    def _judge(self, schedule: str, found: Mapping[Key, set[int]], reached: bool = True, hit: int = 0) -> Finding:
        """A position that the solo run computed and the schedule did not counts as different; behind hits of `hit` tokens, those of longer prompts."""
        wanted = {(name, at) for name, at in self.alone if not hit or (at >= hit and len(self.prompts[name]) > hit)} | set(found)
        different = sorted(key for key in wanted if found.get(key) != {self.alone.get(key)})
        return Finding(schedule, len(found), different, reached)

    def _batch(self, size: int) -> Finding:
        """The requests among as many strangers as make up the batch; reached only if a step of exactly so many decode rows held one of them."""
        with self._engine(self.limits, True, prefix_cache=False) as engine:
            strangers = [self._stranger(i, self.limits.max_context // 2) for i in range(size - len(self.prompts))]
            room = [engine.room(len(prompt)) for prompt in strangers]
            company = [engine.add(p, replace(self.params, max_tokens=most)) for p, most in zip(strangers, room, strict=True)]
            while any(s.num_generated == 0 for s in (*engine.scheduler.running(), *engine.scheduler.waiting())):
                engine.step()
            names: dict[int, int] = {}
            recorder = Recorder(engine, names)
            for name, prompt in enumerate(self.prompts):
                names[engine.add(prompt, self.params)] = name
            ended = 0
            while ended < len(self.prompts):
                ended += sum(event.terminal and event.request_id in names for event in _checked(engine))
            for request in company:
                engine.abort(request)
            drain(engine)
            return self._judge(f"batch of {size}", recorder.found, reached=size in recorder.decode_batches)

    def _record(self, limits: Limits, graphs: bool, *, one_by_one: bool = False, company: int = 0, stagger: int = 0) -> Recorder:
        with self._engine(limits, graphs, prefix_cache=False) as engine:
            names: dict[int, int] = {}
            recorder = Recorder(engine, names)
            if one_by_one:
                for name, prompt in enumerate(self.prompts):
                    names[engine.add(prompt, self.params)] = name
                    drain(engine)
            else:
                for name, prompt in enumerate(self.prompts):
                    names[engine.add(prompt, self.params)] = name
                    for _ in range(stagger):
                        engine.step()
                for i in range(company):
                    engine.add(self._stranger(i), self.params)
                    for _ in range(min(stagger, 1)):
                        engine.step()
                drain(engine)
            if not recorder.num_sampled:
                raise RuntimeError("the executor showed none of the logits that it drew tokens from: they were not compared")
            return recorder

    def _hits(self) -> Finding:
        """Each prompt again behind each number of its pages in the prefix cache."""
        size, hits = self.limits.page_size, 0
        found: dict[Key, set[int]] = {}
        for name, prompt in enumerate(self.prompts):
            for pages in range(1, (len(prompt) - 1) // size + 1):
                with self._engine(self.limits, True, prefix_cache=True) as engine:
                    engine.add(prompt[: pages * size], replace(self.params, max_tokens=1))
                    drain(engine)
                    names = {engine.add(prompt, self.params): name}
                    recorder = Recorder(engine, names)
                    drain(engine)
                    hits += engine.scheduler.num_prefix_hits == pages * size
                    for key, values in recorder.found.items():
                        found.setdefault(key, set()).update(values)
        wanted = sum((len(p) - 1) // size for p in self.prompts)
        return self._judge(f"behind {wanted} prefix hits", found, reached=hits == wanted > 0, hit=size)

    def _preempted(self) -> Finding:
        """All at once with the pages that their prompts take: who needs another one while all of them run takes it from somebody."""
        size, length = self.limits.page_size, self.params.max_tokens or 1
        each = [ceil_div(len(p) + length, size) for p in self.prompts]
        pages = max(*each, sum(ceil_div(len(p) + 1, size) for p in self.prompts))
        with self._engine(replace(self.limits, num_pages=pages), True, prefix_cache=False) as engine:
            names: dict[int, int] = {}
            recorder = Recorder(engine, names)
            for name, prompt in enumerate(self.prompts):
                names[engine.add(prompt, self.params)] = name
            drain(engine)
            return self._judge("after preemption", recorder.found, reached=engine.scheduler.num_preemptions > 0)

    def _engine(self, limits: Limits, graphs: bool, prefix_cache: bool) -> Engine:
        engine = self.make(limits, graphs)
        engine.scheduler.prefix_cache &= prefix_cache
        return engine

    def _stranger(self, i: int, most: int | None = None) -> list[int]:
        """Company: a rotated prompt of another length, at most `most`."""
        prompt = self.prompts[i % len(self.prompts)]
        at = (7 * i + 1) % len(prompt)
        return (prompt[at:] + prompt[:at])[: 1 + (13 * i) % min(len(prompt), most or len(prompt))]


def _checked(engine: Engine) -> list[Event]:
    """One step. RuntimeError for a request that failed: nothing would be compared of it."""
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise RuntimeError(f"request {event.request_id}: {event.error}")
    return events


def drain(engine: Engine) -> None:
    """Steps until nothing is left. RuntimeError for a request that failed."""
    while engine.has_work:
        _checked(engine)


def all_hold(findings: Iterable[Finding]) -> bool:
    """Whether there was a finding and each of them holds."""
    listed = list(findings)
    return bool(listed) and all(finding.holds for finding in listed)
