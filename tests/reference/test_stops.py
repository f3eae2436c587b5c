"""What ends an output, at the engine, with the bundled model and its tokenizer: stop strings, min_tokens, include_stop, stop tokens, end tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest

from twinfer.reference import Engine
from twinfer.request import Event, FinishReason, GenerateResult
from twinfer.sampling import SamplingParams

from .recorder import open_engine

PROMPT = "ROMEO:\nBut soft, what light"
LENGTH = 32


@lru_cache
def engine() -> Engine:
    return open_engine("qwen3", "float64", max_batch=8, max_context=256, max_step_tokens=64, num_pages=64)


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, **params})  # type: ignore[arg-type]


def generate(**params: object) -> GenerateResult:
    """Greedy, from PROMPT, alone."""
    (result,) = engine().generate(PROMPT, greedy(**params))
    return result


def check_stream(events: Iterator[Event], result: GenerateResult) -> None:
    """Joined, a stream's events are the result; only the last is terminal, and no text is ever taken back."""
    shown, tokens, terminals = "", [], []
    for event in events:
        shown += event.text
        tokens += event.tokens
        terminals.append(event.terminal)
        assert result.text.startswith(shown)
    assert (shown, tuple(tokens)) == (result.text, result.tokens)
    assert terminals == [False] * (len(terminals) - 1) + [True]


@lru_cache
def plain() -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Tokens of the output that nothing ends, and its text after each of them."""
    tokens = generate(ignore_eos=True).tokens
    decode = engine().tokenizer.decode  # type: ignore[union-attr]
    texts = tuple(decode(tokens[: i + 1]) for i in range(len(tokens)))
    assert len(tokens) == LENGTH
    assert "�" not in texts[-1]
    assert not engine().end_tokens & set(tokens), "the prompt has to be one whose answer does not end by itself"
    return tokens, texts


def expected(stop: str, min_tokens: int, include_stop: bool) -> tuple[int, str, FinishReason]:
    """Tokens, text and reason, read off the whole text: the first occurrence that is completed by a token after the first `min_tokens`."""
    tokens, texts = plain()
    whole = texts[-1]
    for start in range(len(whole)):
        if whole.startswith(stop, start):
            count = 1 + next(i for i, text in enumerate(texts) if len(text) >= start + len(stop))
            if count > min_tokens:
                return count, whole[: start + len(stop) if include_stop else start], FinishReason.STOP
    return len(tokens), whole, FinishReason.LENGTH


def stops() -> list[str]:
    """Stop strings of the plain text: within a token, across tokens, one that comes more than once, and one that never comes."""
    _, texts = plain()
    pieces = [after[len(before) :] for before, after in zip(("", *texts), texts, strict=False)]
    inside = next(piece for piece in pieces if len(piece) > 3)[1:3]
    across = pieces[6][-1:] + pieces[7] + pieces[8][:1]
    return [inside, across, " ", "\n", "the", texts[-1][-4:], "never in it"]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 1, 7, 15, LENGTH])
def test_a_stop_string_ends_the_output_after_min_tokens(min_tokens: int, include_stop: bool) -> None:
    reasons, delayed = set(), 0
    many = [greedy(stop=(stop,), include_stop=include_stop, min_tokens=min_tokens) for stop in stops()]
    for stop, result in zip(stops(), engine().generate([PROMPT] * len(many), many), strict=True):
        count, text, reason = expected(stop, min_tokens, include_stop)
        assert (result.tokens, result.text) == (plain()[0][:count], text), f"stop {stop!r}"
        assert result.completions[0].finish_reason is reason, f"stop {stop!r}"
        reasons.add(reason)
        delayed += count != expected(stop, 0, include_stop)[0]
    assert reasons == ({FinishReason.LENGTH} if min_tokens == LENGTH else {FinishReason.STOP, FinishReason.LENGTH})
    assert (delayed > 0) is (min_tokens > 0), "min_tokens changed nothing"


def test_a_stream_shows_the_same_text_and_takes_none_back() -> None:
    for params in (greedy(stop=(stops()[1], "???")), greedy(stop=(" ",), include_stop=True, min_tokens=5), greedy(stop=(plain()[1][-1][-5:] + "?",))):
        (result,) = engine().generate(PROMPT, params)
        check_stream(engine().stream(PROMPT, params), result)


def test_of_two_stop_strings_the_first_to_be_complete_ends_it() -> None:
    first, second = sorted(stops()[:3], key=lambda stop: expected(stop, 0, False)[0])[:2]
    result = generate(stop=(second, first))
    assert result.text == min((expected(stop, 0, False) for stop in (first, second)), key=lambda e: (e[0], len(e[1])))[1]


def test_a_stop_string_that_spans_the_end_of_min_tokens_counts() -> None:
    """It begins in text that may not end the output and is completed by the first token that may."""
    _, texts = plain()
    stop = texts[9][-2:] + texts[10][len(texts[9]) :]
    assert texts[10].endswith(stop)
    assert texts[-1].index(stop) + len(stop) == len(texts[10]), "the string has to be new there"
    for include_stop in (False, True):
        result = generate(stop=(stop,), min_tokens=10, include_stop=include_stop)
        assert len(result.tokens) == 11
        assert result.text == texts[10][: len(texts[10]) - (0 if include_stop else len(stop))]


def test_text_held_back_for_a_stop_string_comes_out_when_the_output_ends_otherwise() -> None:
    _, texts = plain()
    result = generate(stop=(texts[-1][-5:] + "???",))
    assert (result.text, result.completions[0].finish_reason) == (texts[-1], FinishReason.LENGTH)


@pytest.mark.parametrize("at", [0, 5, 25])
def test_a_stop_token_ends_the_output_and_adds_no_text(at: int) -> None:
    tokens, texts = plain()
    first = tokens.index(tokens[at])
    result = generate(stop_token_ids=(tokens[at], 3))
    assert 3 not in tokens[: first + 1]
    assert result.tokens == tokens[: first + 1]
    assert result.text == ("", *texts)[first]
    assert result.completions[0].finish_reason is FinishReason.STOP


def test_min_tokens_bans_stop_tokens_and_end_tokens_until_then() -> None:
    """A bias of 100 would draw the end token at once; the ban holds for exactly min_tokens tokens."""
    for end in sorted(engine().end_tokens):
        for min_tokens in (0, 1, 4):
            result = generate(logit_bias={end: 100.0}, min_tokens=min_tokens)
            assert len(result.tokens) == min_tokens + 1
            assert result.tokens == (*plain()[0][:min_tokens], end)
            assert result.completions[0].finish_reason is FinishReason.STOP
    other = plain()[0][0]
    result = generate(stop_token_ids=(other,), min_tokens=3)
    assert other not in result.tokens[:3]
    assert result.tokens[0] != other


def test_ignore_eos_goes_on_past_the_models_end_tokens_but_not_past_ones_own() -> None:
    assert len(engine().end_tokens) == 2
    for end in sorted(engine().end_tokens):
        bias = {end: 100.0}
        assert generate(logit_bias=bias).tokens == (end,)
        ignored = generate(logit_bias=bias, ignore_eos=True, max_tokens=5)
        assert ignored.tokens == (end,) * 5
        assert (ignored.text, ignored.completions[0].finish_reason) == ("", FinishReason.LENGTH)  # a special token has no text
        assert generate(logit_bias=bias, ignore_eos=True, stop_token_ids=(end,)).tokens == (end,)
        # min_tokens bans what ends the output: with ignore_eos, only one's own stop tokens.
        assert generate(logit_bias=bias, ignore_eos=True, min_tokens=3, max_tokens=5).tokens == (end,) * 5


def test_a_chat_answer_ends_by_itself_and_goes_on_when_told_so() -> None:
    """The model's own end token, drawn without any bias."""
    tokenizer = engine().tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "When shall we three meet again?"}])
    (ended,) = engine().generate([prompt], greedy(max_tokens=150))
    assert ended.completions[0].finish_reason is FinishReason.STOP
    assert ended.tokens[-1] in engine().end_tokens
    assert not engine().end_tokens & set(ended.tokens[:-1])
    assert ended.text == tokenizer.decode(ended.tokens[:-1])
    (going,) = engine().generate([prompt], greedy(max_tokens=len(ended.tokens) + 3, ignore_eos=True))
    assert going.tokens[: len(ended.tokens)] == ended.tokens
    assert len(going.tokens) == len(ended.tokens) + 3
    assert going.text.startswith(ended.text)


def test_end_tokens_do_not_depend_on_batch_mates() -> None:
    """Requests that end in different ways, in one batch: each ends as it does alone."""
    tokens, _ = plain()
    end = min(engine().end_tokens)
    many = [
        greedy(stop=(" ",), min_tokens=9),
        greedy(stop_token_ids=(tokens[5],), logprobs=1),
        greedy(logit_bias={end: 100.0}, min_tokens=4),
        greedy(max_tokens=7),
        greedy(stop=(stops()[1],), include_stop=True),
    ]
    together = engine().generate([PROMPT] * len(many), many)
    for params, result in zip(many, together, strict=True):
        (alone,) = engine().generate(PROMPT, params)
        assert (result.tokens, result.text) == (alone.tokens, alone.text)
        assert result.completions[0].finish_reason is alone.completions[0].finish_reason
    assert len({len(result.tokens) for result in together}) >= 4
    assert np.isfinite([entry.logprob for entry in together[1].completions[0].logprobs or ()]).all()
