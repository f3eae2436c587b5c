"""Sampling: from a step's hidden vectors to its tokens and log probabilities, in tiles of max_logit_tokens positions. Launches; the kernels decide."""

from __future__ import annotations

import numpy as np
import torch

from twinfer.fast.buffers import Buffers
from twinfer.fast.inputs import StagedStep
from twinfer.fast.model import Model
from twinfer.kernels.sampling import sampler
from twinfer.kernels.sampling.sampler import Columns, Stages, error_text
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import StepPlan


class Sampling:
    """Over the executor's buffers. `run` queues what a step samples and scores, `report` its way back, `output` reads it once the step is over."""

    def __init__(self, limits: Limits, vocab_size: int, buffers: Buffers, model: Model) -> None:
        self.limits, self.vocab_size, self._buffers, self._model = limits, vocab_size, buffers, model
        self._tensors = buffers.tensors

    def run(self, hidden: torch.Tensor, staged: StagedStep, plan: StepPlan) -> None:
        """Samples, with log probabilities where some row asks, and scores given tokens. hidden [num_tokens, h]."""
        num_top = next((asked.num_top for asked in staged.asked if asked.kind == "sampled"), -1)
        self.draw(hidden, staged.num_drawn, staged.columns, staged.stages, num_top, in_order=staged.num_drawn == staged.shape.num_tokens)
        for asked in staged.asked:
            if asked.kind == "scored":
                self._score(hidden, staged, plan, asked.num_top)

    def draw(self, hidden: torch.Tensor, count: int, columns: Columns, stages: Stages, num_top: int, *, in_order: bool) -> None:
        """Tokens at `count` positions. in_order: position i follows token i, so that hidden vectors need not be gathered."""
        t = self._tensors
        for part in self._tiles(count):
            logits = self._logits(hidden, t["sampled_at"][part], part if in_order else None)
            rows, tokens = t["sampled_row"][part], t["sampled_tokens"][part]
            sampler.sample(
                logits, rows, t["sampled_position"][part], columns, tokens, t["sampled_errors"][part], self._buffers.scratch, stages,
                slots=t["row_slot"], feed=t["token_feed"],
            )  # fmt: skip
            if num_top >= 0:
                self._logprobs("sampled", part, logits, rows, t["row_num_logprobs"], tokens, num_top)

    def _score(self, hidden: torch.Tensor, staged: StagedStep, plan: StepPlan, num_top: int) -> None:
        """Log probabilities of the given next tokens at the first num_scored positions of each row."""
        b, index, counts = self._buffers, staged.set, plan.num_scored
        rows = np.repeat(np.arange(plan.num_rows, dtype=np.int32), counts)
        into = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0 is a row's first token
        host = b.staging[index]
        host["scored_row"][: len(rows)] = rows
        host["scored_at"][: len(rows)] = staged.flat.row_indptr[:-1][rows] + into
        host["scored_targets"][: len(rows)] = plan.targets
        at, row, targets = (b.upload(index, name, len(rows)) for name in ("scored_at", "scored_row", "scored_targets"))
        for part in self._tiles(len(rows)):
            logits = self._logits(hidden, at[part], None)
            self._logprobs("scored", part, logits, row[part], self._tensors["row_scored_logprobs"], targets[part], num_top)

    def _logits(self, hidden: torch.Tensor, at: torch.Tensor, part: slice | None) -> torch.Tensor:
        if part is not None:
            return self._model.logits(hidden[part])
        gathered = self._tensors["logit_inputs"][: len(at)]
        torch.index_select(hidden, 0, at, out=gathered)
        return self._model.logits(gathered)

    def _logprobs(self, kind: str, part: slice, logits: torch.Tensor, rows: torch.Tensor, asked: torch.Tensor, targets: torch.Tensor, num_top: int) -> None:
        t = self._tensors
        ids, values = (_packed(t[f"{kind}_{name}"], num_top)[part] for name in ("top_ids", "top_logprobs"))
        sampler.logprobs(logits, rows, asked, targets, t[f"{kind}_logprob"][part], ids, values, self._buffers.scratch)

    def report(self, staged: StagedStep) -> None:
        """Queues the copies to the host."""
        b, index = self._buffers, staged.set
        if staged.num_sampled:
            b.download(index, "sampled_tokens", staged.num_sampled)
            b.download(index, "sampled_errors", staged.num_sampled)
        for kind, count, num_top in staged.asked:
            b.download(index, f"{kind}_logprob", count)
            for name in ("top_ids", "top_logprobs") if num_top else ():
                source, target = b.tensors[f"{kind}_{name}"], b.pinned[index][f"{kind}_{name}"]
                target.view(-1)[: count * num_top].copy_(source.view(-1)[: count * num_top], non_blocking=True)

    def output(self, plan: StepPlan, staged: StagedStep) -> StepOutput:
        """Reads the staging set of a step that is over."""
        host = self._buffers.staging[staged.set]
        tokens = host["sampled_tokens"][: staged.num_sampled].copy()
        problems: dict[int, str] = {}
        errors = host["sampled_errors"][: staged.num_sampled]
        rows = np.repeat(np.arange(plan.num_rows), plan.num_samples)
        for i in np.flatnonzero(errors[:, 0]).tolist():
            what = error_text(errors[i], self.vocab_size)
            if what is not None:
                problems[int(rows[i])] = what
        columns: dict[str, LogprobColumns] = {}
        for kind, count, num_top in staged.asked:
            logprob = host[f"{kind}_logprob"][:count].copy()
            ids, values = (host[f"{kind}_{name}"].reshape(-1)[: count * num_top].reshape(count, num_top).copy() for name in ("top_ids", "top_logprobs"))
            columns[kind] = LogprobColumns(logprob, ids, values)
        if "scored" in columns:
            owner = np.repeat(np.arange(plan.num_rows), plan.num_scored)
            into = np.arange(len(owner)) - np.repeat(np.cumsum(plan.num_scored) - plan.num_scored, plan.num_scored)
            for i in np.flatnonzero(np.isnan(columns["scored"].logprob))[::-1].tolist():  # a row's first one is told
                row = int(owner[i])
                problems[row] = f"the logits at prompt position {int(plan.start[row] + into[i])} are not numbers"
        return StepOutput(plan.step, tokens, columns.get("sampled"), columns.get("scored"), problems)

    def _tiles(self, count: int) -> list[slice]:
        return [slice(first, end) for first, end in self.limits.logit_tiles(count)]


def _packed(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """A buffer [n, max] seen as [n, width], rows side by side."""
    return buffer.view(-1)[: len(buffer) * width].view(len(buffer), width)
