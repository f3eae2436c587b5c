"""A clock that tests move and peers that answer by script. Not a test."""

from __future__ import annotations

from collections.abc import Callable

from twinfer.bench.load import News


class FakeClock:
    """Moves by `wait_until`, and by whoever adds to `time`."""

    def __init__(self) -> None:
        self.time = 100.0  # not 0, so that a forgotten start shows

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


class SteadyPeer:
    """Each poll takes `step_s` and brings one token to every live request; keeps the most that were live at once."""

    def __init__(self, clock: FakeClock, step_s: float = 1.0) -> None:
        self.clock, self.step_s = clock, step_s
        self.left: dict[int, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.most_live = 0

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.left[key] = max_tokens
        self.prompts.append(prompt)
        self.most_live = max(self.most_live, len(self.left))

    def poll(self) -> list[News]:
        self.clock.time += self.step_s
        news = []
        for key in list(self.left):
            self.left[key] -= 1
            news.append(News(key, 1, finished=self.left[key] == 0))
            if not self.left[key]:
                del self.left[key]
        return news


class ScriptedPeer:
    """Answers each poll by `script(poll number, live keys)`; a poll takes one second."""

    def __init__(self, clock: FakeClock, script: Callable[[int, list[int]], list[News]]) -> None:
        self.clock, self.script, self.live, self.polls = clock, script, [], 0
        self.live: list[int]

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.live.append(key)

    def poll(self) -> list[News]:
        self.clock.time += 1.0
        self.polls += 1
        news = self.script(self.polls, list(self.live))
        self.live = [k for k in self.live if not any(n.key == k and (n.finished or n.error) for n in news)]
        return news
