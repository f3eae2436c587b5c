"""Auditor: checks every plan against all bounds and laws before it is launched, and every output after. It changes nothing and retries nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.expr import compile_check
from twinfer.invariants.facts import PlanFacts, StepView, unsigned_max
from twinfer.invariants.laws import LAWS, Law, columns_fault
from twinfer.invariants.symbols import limit_env
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import SamplingColumns, StepPlan
from twinfer.table import PageTable

LEVELS = ("step", "full")


class Auditor:
    """Two levels: "step" (some dozen reductions over host integers, always on) and "full" (scans page lists and columns).

    TWINFER_AUDIT=1 raises the level to full. `model` None skips what needs the vocabulary. `bounds` and `laws` are for tests of the checks.
    """

    def __init__(
        self,
        limits: Limits,
        model: ModelConfig | None,
        level: str = "step",
        *,
        bounds: tuple[Bound, ...] = BOUNDS,
        laws: tuple[Law, ...] = LAWS,
    ) -> None:
        """Compiles all bounds into one function. ValueError for another level."""
        if level not in LEVELS:
            raise ValueError(f"audit level {level!r}: must be one of {', '.join(LEVELS)}")
        if os.environ.get("TWINFER_AUDIT") == "1":
            level = "full"
        self.level, self.limits, self.bounds = level, limits, bounds
        self.vocab_size = None if model is None else model.vocab_size
        self._limit_env = limit_env(limits)
        self._check = compile_check([bound.relation for bound in bounds], PlanFacts._fields, self._limit_env)
        self._laws = tuple(law for law in laws if law.level == "step" or level == "full")

    def audit(self, plan: StepPlan, table: PageTable) -> None:
        """Checks a plan against `table`, which has the plan's delta applied.

        Raises BoundViolation or LawViolation naming what is broken, the numbers and the rows at fault; the other rows may be planned again.
        """
        fault = columns_fault(plan)
        if fault:
            raise LawViolation("columns", fault)
        view = StepView(plan, table, self.limits, self.vocab_size)
        first = self._check(view.facts)
        if first >= 0:
            raise self._violation(self.bounds[first], view)
        for law in self._laws:
            if not law.holds(view):
                raise LawViolation(law.name, law.why, tuple(law.rows(view).tolist()))

    def check_output(self, plan: StepPlan, output: StepOutput, vocab_size: int | None = None) -> None:
        """Checks what an executor gave back: one token a sampled position, every id in the vocabulary (the model's, unless given)."""
        if output.step != plan.step:
            raise LawViolation("output_step", f"the output is of step {output.step}, the plan is step {plan.step}")
        wanted = int(np.add.reduce(plan.num_samples, dtype=np.int64))
        if len(output.tokens) != wanted:
            raise LawViolation("output_tokens", f"the step gave {len(output.tokens)} tokens, {wanted} positions are sampled")
        _check_logprobs("sampled", output.sampled, wanted, _wanted_top(plan.sampling.num_logprobs, plan.num_samples))
        _check_logprobs("scored", output.scored, len(plan.targets), _wanted_top(plan.scored_logprobs, plan.num_scored))
        beyond = [row for row in output.row_error if not 0 <= row < plan.num_rows]
        if beyond:
            raise LawViolation("output_rows", f"errors are reported for rows {beyond} of a plan of {plan.num_rows}")
        vocab_size = self.vocab_size if vocab_size is None else vocab_size
        if vocab_size is None or unsigned_max(output.tokens) < vocab_size:
            return
        owner = np.repeat(np.arange(plan.num_rows), plan.num_samples)
        rows = set(owner[(output.tokens < 0) | (output.tokens >= vocab_size)].tolist()) - set(output.row_error)
        if rows:
            raise LawViolation("output_range", f"token ids outside the vocabulary of {vocab_size}", tuple(sorted(rows)))

    def facts(self, plan: StepPlan, table: PageTable) -> PlanFacts:
        """The plan's facts, for reports and tests."""
        return StepView(plan, table, self.limits, self.vocab_size).facts

    def _violation(self, bound: Bound, view: StepView) -> BoundViolation:
        demand = bound.demand.evaluate(self._env(view.facts))
        capacity = bound.capacity.evaluate(self._limit_env)
        return BoundViolation(bound.name, str(bound.unit), demand, capacity, bound.remedy, self._culprits(bound, view, capacity))

    def _env(self, facts: PlanFacts) -> dict[str, int]:
        return {**self._limit_env, **facts._asdict()}

    def _culprits(self, bound: Bound, view: StepView, capacity: int) -> tuple[int, ...]:
        """Rows that are over by themselves; where none is, the first row at which the running demand passes the capacity and all after it."""

        def over(first: int, end: int) -> bool:
            part = StepView(rows_of(view.plan, first, end), view.table, self.limits, self.vocab_size)
            return bound.demand.evaluate(self._env(part.facts)) > capacity

        num_rows = view.facts.num_rows
        if not over(0, num_rows):
            return ()  # the delta lists a page for a slot that no row is in: not a row's fault
        alone = tuple(i for i in range(num_rows) if over(i, i + 1))
        if alone:
            return alone
        low, high = 0, num_rows  # demand is monotone in the rows: over(0, low) is false, over(0, high) true
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if over(0, middle) else (middle, high)
        return tuple(range(high - 1, num_rows))


def _wanted_top(num_logprobs: NDArray[np.int32], counts: NDArray[np.int32]) -> int:
    """Alternatives that the rows with entries ask for at most; -1 when none asks for log probabilities."""
    asking = num_logprobs[counts > 0]
    return int(asking.max()) if asking.size else -1


def _check_logprobs(name: str, columns: LogprobColumns | None, num: int, num_top: int) -> None:
    """Log probabilities are there when asked for, one entry a position, with as many alternatives as any row wants."""
    if num_top < 0:
        return
    if columns is None:
        raise LawViolation("output_logprobs", f"{name} log probabilities of {num} positions were asked for, there are none")
    shapes = (columns.logprob.shape, columns.top_ids.shape, columns.top_logprobs.shape)
    if len({shape[0] for shape in shapes} | {num}) > 1 or columns.top_ids.shape[1] < num_top or columns.top_logprobs.shape[1] < num_top:
        raise LawViolation("output_logprobs", f"{name} log probabilities have shapes {shapes}, the plan asks for {num} positions and {num_top} alternatives")


def rows_of(plan: StepPlan, first: int, end: int) -> StepPlan:
    """The plan with only rows first .. end - 1, for finding the rows at fault. Its delta keeps the entries of their slots alone."""
    delta = plan.delta
    own = np.isin(delta.entry_slot, plan.slot[first:end])
    at = np.concatenate([[0], np.cumsum(plan.length, dtype=np.int64)])
    scored = np.concatenate([[0], np.cumsum(plan.num_scored, dtype=np.int64)])
    tokens, targets, rows = slice(at[first], at[end]), slice(scored[first], scored[end]), slice(first, end)
    sampling = plan.sampling
    bias, seen = (slice(int(p[first]), int(p[end])) for p in (sampling.bias_indptr, sampling.seen_indptr))
    cut = {name: getattr(sampling, name)[rows] for name in SamplingColumns.__dataclass_fields__ if "_" not in name or name in ("top_k", "top_p", "min_p")}
    return replace(
        plan,
        delta=replace(delta, entry_slot=delta.entry_slot[own], entry_index=delta.entry_index[own], entry_page=delta.entry_page[own]),
        **{name: getattr(plan, name)[rows] for name in ("slot", "request", "start", "length", "num_samples", "num_scored", "state_slot")},
        scored_logprobs=plan.scored_logprobs[rows],
        tokens=plan.tokens[tokens],
        targets=plan.targets[targets],
        positions=None if plan.positions is None else plan.positions[tokens],
        mask=None if plan.mask is None else plan.mask[rows],
        sampling=SamplingColumns(
            **cut,
            num_logprobs=sampling.num_logprobs[rows],
            bias_indptr=sampling.bias_indptr[first : end + 1] - sampling.bias_indptr[first],
            bias_ids=sampling.bias_ids[bias],
            bias_values=sampling.bias_values[bias],
            seen_indptr=sampling.seen_indptr[first : end + 1] - sampling.seen_indptr[first],
            seen_ids=sampling.seen_ids[seen],
            seen_counts=sampling.seen_counts[seen],
        ),
    )

