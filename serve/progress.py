"""Bar: how far something has come, on stderr. It is silent where stderr is not a terminal, and knows nothing of what it counts."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """A bar from its entry to its exit. Call it with (done, total), or with done alone when the total was known from the start."""

    def __init__(self, label: str, total: int | None = None) -> None:
        self._label, self._total = label, total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._label, total=self._total)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total if total is not None else self._total)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
