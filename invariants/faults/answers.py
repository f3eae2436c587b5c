"""Faults of what a request asks for and gets: its parameters on the way to the executor, its log probabilities on the way back."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_COLUMNS, _SCHEDULER, _ENGINE = "twinfer.engine.columns:", "twinfer.engine.scheduler:Scheduler.", "twinfer.engine.engine:Engine."


def _fault(name: str, what: str, place: str, old: str, new: str, link: str = "", red: str = "machine") -> Fault:
    return Fault(name, what, "scheduler", (red,), edited(place, old, new), _GITHUB + link if link else "")


FAULTS: tuple[Fault, ...] = (
    _fault("every sample draws the first one's noise", "All samples of a request are the same text.",
           _COLUMNS + "SlotColumns.set", '"sample": sequence.sample', '"sample": 0', "vllm-project/vllm/issues/50440"),
    _fault("log probabilities are not asked for", "They never reach the executor.",
           _COLUMNS + "SlotColumns.set", "-1 if params.logprobs is None else params.logprobs", "-1", "pegainfer-project/pegainfer/issues/237"),
    _fault("presence and frequency swapped", "A penalty is applied as the other one.",
           _COLUMNS + "SlotColumns.set", '"presence": params.presence_penalty', '"presence": params.frequency_penalty'),
    _fault("parameters of a sequence that left", "The next sequence in a slot is biased as the one before it.",
           _COLUMNS + "SlotColumns.clear", "self._special.pop(slot, None)", "pass"),
    _fault("bias without the bans", "End tokens may be drawn before min_tokens.",
           _COLUMNS + "_add_bias", "bias.update(dict.fromkeys(sorted(sequence.end_tokens), -math.inf))", "pass"),
    _fault("bans for one token too long", "The first token that may end the output is banned too.",
           _COLUMNS + "_add_bias", "num_generated < sequence", "num_generated <= sequence"),
    _fault("seen without the prompt", "The repetition penalty forgets the prompt.",
           _SCHEDULER + "add", "dict.fromkeys(request.prompt, 0)", "{}", "jundot/omlx/pull/960"),
    _fault("occurrences are not counted", "A token that came often is penalised as if it had come once.",
           "twinfer.engine.sequence:Sequence.append", "self.seen.get(token, 0) + 1", "1"),
    _fault("a stop token does not end", "The output goes on behind its end.", _SCHEDULER + "commit", "token in sequence.end_tokens and", "False and"),
    _fault("min_tokens does not delay", "An end token ends the output before min_tokens.",
           _SCHEDULER + "commit", "and num_generated > sequence.params.min_tokens", ""),
    _fault("min_tokens delays by one more", "The first end token that counts is passed over.",
           _SCHEDULER + "commit", "> sequence.params.min_tokens", "> sequence.params.min_tokens + 1"),
    _fault("the first sample's end is the request's", "The other samples go on behind a terminal event.",
           _ENGINE + "_end", "terminal = not live.open", "terminal = True"),
    _fault("an abort forgets the other samples", "One sample ends, its siblings run on.",
           "twinfer.engine.live:LiveRequests.abort", "list(live.open.values())", "list(live.open.values())[:1]"),
    _fault("log probability of the first row", "Every row is told the first one's.", _ENGINE + "_tell", "int(sampled[row])", "0"),
    _fault("every sample scores the prompt", "The prompt is scored once a sample.",
           _ENGINE + "add", "request if sample == 0 else", "request if sample >= 0 else"),
    _fault("penalties with a token unread", "A row is planned ahead though its penalties depend on a token that only the device has.",
           _SCHEDULER + "_enter", "self._needs_host[slot] = sequence.keeps_seen", "self._needs_host[slot] = False"),
    # The machine sees these too, but it takes a while to come by them: a scenario of their own is quicker.
    _fault("score of the first row", "Prompt log probabilities are those of the step's first row.",
           _ENGINE + "_tell", "int(scored[row])", "0", red="prompt scores"),
    _fault("a prompt that is scored again counts again", "After preemption a prompt has more scores than tokens.",
           _ENGINE + "_score", "first + i == len(live.prompt_logprobs)", "True", red="prompt scores"),
    _fault("a scored prompt takes hits", "Positions that the cache skips have no logits, so their scores are missing.",
           _SCHEDULER + "add", "self.prefix_cache and params.prompt_logprobs is None", "self.prefix_cache", "vllm-project/vllm/issues/3251", "prompt scores"),
)  # fmt: skip
