"""EventStream: the events of one request as an iterator that ends the request when it is closed or dropped. It steps through its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twinfer.request import Event


class EventStream(Iterator[Event]):
    """Iterates up to the terminal event. `close`, or leaving a `with` block, aborts the request if it has not ended; when the last
    reference is dropped, the engine's next step does.

    take  gives the request's next event; end  aborts the request and forgets its inbox
    drop  notes that it is to be ended: the last reference may go in the middle of a step, or on another thread
    """

    def __init__(self, request_id: int, take: Callable[[int], Event], end: Callable[[int], None], drop: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._take, self._end, self._drop = take, end, drop
        self._open = True

    def __next__(self) -> Event:
        if not self._open:
            raise StopIteration
        try:
            event = self._take(self.request_id)
        except BaseException:
            self.close()
            raise
        if event.terminal:
            self.close()
        return event

    def close(self) -> None:
        """Ends the request. Calling it again does nothing."""
        if self._open:
            self._open = False
            self._end(self.request_id)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self._open = False
            self._drop(self.request_id)
