"""The contract between gates and adapter, with adapters that break it; the judge and the oracle, which must not believe everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinfer.golden import MICRO
from twinfer.invariants.gates import oracle as oracle_module
from twinfer.invariants.gates import subject as subject_module
from twinfer.invariants.gates.adapter import CAPABILITIES, NEEDS, AdapterError, Answer, Ask, Event, Refused, Setup, check_adapter
from twinfer.invariants.gates.judge import GateFailed, Judge, Tally, tolerances
from twinfer.invariants.gates.oracle import Oracle, OracleError
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import EngineNotMade, Subject

ASK = Ask((1, 2, 3), 2)
RIGHT = Answer((4, 5), (-1.0, -2.0), None, 0)


class Fake:
    """Says what it is told to say."""

    dtype, page_size = "float32", 16

    def __init__(self, answers: Sequence[Answer] | BaseException = (RIGHT,), events: Sequence[Sequence[Event]] = ()) -> None:
        self.capabilities: Any = {"logprobs", "prompt_logprobs", "cached_tokens", "step", "abort", "refusal"}
        self.answers, self.events = answers, list(events)
        self.num_added, self.closed = 0, False

    def generate(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        if isinstance(self.answers, BaseException):
            raise self.answers
        return self.answers

    def add(self, ask: Ask) -> int:
        self.num_added += 1
        return self.num_added

    def step(self) -> Sequence[Event]:
        return self.events.pop(0) if self.events else ()

    def abort(self, request: Any) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def subject(fake: Any) -> Subject:
    return Subject(lambda setup: fake, Setup(Path("nowhere")))


WRONG = {
    "gave 0 answers to 1 requests": (),
    "ended with an error: out of memory": (Answer(error="out of memory"),),
    "2 tokens were asked for after a prompt of 3, 1 came": (replace(RIGHT, tokens=(4,)),),
    "2 tokens were asked for after a prompt of 3, 3 came": (replace(RIGHT, tokens=(4, 5, 6)),),
    "logprobs: none came": (replace(RIGHT, logprobs=None),),
    "logprobs: 1 came": (replace(RIGHT, logprobs=(-1.0,)),),
    "num_cached_tokens = None": (replace(RIGHT, num_cached_tokens=None),),
    "num_cached_tokens = 3 of a prompt of 3: must be from 0 to 2": (replace(RIGHT, num_cached_tokens=3),),
}


@pytest.mark.parametrize("told", WRONG)
def test_an_answer_that_breaks_the_contract(told: str) -> None:
    with pytest.raises(GateFailed, match=told):
        subject(Fake(WRONG[told])).generate([ASK])


def test_an_answer_that_keeps_it() -> None:
    assert subject(Fake()).generate([ASK]) == [RIGHT]
    with pytest.raises(GateFailed, match="prompt_logprobs: none came after a prompt of 3 tokens, 2 were due"):
        subject(Fake()).generate([replace(ASK, prompt_logprobs=True)])


def test_log_probabilities_that_were_not_declared_are_not_looked_at() -> None:
    fake = Fake()
    fake.capabilities = {"cached_tokens"}
    assert subject(fake).generate([ASK])[0].logprobs is None


def test_an_engine_that_raises_is_a_failure_and_is_thrown_away() -> None:
    fake = Fake(IndexError("page 77"))
    under_test = subject(fake)
    with pytest.raises(GateFailed, match="generate raised IndexError: page 77"):
        under_test.generate([ASK])
    assert fake.closed
    assert under_test.adapter is None


def test_a_refusal_is_told_apart_from_a_crash() -> None:
    assert subject(Fake(Refused("too long"))).refused(ASK) == "too long"
    assert subject(Fake((Answer(error="too long"),))).refused(ASK) == "too long"
    assert subject(Fake()).refused(ASK) is None
    with pytest.raises(GateFailed):
        subject(Fake(IndexError())).refused(ASK)


def test_what_steps_brought_is_put_together() -> None:
    under_test = subject(Fake(events=[[], [Event(1, (4,), (-1.0,), 0)], [Event(1, (5,), (-2.0,), finished=True)]]))
    flight = under_test.add(ASK)
    under_test.drain()
    assert under_test.answer(flight) == replace(RIGHT, tokens=[4, 5], logprobs=[-1.0, -2.0])
    assert flight.steps == [2, 3]


def test_steps_that_break_the_contract() -> None:
    end = Event(1, (4, 5), (-1.0, -2.0), 0, finished=True)
    with pytest.raises(GateFailed, match="which nobody added"):
        stepped(subject(Fake(events=[[Event(7, (1,))]])))
    with pytest.raises(GateFailed, match="had ended, but got"):
        stepped(subject(Fake(events=[[end, Event(1, (6,))]])))
    under_test = subject(Fake(events=[[Event(1, finished=True, error="device lost")]]))
    with pytest.raises(GateFailed, match="device lost"):
        under_test.answer(stepped(under_test))
    under_test = subject(Fake(events=[[end]]))
    stepped(under_test)
    with pytest.raises(GateFailed, match="every request ended before"):
        under_test.run_until(lambda: False)


def test_an_aborted_request_gets_no_more_tokens() -> None:
    under_test = subject(Fake(events=[[Event(1, (4,))]]))
    under_test.abort(under_test.add(ASK))
    with pytest.raises(GateFailed, match="had ended, but got"):
        under_test.step()


def stepped(under_test: Subject) -> Any:
    flight = under_test.add(ASK)
    under_test.step()
    return flight


def test_an_engine_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_module, "MAX_IDLE_STEPS", 20)
    under_test = subject(Fake())
    under_test.add(ASK)
    with pytest.raises(GateFailed, match="20 steps in a row brought nothing, 1 requests wait"):
        under_test.drain()


def test_an_engine_is_kept_for_the_same_setup_and_closed_for_another() -> None:
    made: list[Setup] = []
    fakes = [Fake() for _ in range(3)]

    def make(setup: Setup) -> Fake:
        made.append(setup)
        return fakes[len(made) - 1]

    under_test = Subject(make, Setup(Path("nowhere")))
    under_test.begin()
    under_test.generate([ASK])
    under_test.begin()
    under_test.use(num_pages=5)
    under_test.generate([ASK])
    under_test.begin()
    under_test.generate([ASK])
    assert [setup.num_pages for setup in made] == [None, 5, None]
    assert [fake.closed for fake in fakes] == [True, True, False]


def test_a_factory_that_raises() -> None:
    def make(setup: Setup) -> Any:
        raise OSError("no device")

    with pytest.raises(EngineNotMade, match="OSError: no device"):
        Subject(make, Setup(Path("nowhere"))).use()


@pytest.mark.parametrize("attribute", ["dtype", "capabilities", "generate"])
def test_an_adapter_that_lacks_what_everyone_has(attribute: str) -> None:
    whole = {"dtype": "float32", "capabilities": (), "generate": print}
    check_adapter(SimpleNamespace(**whole))
    del whole[attribute]
    with pytest.raises(AdapterError, match=f"no attribute '{attribute}'"):
        check_adapter(SimpleNamespace(**whole))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "int4"}, "dtype = 'int4'"),
        ({"capabilities": "step"}, "must be a set of names"),
        ({"capabilities": {"setp"}}, "holds 'setp'"),
        ({"capabilities": {"abort"}, "abort": print}, "'abort' without 'step'"),
        ({"capabilities": {"cached_tokens"}, "page_size": 0}, "page_size = 0"),
        *(({"capabilities": {name}}, f"declares '{name}' but has no attribute") for name in NEEDS),
    ],
)
def test_an_adapter_that_promises_what_it_does_not_have(change: dict[str, Any], told: str) -> None:
    with pytest.raises(AdapterError, match=told):
        check_adapter(SimpleNamespace(**{"dtype": "float32", "capabilities": (), "generate": print, **change}))
    assert set(NEEDS) <= set(CAPABILITIES)


def test_pages_of_one_token_are_counted_by_eight() -> None:
    fake = Fake()
    fake.page_size = 1
    under_test = subject(fake)
    under_test.use()
    assert (under_test.block, under_test.num_pages(3)) == (8, 24)
    fake.page_size = 16
    assert (under_test.block, under_test.num_pages(3)) == (16, 3)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MICRO)


def test_the_judge_finds_a_wrong_token_a_wrong_number_and_no_number(oracle: Oracle) -> None:
    judge = Judge(oracle, "float32")
    ask = Ask((5, 6, 7, 8), 1)
    best = max(range(judge.vocab_size), key=lambda token: oracle.score(ask.prompt, (token,)).logprobs[0])
    right = oracle.score(ask.prompt, (best,)).logprobs[0]
    assert judge.judge([ask], [Answer((best,), (right,))]).num_positions == 1
    for wrong in (Answer(((best + 1) % 256,)), Answer((best,), (right + 2e-3,)), Answer((best,), (math.nan,)), Answer((256,)), Answer((-1,))):
        with pytest.raises(GateFailed):
            judge.judge([ask], [wrong])


def test_a_nan_is_never_lost_among_numbers(oracle: Oracle) -> None:
    for order in ((0.0, math.nan), (math.nan, 0.0)):
        tally = Tally()
        for value in order:
            tally.add("here", 0.0, value)
        with pytest.raises(GateFailed, match="nan"):
            tally.judged().check(Judge(oracle, "float32").few)


def test_comparing_nothing_is_a_failure() -> None:
    with pytest.raises(GateFailed, match="no position"):
        Tally().judged()


def test_tolerances_follow_the_recorded_floor() -> None:
    floor = {"max": 0.2, "mean": 0.01, "p99": 0.1}
    many, few = tolerances("bfloat16", floor)
    assert (many.max, many.mean, many.p99, few.max, few.mean) == pytest.approx((0.4, 0.015, 0.15, 0.4, None))
    assert tolerances("float16", floor)[0].max == pytest.approx(0.1)
    assert tolerances("float32", floor)[0].max == 1e-3


def test_an_oracle_that_is_not_what_hf_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_module, "AGREEMENT", 0.0)
    with pytest.raises(OracleError, match="tokens compared with HF's record"):
        Oracle(MICRO)


def test_prompts_depend_on_the_gate_alone() -> None:
    document = list(range(100))
    one, same, other = Prompts("a", document, 256), Prompts("a", document, 256), Prompts("b", document, 256)
    first = one.fresh(20)
    assert first == same.fresh(20)
    assert first[:3] != other.fresh(20)[:3]
    assert first[:3] != one.fresh(20)[:3]
    assert len(one.fresh(2)) == 2
    assert all(one.other(token) != token for token in range(256))


@pytest.mark.parametrize("grid", [0, 24, "64"])
def test_a_grid_of_hits_is_whole_pages(grid: object) -> None:
    fake = Fake()
    fake.hit_grid = grid  # type: ignore[attr-defined]
    with pytest.raises(AdapterError, match=f"hit_grid = {grid!r}: must be a number of tokens that is a multiple of page_size"):
        check_adapter(fake)


def test_gates_count_in_the_grid_of_hits() -> None:
    fake = Fake()
    fake.hit_grid = 64  # type: ignore[attr-defined]
    made = subject(fake)
    made.use()
    assert (made.block, made.num_pages(3)) == (64, 12)
