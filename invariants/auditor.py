"""Auditor: checks every plan against all bounds and laws before it is launched, and every output after. It changes nothing and retries nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from twinfer.config import ModelConfig
from twinfer.errors import BoundViolation, LawViolation
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.expr import compile_check
from twinfer.invariants.facts import CONSTANT_COLUMNS, PageState, PlanFacts, Setting, SlotState, SnapshotColumns, StateSlots, StepView, unsigned_max
from twinfer.invariants.laws import LAWS, Law, columns_fault, varying_fault
from twinfer.invariants.symbols import SPREAD_ROWS, limit_env
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import ROW_DTYPES, SAMPLING_DTYPES, SAMPLING_LIST_DTYPES, SamplingColumns, StepPlan, most_logprobs
from twinfer.table import PageTable

LEVELS = ("step", "full")


class Auditor:
    """Two levels: "step" (some dozen reductions over host integers, always on) and "full" (scans page lists and columns).

    TWINFER_AUDIT=1 raises the level to full. `model` None skips what needs the vocabulary. `pages`: the pool's columns, by which each step is checked to
    write no page that is shared or sealed. `slots`: the scheduler's, by which each row is checked to be the slot's own sequence, to begin where its cache
    ends, and to take a token from the device exactly where one is unread. `states`: of state slots, by which each row is checked to go on from its own
    sequence's state, as far as that has come. `snapshots`: of snapshots, by which each copy is checked to be of a state at that very
    length. `bounds` and `laws` are for tests of the checks.
    """

    def __init__(
        self,
        limits: Limits,
        model: ModelConfig | None,
        level: str = "step",
        *,
        pages: PageState | None = None,
        slots: SlotState | None = None,
        states: StateSlots | None = None,
        snapshots: SnapshotColumns | None = None,
        bounds: tuple[Bound, ...] = BOUNDS,
        laws: tuple[Law, ...] = LAWS,
    ) -> None:
        """Compiles all bounds into one function. Raises ValueError as `check_level` does."""
        check_level(level)
        if os.environ.get("TWINFER_AUDIT") == "1":
            level = "full"
        self.level, self.limits, self.bounds, self.pages, self.slots, self.states = level, limits, bounds, pages, slots, states
        self.snapshots = snapshots
        self.vocab_size = None if model is None else model.vocab_size
        self._limit_env = limit_env(limits, model)
        self._setting = Setting(limits, self.vocab_size, self._limit_env[SPREAD_ROWS.name])
        self._check = compile_check([bound.relation for bound in bounds], PlanFacts._fields, self._limit_env)
        self._laws = tuple(law for law in laws if law.level == "step" or level == "full")
        self._varying = tuple(law for law in self._laws if not law.constant)
        self._last: StepView | None = None  # of a plan that passed and whose CONSTANT_COLUMNS are read-only

    def audit(self, plan: StepPlan, table: PageTable) -> None:
        """Checks a plan against `table`, which has the plan's delta applied.

        Raises BoundViolation or LawViolation naming what is broken, the numbers and the rows at fault; the other rows may be planned again.
        """
        alike = self._last if self._last is not None and self._last.table is table and _same_columns(plan, self._last.plan) else None
        fault = columns_fault(plan) if alike is None else varying_fault(plan)
        if fault:
            raise LawViolation("columns", fault)
        view = StepView(plan, table, self._setting, alike, self.pages, self.slots, self.states, self.snapshots)
        first = self._check(view.facts)
        if first >= 0:
            raise self._violation(self.bounds[first], view)
        for law in self._laws if alike is None else self._varying:
            if not law.holds(view):
                raise LawViolation(law.name, law.why, tuple(law.rows(view).tolist()))
        self._last = view if alike is not None or _read_only(plan) else None

    def check_output(self, plan: StepPlan, output: StepOutput, vocab_size: int | None = None) -> None:
        """Checks what an executor gave back: one token a sampled position, every id in the vocabulary (the model's, unless given)."""
        if output.step != plan.step:
            raise LawViolation("output_step", f"the output is of step {output.step}, the plan is step {plan.step}")
        wanted = int(np.add.reduce(plan.num_samples, dtype=np.int64))
        if output.tokens.dtype != np.int32:
            raise LawViolation("output_tokens", f"tokens are {output.tokens.dtype}, an output holds int32")
        if len(output.tokens) != wanted:
            raise LawViolation("output_tokens", f"the step gave {len(output.tokens)} tokens, {wanted} positions are sampled")
        _check_logprobs("sampled", output.sampled, wanted, most_logprobs(plan.sampling.num_logprobs, plan.num_samples))
        _check_logprobs("scored", output.scored, len(plan.targets), most_logprobs(plan.scored_logprobs, plan.num_scored))
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
        return StepView(plan, table, self._setting).facts

    def _violation(self, bound: Bound, view: StepView) -> BoundViolation:
        demand = bound.demand.evaluate(self._env(view.facts))
        capacity = bound.capacity.evaluate(self._limit_env)
        return BoundViolation(bound.name, str(bound.unit), demand, capacity, bound.remedy, self._culprits(bound, view, capacity))

    def _env(self, facts: PlanFacts) -> dict[str, int]:
        return {**self._limit_env, **facts._asdict()}

    def _culprits(self, bound: Bound, view: StepView, capacity: int) -> tuple[int, ...]:
        """Rows that are over by themselves; where none is, the first row at which the running demand passes the capacity and all after it."""

        def over(first: int, end: int) -> bool:
            part = StepView(rows_of(view.plan, first, end), view.table, self._setting)
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


def check_level(level: str | None) -> None:
    """ValueError for what is no level; None stands for an engine's default. Engines ask before they read weights."""
    if level is not None and level not in LEVELS:
        raise ValueError(f"audit level {level!r}: must be one of {', '.join(LEVELS)}")


def _same_columns(plan: StepPlan, before: StepPlan) -> bool:
    """Whether both hold the same objects in CONSTANT_COLUMNS (checked for `before`, and read-only since) and score nothing."""
    if plan.positions is not None or plan.mask is not None or plan.targets.size:
        return False
    return all(getattr(plan, name) is getattr(before, name) for name in CONSTANT_COLUMNS)


def _read_only(plan: StepPlan) -> bool:
    """Whether nobody can change the plan's CONSTANT_COLUMNS: arrays that own their data and forbid writing."""
    if plan.positions is not None or plan.mask is not None or plan.targets.size:
        return False
    columns = [getattr(plan, name) for name in CONSTANT_COLUMNS if name != "sampling"]
    columns += [getattr(plan.sampling, name) for name in (*SAMPLING_DTYPES, *SAMPLING_LIST_DTYPES)]
    return all(column.flags.owndata and not column.flags.writeable for column in columns)


def _check_logprobs(name: str, columns: LogprobColumns | None, num: int, num_top: int) -> None:
    """Log probabilities are there when asked for, one entry a position, with as many alternatives as any row wants."""
    if num_top < 0:
        return
    if columns is None:
        raise LawViolation("output_logprobs", f"{name} log probabilities of {num} positions were asked for, there are none")
    dtypes = [str(column.dtype) for column in (columns.logprob, columns.top_ids, columns.top_logprobs)]
    if dtypes != ["float64", "int32", "float64"]:
        raise LawViolation("output_logprobs", f"{name} log probabilities are {', '.join(dtypes)}, an output holds float64, int32, float64")
    shapes = (columns.logprob.shape, columns.top_ids.shape, columns.top_logprobs.shape)
    if len({shape[0] for shape in shapes} | {num}) > 1 or columns.top_ids.shape[1] < num_top or columns.top_logprobs.shape[1] < num_top:
        raise LawViolation("output_logprobs", f"{name} log probabilities have shapes {shapes}, the plan asks for {num} positions and {num_top} alternatives")


def rows_of(plan: StepPlan, first: int, end: int) -> StepPlan:
    """The plan with only rows first .. end - 1, for finding the rows at fault. Its delta and its copies keep the entries of their slots alone."""
    delta = plan.delta
    own = np.isin(delta.entry_slot, plan.slot[first:end])
    at = np.concatenate([[0], np.cumsum(plan.length, dtype=np.int64)])
    scored = np.concatenate([[0], np.cumsum(plan.num_scored, dtype=np.int64)])
    tokens, targets, rows = slice(at[first], at[end]), slice(scored[first], scored[end]), slice(first, end)
    sampling = plan.sampling
    bias, seen = (slice(int(p[first]), int(p[end])) for p in (sampling.bias_indptr, sampling.seen_indptr))
    return replace(
        plan,
        delta=replace(delta, entry_slot=delta.entry_slot[own], entry_index=delta.entry_index[own], entry_page=delta.entry_page[own]),
        **{name: getattr(plan, name)[rows] for name in ROW_DTYPES},
        restores=plan.restores[np.isin(plan.restores[:, 1], plan.state_slot[rows])],
        saves=plan.saves[np.isin(plan.saves[:, 0], plan.state_slot[rows])],
        tokens=plan.tokens[tokens],
        targets=plan.targets[targets],
        positions=None if plan.positions is None else plan.positions[tokens],
        mask=None if plan.mask is None else plan.mask[rows],
        sampling=SamplingColumns(
            **{name: getattr(sampling, name)[rows] for name in SAMPLING_DTYPES},
            bias_indptr=sampling.bias_indptr[first : end + 1] - sampling.bias_indptr[first],
            bias_ids=sampling.bias_ids[bias],
            bias_values=sampling.bias_values[bias],
            seen_indptr=sampling.seen_indptr[first : end + 1] - sampling.seen_indptr[first],
            seen_ids=sampling.seen_ids[seen],
            seen_counts=sampling.seen_counts[seen],
        ),
    )

