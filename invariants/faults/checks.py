"""Faults of the checks themselves: a gate that can't fail shows nothing."""

from __future__ import annotations

from typing import Any

from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.expr import Const
from twinfer.invariants.faults.fault import Fault, Switch
from twinfer.invariants.faults.switch import edited, replaced, sized

_INVARIANTS = "twinfer.invariants."
_LAW2, _COMPARE = "twinfer.invariants.gates.law2:", "twinfer.golden.compare:"


def _fault(name: str, what: str, switch: Switch, *red: str) -> Fault:
    return Fault(name, what, "checker", red, switch)


def _floor_in_integers(readings: dict[str, Any]) -> dict[str, Any]:
    return {**readings, "cdiv": lambda left, right: left // right}


FAULTS: tuple[Fault, ...] = (
    # formulas and proofs
    _fault("compiled check never fails", "The function that all bounds are compiled into always says that they hold.",
           edited(_INVARIANTS + "expr:compile_check", 'return {i}"', 'pass"'), "breakers", "judge"),
    _fault("compiled check off by one", "A demand of one more than the capacity passes.",
           edited(_INVARIANTS + "expr:Relation.source", "{self.kind} {self.right", "{self.kind} 1 + {self.right"), "breakers"),
    _fault("bound that always holds", "A bound's capacity has no end, so it limits nothing.",
           sized("logprobs", capacity=Const(2**62, BY_NAME["logprobs"].unit)), "breakers", "judge"),
    _fault("compiled ceil rounds down", "The compiled reading of a quotient is smaller than the others.",
           edited(_INVARIANTS + "expr:Binary.source", "(-(-{left} // {right}))", "({left} // {right})"), "readings"),
    _fault("integer ceil rounds down", "The reading that sizes buffers is smaller than the others.",
           replaced(_INVARIANTS + "expr:_INTEGER", _floor_in_integers), "readings"),
    _fault("quotient without its lower side", "z3 may take any number below a quotient for it.",
           edited(_INVARIANTS + "expr:Binary.to_z3", "quotient * right >= left, ", ""), "readings"),
    _fault("relation whatever its sides", "z3 is asked whether a side is at most itself.",
           edited(_INVARIANTS + "expr:Relation.to_z3", 'return left <= right if self.kind == "<="', 'return left <= left if self.kind == "<="'), "refutations"),
    _fault("unknown counts as proved", "Whatever z3 answers is taken for a proof.",
           edited(_INVARIANTS + "prove:Prover._decide", '"proved" if answer == z3.unsat', '"proved" if answer'), "refutations"),
    _fault("pages and references are one unit", "A list counted by reference may be sized by the pool.",
           replaced(_INVARIANTS + "unit:Dimension.__eq__", lambda right: lambda a, b: True), "units"),
    _fault("by reference converts nothing", "Pages stay pages, so lists of them can't be bounded at all.",
           edited(_INVARIANTS + "expr:ByReference.__post_init__", "self.inner.dimension.by_reference()", "self.inner.dimension"), "references"),
    # ledger and auditor
    _fault("ledger takes any shape", "An executor may make a buffer smaller than its bound.",
           edited(_INVARIANTS + "ledger:Ledger.allocate", "tuple(made) != shape", "False"), "ledger"),
    _fault("ledger forgets what it gave", "An owner may have a second buffer, outside of every sum.",
           edited(_INVARIANTS + "ledger:Ledger.allocate", "if key in self._rows", "if False"), "ledger"),
    _fault("contexts without the step's tokens", "What the step writes itself is not counted.",
           edited(_INVARIANTS + "facts:StepView.__init__", "plan.start + plan.length\n", "plan.start + 0 * plan.length\n"), "judge", "naive facts"),
    _fault("padding forgotten", "Facts count rows as if no graph padded them.",
           edited(_INVARIANTS + "facts:StepView._columns", "limits.bucket(num_rows) if num_rows <= limits.buckets[-1]", "num_rows if True"), "naive facts"),
    _fault("pages rounded down", "The last, partly filled page of a row is not counted.",
           edited(_INVARIANTS + "facts:StepView.__init__", "(context + (page_size - 1)) //", "context //"), "naive facts"),
    _fault("blame on the whole step", "Rows that are within every limit are refused with the one that is not.",
           edited(_INVARIANTS + "auditor:Auditor._culprits", "return alone", "return tuple(range(num_rows))"), "breakers"),
    _fault("full laws never run", "The audit of level full is the one of level step.",
           edited(_INVARIANTS + "auditor:Auditor.__init__", 'law.level == "step" or level == "full"', 'law.level == "step"'), "judge", "audit"),
    _fault("nobody is at fault", "The search for the rows that break a law finds none.",
           edited(_INVARIANTS + "laws:row_of", "entries[:size]]", "entries[:0]]"), "breakers"),
    _fault("outputs of any length", "A step may give fewer tokens than its plan samples.",
           edited(_INVARIANTS + "auditor:Auditor.check_output", "len(output.tokens) != wanted", "False"), "outputs"),
    _fault("outputs beyond the vocabulary", "A token that does not exist is handed to the client.",
           edited(_INVARIANTS + "auditor:Auditor.check_output", "(output.tokens >= vocab_size)", "(output.tokens >= 2**31 - 1)"), "outputs"),
    _fault("pool check compares nothing", "Reference counts that no page list explains go unseen.",
           edited("twinfer.invariants.state:_references", "if not len(wrong):", "if True:"), "audit"),
    # comparisons
    _fault("comparison ignores NaN", "Logits that are no numbers pass where no limit is set.",
           edited(_COMPARE + "Comparison.passed", "any(np.isnan(value)", "any(False and np.isnan(value)"), "golden comparison"),
    _fault("comparison of zero positions", "A golden that shares no position with the logits passes.",
           edited(_COMPARE + "_summarise", "if num_positions == 0:", "if False:"), "golden comparison"),
    _fault("comparison up to the shorter one", "Logits of half a document are compared with its half, and pass.",
           edited(_COMPARE + "_errors", "if ours.shape != (len(where), golden.vocab_size):", "where = where[: len(ours)]\n    if False:"), "golden comparison"),
    _fault("comparison of log probabilities alone", "A constant added to all logits is not seen.",
           edited(_COMPARE + "_summarise", "max=float(np.maximum(flat.max(), logsumexp))", "max=float(flat.max())"), "golden comparison"),
    _fault("limits not looked at", "A comparison passes whatever its figures are.",
           edited(_COMPARE + "Comparison.passed", "limit is None or value <= limit", "limit is None or value >= 0"), "golden comparison"),
    _fault("law 2 recorder takes nothing", "The gate compares what was never recorded.",
           edited(_LAW2 + "Recorder._take", "if name is None:", "if True:"), "law 2 finds"),
    _fault("law 2 recorder skips what is drawn from", "The logits that tokens were drawn from are shown and not compared.",
           edited(_LAW2 + "Recorder._take_sampled", "self.found.setdefault", "{}.setdefault"), "law 2 finds"),
    _fault("law 2 judge sees no difference", "Digests are collected and not compared.",
           edited(_LAW2 + "Law2._judge", "if found.get(key) != {self.alone.get(key)}", "if False"), "law 2 finds"),
    _fault("law 2 forgives a lost position", "A position that a schedule did not compute is not missed.",
           edited(_LAW2 + "Law2._judge", "} | set(found)", "} & set(found)"), "law 2 finds"),
    _fault("law 2 over zero positions", "A schedule in which nothing was computed holds.",
           edited(_LAW2 + "Finding.holds", "self.num_positions > 0", "True"), "law 2 finds"),
    _fault("law 2 whatever was reached", "A schedule without the hit or the preemption that it is for holds.",
           edited(_LAW2 + "Finding.holds", "self.reached and", ""), "law 2 finds"),
    _fault("law 2 takes any step for a mixed one", "The schedule of mixed steps holds where every request was alone in its steps.",
           edited(_LAW2 + "Recorder._take", "decode.any() and not decode.all()", "True"), "law 2 finds"),
    _fault("law 2 takes any prompt for a chunked one", "The schedule of chunks holds where every prompt was computed whole.",
           edited(_LAW2 + "Recorder._take", "named & (plan.num_samples == 0)", "named"), "law 2 finds"),
    _fault("law 2 holds for no finding", "A gate that ran no schedule holds.",
           edited(_LAW2 + "all_hold", "bool(listed) and ", ""), "law 2 finds"),
    _fault("digest of a sum", "Logits in another order have the same digest.",
           edited(_LAW2 + "digests", "* odd", "* 1"), "law 2 finds"),
)  # fmt: skip
