"""Proofs that no admissible plan exceeds a bound, for all limits, from the very Bound objects that allocate and check. Needs z3 (twinfer[prove]).

Form. What a plan sums over its rows is bounded by induction: one lemma for an arbitrary row that is added to arbitrary sums, page size and number
of rows symbolic. With these summaries and the scheduler's contract as assumptions, `demand <= capacity` is one query a bound. "unknown" counts as
a failure, and so does a contradiction among the assumptions, which would prove anything.

python -m twinfer.invariants.prove    prints the verdicts; exit status 1 unless everything is proved
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinfer.errors import TwinferError
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS, CONTRACT
from twinfer.invariants.expr import Relation, ceil_div
from twinfer.invariants.facts import PlanFacts
from twinfer.invariants.symbols import (
    ATTENTION_SPLIT,
    MODEL_SYMBOLS,
    NUM_ATTENTION_LAYERS,
    NUM_GDN_LAYERS,
    OPTIONAL_SYMBOLS,
    PAGE_SIZE,
    ROW_EXTENT,
    ROW_SPLITS,
    STATE_CHUNK,
)

TIMEOUT_MS = 10_000  # the slowest obligation takes well under a second; this only ends what z3 can't decide

LIMIT_NAMES = (
    "max_batch", "max_bucket", "max_step_tokens", "max_chunk_tokens", "max_context", "max_step_context", "max_logit_tokens", "page_size", "num_pages",
    "num_state_slots", "num_snapshots", "snapshot_interval", "speculative_tokens", "look_ahead", "max_logprobs", "max_logit_bias", "warmup_tokens",
    "spread_rows",
    *(symbol.name for symbol in MODEL_SYMBOLS),
)  # fmt: skip
FACT_NAMES = PlanFacts._fields
ZERO_ALLOWED = {
    "num_state_slots", "num_snapshots", "speculative_tokens", "look_ahead", "max_logprobs", "max_logit_bias", NUM_ATTENTION_LAYERS.name, NUM_GDN_LAYERS.name,
    *(symbol.name for symbol in OPTIONAL_SYMBOLS),
}  # fmt: skip


class ProverMissing(TwinferError, ImportError):
    """z3 is not installed."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One obligation. verdict: proved, refuted or unknown; counterexample: the values that refute it; words: the same as a sentence."""

    name: str
    verdict: str
    seconds: float
    counterexample: Mapping[str, int] = field(default_factory=dict)
    words: str = ""


def _z3() -> Any:
    try:
        import z3
    except ImportError:
        raise ProverMissing("proofs need z3-solver; install it with: pip install 'twinfer[prove]'") from None
    return z3


class Prover:
    """One set of z3 integers for all limits and facts. `dropped` leaves an assumption out, to show that something rests on it."""

    def __init__(self, dropped: str | None = None, timeout_ms: int = TIMEOUT_MS) -> None:
        z3 = _z3()
        self.timeout_ms = timeout_ms
        self.env: dict[str, Any] = {name: z3.Int(name) for name in (*LIMIT_NAMES, *FACT_NAMES)}
        self.assumptions: dict[str, list[Any]] = {}
        e = self.env
        side: list[Any] = []
        limits = [e[name] >= (0 if name in ZERO_ALLOWED else 1) for name in LIMIT_NAMES]
        limits += [e["max_bucket"] >= e["max_batch"], e["max_step_context"] >= e["max_context"], e["max_chunk_tokens"] <= e["max_step_tokens"]]
        limits += [e["max_step_tokens"] >= e["max_batch"] * (1 + e["speculative_tokens"])]
        self._assume("limits", limits)
        for bound in CONTRACT:
            self._assume(f"contract: {bound.name}", [bound.relation.to_z3(e, side)])
        # Named, so that bounds mean this very quotient: left to show that two of them are one, z3 gave up on page_indices with 2 seeds in 5.
        row_pages = ceil_div(ROW_EXTENT, PAGE_SIZE).to_z3(e, side)
        e[str(ceil_div(ROW_EXTENT, PAGE_SIZE))] = row_pages
        row_splits = e[str(ROW_SPLITS)] = ROW_SPLITS.to_z3(e, side)
        pages = [row_pages >= 1, row_splits >= 1]
        self._assume("facts are counts", [e[name] >= 0 for name in FACT_NAMES] + [e["num_rows"] >= 1, e["num_tokens"] >= e["num_rows"]] + pages + side)
        # Each of these is a definition, a law of the auditor, or a summary that `lemmas` prove by induction over rows.
        self._assume("bucket", [e["padded_rows"] >= e["num_rows"], e["padded_rows"] <= e["max_bucket"]])
        self._assume("uniform rows are padded rows", [z3.Or(e["uniform_rows"] == 0, e["uniform_rows"] == e["padded_rows"])])
        self._assume("law token_positions: a position lies in its context", [e["largest_position"] + 1 <= e["largest_context"]])
        self._assume("bound page_table: slots are below max_batch", [e["largest_slot"] + 1 <= e["max_batch"]])
        self._assume("law written_pages: pages come from the pool", [e["largest_page"] <= e["num_pages"]])
        self._assume("sum: pages by context", [e["page_size"] * e["page_references"] <= e["step_context"] + e["num_rows"] * (e["page_size"] - 1)])
        self._assume("sum: pages by row", [e["page_references"] <= e["num_rows"] * row_pages])
        self._assume("sum: samples", [e["num_sampled"] <= e["num_rows"] * e["largest_samples"]])
        # Splits of the rows that are spread, at most spread_rows of them: each has one for 256 keys of its context, and one that may be almost empty.
        rest = (ATTENTION_SPLIT - 1) * e["spread_rows"]
        self._assume("sum: splits by context", [ATTENTION_SPLIT * e["spread_splits"] <= e["step_context"] + rest])
        self._assume("sum: splits by row", [e["spread_splits"] <= e["spread_rows"] * row_splits])
        # Chunks of rows of several tokens: a row of n lies in (n + 126) / 64 of them at most, and in no more than it has tokens.
        rest = (2 * STATE_CHUNK - 2) * e["num_rows"]
        self._assume("sum: chunks", [STATE_CHUNK * e["state_tasks"] <= e["num_tokens"] + rest, e["state_tasks"] <= e["num_tokens"]])
        self._assume("tiles have at most max_logit_tokens", [e["logit_tile"] <= e["max_logit_tokens"]])
        self._assume("sum: scored", [e["num_scored"] <= e["num_tokens"]])
        self._assume("sum: bias", [e["bias_entries"] <= e["num_rows"] * e["largest_bias"]])
        self._assume("sum: seen", [e["seen_entries"] <= e["step_context"]])
        self._assume(
            "law delta_places: a delta names a place once", [e["delta_entries"] <= e["max_batch"] * row_pages, e["delta_lengths"] <= e["max_batch"]]
        )
        self._assume("law state_copies: a row copies its state once each way", [e["num_restores"] <= e["num_rows"], e["num_saves"] <= e["num_rows"]])
        if dropped is not None:
            del self.assumptions[dropped]

    def _assume(self, name: str, terms: list[Any]) -> None:
        self.assumptions[name] = terms

    def bound(self, bound: Bound) -> Proof:
        """demand <= capacity under all assumptions."""
        side: list[Any] = []
        claim = bound.relation.to_z3(self.env, side)
        proof = self._decide(bound.name, self._given() + side, claim)
        return replace(proof, words=in_words(bound, proof.counterexample)) if proof.verdict == "refuted" else proof

    def smallest(self, bound: Bound, where: Sequence[Relation] = (), most: int = 64) -> Proof:
        """`bound`'s refutation in which the largest number is as small as can be, at most `most`; else what `bound` gives.

        It is a step that rows can really make: proofs need no more than the assumptions, an example for people does. `where`: what it shall show.
        """
        first = self.bound(bound)
        if first.verdict != "refuted":
            return first
        side: list[Any] = []
        claim = bound.relation.to_z3(self.env, side)
        side += [relation.to_z3(self.env, side) for relation in where]
        for largest in range(1, most + 1):
            small = [self.env[name] <= largest for name in (*LIMIT_NAMES, *FACT_NAMES)]
            proof = self._decide(bound.name, self._given() + self._realistic() + side + small, claim)
            if proof.verdict == "refuted":
                return replace(proof, words=in_words(bound, proof.counterexample))
        return first

    def _realistic(self) -> list[Any]:
        """What sums and largest values of one step have to do with each other, by their definitions."""
        z3 = _z3()
        e = self.env
        rows, size, refs, pages, most = e["num_rows"], e["page_size"], e["page_references"], e["num_pages"], e["largest_context"]
        longest = z3.Int("longest_list")
        sums = [(e["num_tokens"], e["largest_length"], 1), (e["step_context"], most, 1), (refs, longest, 1), (e["num_sampled"], e["largest_samples"], 0)]
        terms = [total <= rows * largest for total, largest, _ in sums]
        terms += [total >= largest + (rows - 1) * least for total, largest, least in sums]
        terms += [longest * size >= most, (longest - 1) * size < most, most >= 1, size * refs >= e["step_context"], refs <= e["step_context"]]
        terms += [e["largest_length"] <= most, e["num_tokens"] <= e["step_context"], e["largest_samples"] <= e["largest_length"]]
        # Pages that the step writes are each in one row's list only; all rows may list the others.
        written = z3.Int("written_pages")
        terms += [written >= rows, written * size >= e["num_tokens"], written <= pages, refs <= rows * (pages - written) + written]
        terms += [e["largest_slot"] + 1 >= rows]
        verify = e["largest_length"] <= 1 + e["speculative_tokens"]
        terms += [e["uniform_rows"] == z3.If(verify, e["padded_rows"], 0), z3.Implies(rows == e["max_batch"], e["padded_rows"] == e["max_bucket"])]
        return terms

    def _given(self) -> list[Any]:
        return [term for terms in self.assumptions.values() for term in terms]

    def consistent(self) -> bool:
        """Whether some plan satisfies all assumptions; if none did, they would prove anything."""
        z3 = _z3()
        solver = z3.Solver()
        solver.set("timeout", self.timeout_ms)
        solver.add(*self._given())
        return bool(solver.check() == z3.sat)

    def _decide(self, name: str, given: Sequence[Any], claim: Any) -> Proof:
        z3 = _z3()
        start = time.perf_counter()
        solver = z3.Solver()
        solver.set("timeout", self.timeout_ms)
        solver.add(*given)
        solver.add(z3.Not(claim))
        answer = solver.check()
        verdict = "proved" if answer == z3.unsat else "refuted" if answer == z3.sat else "unknown"
        values: dict[str, int] = {}
        if verdict == "refuted":
            model = solver.model()
            values = {key: model.eval(term, model_completion=True).as_long() for key, term in self.env.items()}
        return Proof(name, verdict, time.perf_counter() - start, values)


def lemmas() -> list[Proof]:
    """The induction steps behind the sums: if a summary holds for the rows so far, it holds with one arbitrary row more. Zero rows are trivial."""
    z3 = _z3()
    prover = Prover()
    e = prover.env
    rows, context, refs, c, q, row_pages, extent = z3.Ints("rows context refs c q row_pages extent")
    row = [rows >= 0, context >= 0, refs >= 0, c >= 1, c <= extent, e["page_size"] >= 1]
    row += [q * e["page_size"] >= c, (q - 1) * e["page_size"] < c]  # q = ceil(c / page_size)
    longest = [row_pages * e["page_size"] >= extent, (row_pages - 1) * e["page_size"] < extent]
    total, part, most = z3.Ints("total part most")
    any_sum = [rows >= 0, part >= 0, part <= most, total <= rows * most]
    entries, seen = z3.Ints("entries seen")
    tasks, n, start, first, last = z3.Ints("tasks n start first last")  # a row of n >= 2 tokens from start on: its first and last chunk
    splits, own = z3.Ints("splits own")  # own = ceil(c / 256)
    cases: list[tuple[str, list[Any], Any]] = [
        ("pages by context", [*row, e["page_size"] * refs <= context + rows * (e["page_size"] - 1)],
         e["page_size"] * (refs + q) <= context + c + (rows + 1) * (e["page_size"] - 1)),
        ("pages of one row", [*row, *longest], q <= row_pages),
        ("pages, splits by row", [*row, *longest, q <= row_pages, refs <= rows * row_pages], refs + q <= (rows + 1) * row_pages),
        ("samples, bias: at most rows times the largest", any_sum, total + part <= (rows + 1) * most),
        ("splits: a row's last may be almost empty", [rows >= 0, c >= 1, ATTENTION_SPLIT * splits <= context + (ATTENTION_SPLIT - 1) * rows,
                                                      own * ATTENTION_SPLIT >= c, (own - 1) * ATTENTION_SPLIT < c],
         ATTENTION_SPLIT * (splits + own) <= context + c + (ATTENTION_SPLIT - 1) * (rows + 1)),
        ("chunks by length", [rows >= 0, tasks >= 0, n >= 2, first * STATE_CHUNK <= start, start < (first + 1) * STATE_CHUNK,
                              last * STATE_CHUNK < start + n, start + n <= (last + 1) * STATE_CHUNK,
                              STATE_CHUNK * tasks <= total + (2 * STATE_CHUNK - 2) * rows],
         STATE_CHUNK * (tasks + last - first + 1) <= total + n + (2 * STATE_CHUNK - 2) * (rows + 1)),
        ("chunks by token", [tasks <= total, n >= 2, first * STATE_CHUNK <= start, start < (first + 1) * STATE_CHUNK,
                             last * STATE_CHUNK < start + n, start + n <= (last + 1) * STATE_CHUNK], tasks + last - first + 1 <= total + n),
        ("seen, scored: entry sums stay below what bounds each row", [entries <= context, seen <= c], entries + seen <= context + c),
    ]  # fmt: skip
    return [prover._decide(f"lemma: {name}", given, claim) for name, given, claim in cases]


def prove_all(bounds: Sequence[Bound] = BOUNDS) -> list[Proof]:
    """Every lemma and every bound."""
    prover = Prover()
    if not prover.consistent():
        raise TwinferError("the assumptions of the proofs contradict each other, so they prove nothing")
    return [*lemmas(), *(prover.bound(bound) for bound in bounds)]


def in_words(bound: Bound, at: Mapping[str, int]) -> str:
    """A refutation as a sentence: the step, what it asks of the buffer, and what the buffer holds."""
    shared = "shared " if at["page_references"] > at["num_pages"] else ""
    return (
        f"{_count(at['num_rows'], 'request')} over {_count(at['num_pages'], shared + 'page')} of {_count(at['page_size'], 'token')}, "
        f"{_count(at['num_tokens'], 'token')} to compute: {bound.name} needs {bound.demand.evaluate(at)} {bound.unit} ({bound.demand}), "
        f"it holds {bound.capacity.evaluate(at)} ({bound.capacity})"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def main() -> int:
    """Prints every verdict; exit status 1 unless all are proved, or where there is no z3."""
    try:
        proofs = prove_all()
    except ProverMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for proof in proofs:
        print(f"{proof.verdict:8} {proof.seconds * 1e3:8.1f} ms  {proof.name}{': ' * bool(proof.words)}{proof.words}")
    return 0 if all(proof.verdict == "proved" for proof in proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
