"""Subject: the engine under test. Makes it as a gate wants it, calls it, and holds each answer to the adapter's contract. No gate, no tolerance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from twinfer.invariants.gates.adapter import Answer, Ask, Event, Factory, Pages, Refused, Setup, check_adapter
from twinfer.invariants.gates.judge import GateFailed

MAX_IDLE_STEPS = 10_000  # steps in a row that bring nothing: a prompt of 2304 tokens in chunks of one brings nothing 2303 times

MIN_BLOCK = 8  # with pages of one token, as some caches have, the first token of any prompt would be a hit

T = TypeVar("T")


class NotReached(Exception):
    """What a gate is about did not come about, and the engine promised nothing else: the gate is skipped and counted."""


class EngineNotMade(Exception):
    """The factory raised. Never an expected failure: nothing of the engine was seen."""


@dataclass(slots=True)
class Flight:
    """A request that was added: what came of it so far. `steps` holds the number of each step that brought tokens."""

    ask: Ask
    key: Hashable
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    added_after: int = 0
    num_cached_tokens: int | None = None
    finished: bool = False
    error: str | None = None


class Subject:
    """One engine at a time; it is kept while gates ask for the same setup, and thrown away after a failure."""

    def __init__(self, factory: Factory, setup: Setup) -> None:
        self.factory, self.base = factory, setup
        self.setup: Setup | None = None
        self.adapter: Any = None
        self.num_steps = 0
        self.flights: dict[Hashable, Flight] = {}
        self._chosen = False  # whether the gate that runs has the engine that it wants

    # ---- making it ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Another gate begins: unless it says `use`, it gets an engine of the plain setup."""
        self._chosen, self.flights = False, {}

    def use(self, **changes: Any) -> None:
        """Has the engine made with these fields of Setup changed, unless it is there already."""
        wanted = replace(self.base, **changes)
        self._chosen = True
        if self.adapter is not None and wanted == self.setup:
            return
        self.discard()
        try:
            self.adapter = self.factory(wanted)
        except Exception as error:
            raise EngineNotMade(f"{type(error).__name__}: {error}; setup: {wanted}") from error
        self.setup = wanted
        check_adapter(self.adapter)

    def discard(self) -> None:
        """Closes the engine; the next gate gets a new one."""
        adapter, self.adapter, self.setup = self.adapter, None, None
        self.flights, self.num_steps = {}, 0
        if hasattr(adapter, "close"):
            adapter.close()

    @property
    def capabilities(self) -> frozenset[str]:
        if self.adapter is None:
            self.use()
        return frozenset(self.adapter.capabilities)

    @property
    def block(self) -> int:
        """Tokens in which gates count: what the length of a hit is a multiple of, or the fewest of these with at least MIN_BLOCK tokens.

        That is a page, unless the engine says otherwise (`hit_grid`), and 16 where it tells of no pages.
        """
        size = int(getattr(self.adapter, "hit_grid", getattr(self.adapter, "page_size", 16)))
        return size * -(-MIN_BLOCK // size)

    def num_pages(self, num_blocks: int) -> int:
        """Pages that hold so many blocks."""
        return num_blocks * self.block // int(getattr(self.adapter, "page_size", 16))

    # ---- whole requests ----------------------------------------------------------------------------------------------------------

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answers, each as the contract wants it. Raises Refused as it comes, GateFailed for anything else."""
        answers = list(self._call("generate", lambda: self.adapter.generate(list(asks))))
        if len(answers) != len(asks):
            raise GateFailed(f"generate gave {len(answers)} answers to {len(asks)} requests")
        for ask, answer in zip(asks, answers, strict=True):
            if answer.error is not None:
                raise GateFailed(f"a prompt of {len(ask.prompt)} tokens ended with an error: {answer.error}")
            self._check(ask, answer)
        return answers if "logprobs" in self.capabilities else [replace(answer, logprobs=None) for answer in answers]

    def refused(self, ask: Ask) -> str | None:
        """How the engine refuses a request, None if it answers it."""
        try:
            (answer,) = self._call("generate", lambda: self.adapter.generate([ask]))
        except Refused as error:
            return str(error) or "refused"
        return None if answer.error is None else str(answer.error)

    # ---- steps -------------------------------------------------------------------------------------------------------------------

    def add(self, ask: Ask) -> Flight:
        """Queues a request."""
        key = self._call("add", lambda: self.adapter.add(ask))
        if key in self.flights and not self.flights[key].finished:
            raise GateFailed(f"add gave {key!r}, which another unfinished request has")
        flight = self.flights[key] = Flight(ask, key, added_after=self.num_steps)
        return flight

    def step(self) -> None:
        """One step; what it brought is noted in the flights."""
        events = list(self._call("step", lambda: self.adapter.step()))
        self.num_steps += 1
        for event in events:
            self._note(event)

    def abort(self, flight: Flight) -> None:
        """Takes a request back; it is over as far as the gate is concerned."""
        self._call("abort", lambda: self.adapter.abort(flight.key))
        flight.finished = True

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Steps until `reached()`. GateFailed when every request has ended before, or nothing comes of MAX_IDLE_STEPS steps."""
        idle = 0
        while not reached():
            if all(flight.finished for flight in self.flights.values()):
                raise GateFailed("every request ended before what the gate waits for")
            before = sum(len(flight.tokens) + flight.finished for flight in self.flights.values())
            self.step()
            idle = idle + 1 if sum(len(flight.tokens) + flight.finished for flight in self.flights.values()) == before else 0
            if idle == MAX_IDLE_STEPS:
                raise GateFailed(f"{idle} steps in a row brought nothing, {sum(not f.finished for f in self.flights.values())} requests wait")

    def drain(self) -> None:
        """Steps until every request has ended; then forgets them."""
        while any(not flight.finished for flight in self.flights.values()):
            self.run_until(lambda: all(flight.finished for flight in self.flights.values()))
        self.flights = {}

    def pages(self) -> Pages:
        pages: Pages = self._call("pages", lambda: self.adapter.pages())
        return pages

    def answer(self, flight: Flight) -> Answer:
        """What came of a request that ended; GateFailed for an error."""
        if flight.error is not None:
            raise GateFailed(f"a prompt of {len(flight.ask.prompt)} tokens ended with an error: {flight.error}")
        answer = Answer(flight.tokens, flight.logprobs if "logprobs" in self.capabilities else None, None, flight.num_cached_tokens)
        self._check(flight.ask, answer)
        return answer

    # ---- the contract ------------------------------------------------------------------------------------------------------------

    def _call(self, name: str, call: Callable[[], T]) -> T:
        if not self._chosen:
            self.use()
        try:
            return call()
        except (Refused, GateFailed):
            raise
        except Exception as error:
            self.discard()
            raise GateFailed(f"{name} raised {type(error).__name__}: {error}") from error

    def _note(self, event: Event) -> None:
        flight = self.flights.get(event.request)
        if flight is None:
            raise GateFailed(f"step told of request {event.request!r}, which nobody added or which had ended")
        if flight.finished and (event.tokens or event.error):
            raise GateFailed(f"request {event.request!r} had ended, but got {list(event.tokens)} {event.error or ''}")
        if event.num_cached_tokens is not None and flight.num_cached_tokens is None:
            flight.num_cached_tokens = event.num_cached_tokens
        flight.tokens += event.tokens
        flight.logprobs += event.logprobs or ()
        if event.tokens:
            flight.steps.append(self.num_steps)
        flight.finished = flight.finished or event.finished
        flight.error = event.error

    def _check(self, ask: Ask, answer: Answer) -> None:
        if len(answer.tokens) != ask.max_tokens:
            raise GateFailed(f"{ask.max_tokens} tokens were asked for after a prompt of {len(ask.prompt)}, {len(answer.tokens)} came")
        wanted = (("logprobs", answer.logprobs, ask.max_tokens, True), ("prompt_logprobs", answer.prompt_logprobs, len(ask.prompt) - 1, ask.prompt_logprobs))
        for name, given, length, asked in wanted:
            if name in self.capabilities and asked and (given is None or len(given) != length):
                raise GateFailed(f"{name}: {'none' if given is None else len(given)} came after a prompt of {len(ask.prompt)} tokens, {length} were due")
        if "cached_tokens" in self.capabilities:
            cached = answer.num_cached_tokens
            # The last token has to be computed: its logits are wanted.
            if cached is None or not 0 <= cached < len(ask.prompt):
                raise GateFailed(f"num_cached_tokens = {cached} of a prompt of {len(ask.prompt)}: must be from 0 to {len(ask.prompt) - 1}")
