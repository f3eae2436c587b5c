"""The gate of law 2 over a ghost whose logits are made from histories: a quick engine that obeys the law, and one that does not. Not a test."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from tests.engine.ghosts import GhostEngine
from twinfer.invariants.gates.law2 import Finding, Law2, all_hold, digests
from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import StepPlan

WIDTH = 5  # logits a token
LIMITS = Limits(
    max_batch=4, max_step_tokens=12, max_chunk_tokens=12, warmup_tokens=1, max_context=24, max_step_context=96, max_logit_tokens=16, page_size=6,
    num_pages=24, buckets=(1, 2, 4),
)  # fmt: skip
# With the first token after it each prompt fills its pages, and both together the pool: the next page is somebody else's.
PROMPTS = ((0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0), (1, 1, 0, 1, 0))


def engine(limits: Limits, wrong: str = "") -> GhostEngine:
    """A ghost engine with taps. wrong: "batch", the first logit of a token depends on the rows of its step; "drawn", it is another one where a token is drawn
    from it. Both by less than any tolerance would see."""
    made = GhostEngine(limits)
    executor: Any = made.executor
    executor.tap = executor.tap_sampled = None
    collect, plans = executor.collect, deque[StepPlan]()
    launch = executor.launch

    def launched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    def collected() -> StepOutput:
        flat = executor._launched[0][1]
        output: StepOutput = collect()
        plan = plans.popleft()
        if executor.tap is not None:
            hashes = executor.slot_hash[flat.write_slots]
            bits = (hashes[:, None] >> np.arange(0, 8 * WIDTH, 8, dtype=np.uint64)).astype(np.uint8)
            logits = torch.from_numpy(bits.astype(np.float32) - 127.5)
            if wrong == "batch":
                logits[:, 0] += 2.0**-16 * plan.num_rows
            executor.tap(plan, flat, 0, logits)
            at = (flat.row_indptr[1:] - 1)[plan.num_samples > 0]
            drawn = logits[torch.from_numpy(at).long()]
            if wrong == "drawn":
                drawn[:, 0] += 2.0**-16
            executor.tap_sampled(plan, flat, at, drawn)
        return output

    executor.launch, executor.collect = launched, collected
    return made


def run(wrong: str = "") -> list[Finding]:
    return list(Law2(lambda limits, graphs: engine(limits, wrong), LIMITS, PROMPTS, num_tokens=3, batches=(4,), chunks=(4,)).run())


def gate() -> None:
    right, wrong = run(), run("batch")
    assert [finding for finding in right if not finding.holds] == []
    assert all_hold(right)
    assert len(right) == 7
    assert not all_hold(wrong), "an engine whose bits depend on the batch holds"
    assert {finding.schedule for finding in wrong if finding.different} >= {"batch of 4", "mixed steps"}

    assert all(finding.different for finding in run("drawn")), "logits that tokens are drawn from are not compared"

    assert not all_hold([]), "no finding holds"
    assert not Finding("empty").holds, "a schedule that computed nothing holds"
    assert not Finding("missed", 5, reached=False).holds, "a schedule that did not reach what it is for holds"
    law = Law2(lambda limits, graphs: engine(limits), LIMITS, PROMPTS, num_tokens=1, chunks=(17,))
    assert not law._mixed().reached, "a schedule in which nobody decodes counts as one of mixed steps"
    whole = Law2(lambda limits, graphs: engine(limits), LIMITS, PROMPTS[1:], num_tokens=1)
    assert not whole._compare("whole", LIMITS, one_by_one=True, needs="chunked").reached, "prompts computed whole count as cut into chunks"
    assert law.chunks == [], "a chunk that cuts no prompt is a schedule that cannot differ"
    law = Law2(lambda limits, graphs: engine(limits), LIMITS, PROMPTS)
    law.alone = {(0, 0): 7, (0, 1): 8}
    assert law._judge("whole", {(0, 0): {7}, (0, 1): {8}}).holds
    assert law._judge("half", {(0, 0): {7}}).different == [(0, 1)], "a position that was not computed is not missed"
    assert law._judge("beyond", {(0, 0): {7}, (0, 1): {8}, (0, 2): {9}}).different == [(0, 2)]
    logits = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, -0.0]])
    assert len(set(digests(logits))) == 3, "different bits have one digest"
