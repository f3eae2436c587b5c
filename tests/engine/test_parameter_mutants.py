"""Wrong versions of what carries a sample's parameters, ends and log probabilities: each must turn the engine machine red."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from twinfer.engine import columns, sequence
from twinfer.engine.columns import SlotColumns
from twinfer.engine.engine import Engine
from twinfer.engine.scheduler import Scheduler
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, drain, limits
from .mutate import mutated
from .test_machine import EngineMachine
from .test_mutants import QUICK, Mutant

MUTANTS = (
    Mutant("every sample draws the first one's noise", SlotColumns, "set", '"sample": sequence.sample', '"sample": 0'),
    Mutant("log probabilities are not asked for", SlotColumns, "set", "-1 if params.logprobs is None else params.logprobs", "-1"),
    Mutant("presence and frequency swapped", SlotColumns, "set", '"presence": params.presence_penalty', '"presence": params.frequency_penalty'),
    Mutant("parameters of a sequence that left", SlotColumns, "clear", "self._special.pop(slot, None)", "pass"),
    Mutant("bias without the bans", columns, "_add_bias", "bias.update(dict.fromkeys(sorted(sequence.end_tokens), -math.inf))", "pass"),
    Mutant("bans for one token too long", columns, "_add_bias", "num_generated < sequence", "num_generated <= sequence"),
    Mutant("seen without the prompt", Scheduler, "add", "dict.fromkeys(request.prompt, 0)", "{}"),
    Mutant("occurrences are not counted", sequence.Sequence, "append", "self.seen.get(token, 0) + 1", "1"),
    Mutant("a stop token does not end", Scheduler, "commit", "token in sequence.end_tokens and", "False and"),
    Mutant("min_tokens does not delay", Scheduler, "commit", "and num_generated > sequence.params.min_tokens", ""),
    Mutant("min_tokens delays by one more", Scheduler, "commit", "> sequence.params.min_tokens", "> sequence.params.min_tokens + 1"),
    Mutant("the first sample's end is the request's", Engine, "_end", "terminal = not live.open", "terminal = True"),
    Mutant("an abort forgets the other samples", Engine, "abort", "list(live.open.values())", "list(live.open.values())[:1]"),
    Mutant("log probability of the first row", Engine, "_tell", "int(sampled[row])", "0"),
    Mutant("every sample scores the prompt", Engine, "add", "request if sample == 0 else", "request if sample >= 0 else"),
    Mutant("penalties with a token unread", Scheduler, "_enter", "self._needs_host[slot] = sequence.keeps_seen", "self._needs_host[slot] = False"),
)
# The machine kills these too, but it takes a while to come by them: a scenario of their own is quicker.
SCORE_MUTANTS = (
    Mutant("score of the first row", Engine, "_tell", "int(scored[row])", "0"),
    Mutant("a prompt that is scored again counts again", Engine, "_score", "first + i == len(live.prompt_logprobs)", "True"),
    Mutant("a scored prompt takes hits", Scheduler, "add", "self.prefix_cache and params.prompt_logprobs is None", "self.prefix_cache"),
)


def check_scores() -> None:
    """Two prompts are scored in chunks beside each other; the second, whose beginning is in the cache, is preempted in the midst of it."""
    engine = GhostEngine(limits(max_batch=2, max_chunk_tokens=1, max_step_tokens=2, page_size=4, num_pages=5, max_context=20))
    prompts = ((1, 1, 0, 0), (0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1))
    engine.add(Request(prompts[1][:9], SamplingParams(temperature=0.0, max_tokens=1)))
    drain(engine)
    ids = [engine.add(Request(p, SamplingParams(temperature=0.0, max_tokens=n, prompt_logprobs=0))) for p, n in zip(prompts, (12, 2), strict=True)]
    events = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        (scored,) = (event.prompt_logprobs for event in events if event.request_id == request_id and event.prompt_logprobs is not None)
        assert tuple(entry.token for entry in scored) == prompt[1:]
        assert all(event.num_cached_tokens == 0 for event in events if event.request_id == request_id)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_machine_kills(mutant: Mutant) -> None:
    with mutated(mutant.owner, mutant.method, mutant.old, mutant.new), pytest.raises(Exception) as kill:  # any failure is a kill
        run_state_machine_as_test(EngineMachine, settings=QUICK)
    # A mutant that is merely broken Python would die of these, and show nothing.
    assert not isinstance(kill.value, NameError | SyntaxError | TypeError | AttributeError), kill.value


def test_scores_of_prompts_beside_each_other() -> None:
    check_scores()


@pytest.mark.parametrize("mutant", SCORE_MUTANTS, ids=lambda m: m.name)
def test_scores_kill(mutant: Mutant) -> None:
    with mutated(mutant.owner, mutant.method, mutant.old, mutant.new), pytest.raises((AssertionError, IndexError)):
        check_scores()
