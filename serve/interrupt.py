"""Interrupt: Ctrl-C as a flag that a loop reads between steps, so that no step is torn in half. It aborts nothing itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While it is entered, the first SIGINT sets `asked`; a second one raises KeyboardInterrupt, for a step that takes too long.

    Outside the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
