"""Joining a request's events into its result, and telling how far many requests are. No stepping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinfer.request import Completion, Event, GenerateResult, Request


def joined(request_id: int, request: Request, events: list[Event]) -> GenerateResult:
    """Joins the events of one request into its completions."""
    completions = []
    for sample in range(request.sampling.n):
        own = [e for e in events if e.sample == sample]
        last = own[-1]
        assert last.finish_reason is not None, "every sample ends"
        logprobs = tuple(entry for e in own for entry in e.logprobs or ()) if request.sampling.logprobs is not None else None
        tokens = tuple(token for e in own for token in e.tokens)
        completions.append(Completion(tokens, "".join(e.text for e in own), last.finish_reason, logprobs, last.error))
    prompt_logprobs = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    first = next(e for e in events if e.sample == 0)
    return GenerateResult(request_id, request.prompt, tuple(completions), prompt_logprobs, first.num_cached_tokens)


class ProgressBar:
    """A bar on stderr, a callback, or nothing."""

    def __init__(self, wanted: bool | Callable[[int, int], None], total: int) -> None:
        self._wanted, self._total = wanted, total
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None]:
        if callable(self._wanted):
            return self._wanted
        if not self._wanted:
            return lambda done, total: None
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("requests", total=self._total)
        return lambda done, total: self._bar.update(task, completed=done)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
