"""Two checks of what a request is told: prompt log probabilities on the ghost, and the tokens that the float32 gate looks at. Not a test."""

from __future__ import annotations

import torch

from tests.engine.ghosts import GhostEngine, drain, limits
from twinfer.request import Request
from twinfer.sampling import SamplingParams

GATE = 1e-3  # nat
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3)).tolist()
PIECES = [30, 10] + [1] * 20  # a prompt in two chunks, then a token a step


def check_prompt_scores() -> None:
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
