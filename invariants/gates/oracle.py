"""Oracle: what a token's log probability is, after any tokens. The reference engine in float64, one request at a time, no page shared.

It scores what an engine gave, instead of generating for itself: at a near tie an engine may take either token and is then judged on its own path, so
that no position has to be left out and none raises a false alarm. Before it is believed it is held against HF's record of the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinfer.golden.manifest import Goldens, Recorded, load_goldens
from twinfer.sampling import SamplingParams

AGREEMENT = 1e-9  # nat between oracle and HF's record in float64; measured: 1e-10 is kept (tests/reference/test_golden.py)


class OracleError(Exception):
    """The oracle does not give what HF gave: nothing may be judged by it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the generated tokens of one answer: each one's log probability, and that of the likeliest token in its place, in nat."""

    logprobs: tuple[float, ...]
    best: tuple[float, ...]


class Oracle:
    """The oracle of a checkpoint that has goldens. Scores are remembered: gates ask for the same ones again."""

    def __init__(self, model: Path) -> None:
        import twinfer.reference

        self.goldens: Goldens = load_goldens(model)
        self.engine = twinfer.reference.Engine.from_pretrained(
            model, dtype="float64", limits={"max_batch": 1, "page_size": 64, "num_pages": 48, "max_logprobs": 1}, tokenizer=False, prefix_cache=False
        )
        self._known: dict[tuple[int, ...], tuple[tuple[float, float], ...]] = {}
        self._agree()

    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> Scores:
        """Scores of `tokens`, generated after `prompt`."""
        entries = self.score_prompt((*prompt, *tokens))[len(prompt) - 1 :]
        return Scores(tuple(own for own, _ in entries), tuple(best for _, best in entries))

    def score_prompt(self, prompt: Sequence[int]) -> tuple[tuple[float, float], ...]:
        """(the token's log probability, the likeliest token's) for each token of `prompt` from the second on."""
        key = tuple(int(token) for token in prompt)
        if key not in self._known:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
            (result,) = self.engine.generate([list(key)], params)
            if result.prompt_logprobs is None:
                raise OracleError(f"no scores for a prompt of {len(key)} tokens: {result.completions[0].error}")
            self._known[key] = tuple((entry.logprob, entry.top[0][1]) for entry in result.prompt_logprobs)
        return self._known[key]

    def _agree(self) -> None:
        """Raises OracleError unless the shortest document that holds more than one token is scored as HF scored it."""
        document = min(self.goldens.documents.values(), key=lambda case: len(case.token_ids))
        ids = document.token_ids.tolist()
        compared, worst = 0, 0.0
        for position, (own, best) in enumerate(self.score_prompt(ids)):
            wanted = golden_logprobs(document.fp64, position)
            worst = max(worst, abs(best - max(wanted.values())))
            if ids[position + 1] in wanted:
                compared, worst = compared + 1, max(worst, abs(own - wanted[ids[position + 1]]))
        if compared == 0 or worst > AGREEMENT:
            raise OracleError(f"{document.name}: {compared} tokens compared with HF's record, the worst is off by {worst:.2g} nat (limit {AGREEMENT:g})")


def golden_logprobs(recorded: Recorded, position: int) -> dict[int, float]:
    """HF's log probabilities by token after `position`: the likeliest 64 of them, or none where the position was not recorded."""
    (rows,) = (recorded.positions == position).nonzero()
    return {} if len(rows) == 0 else dict(zip(recorded.top_ids[rows[0]].tolist(), recorded.logprobs[rows[0]].tolist(), strict=True))
