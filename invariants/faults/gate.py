"""GATES: the checks that faults must turn red, by name. What each does is here in a line; the code is in tests/, where tests/faults/gates.py finds it."""

from __future__ import annotations

GATES: dict[str, str] = {
    # bounds and laws
    "proofs": "z3 proves demand <= capacity for all limits",
    "random plans fit": "flattened random plans, padding included, fit buffers of the bounds' sizes",
    "random demand": "the demand of random plans within the limits is within each capacity, by facts counted naively",
    "naive facts": "the auditor's facts are those of a count in plain Python",
    "judge": "the auditor refuses what a slow judge without shared code refuses, for plans with one number changed",
    "breakers": "a smallest plan that breaks one bound or law is refused under its name, with its rows",
    "readings": "integers, compiled code, z3 and text read one formula as one value",
    "refutations": "the prover refutes a wrong bound",
    "units": "quantities of different units do not mix",
    "references": "pages become references only by `by_reference`",
    "ledger": "the ledger gives each buffer once, in its bound's shape and dtype",
    "outputs": "an output of another step, number, dtype or range than its plan's is refused",
    "audit": "the full audit finds a lost reference and an id outside the vocabulary",
    # decisions
    "machine": "random traffic over the ghost executor: tokens, events, columns and pages are those of solo runs",
    "prompt scores": "two prompts that are scored beside each other, one of them preempted, get their own scores",
    "eviction by pool": "cached pages are evicted in the order of their last use, whatever the traffic",
    "eviction by engine": "the same through an engine: what a request used last stays longest",
    "containment": "each accepted request gets one terminal event, whatever breaks; only what failed ends; health follows the executor",
    "shared prefixes": "the first outage replayed on the reference engine: staggered requests over one warm prompt",
    "capped profiling": "the second outage replayed on the reference engine: a mixed step above the warm-up's size",
    # arithmetic
    "transformers": "float32 log probabilities are transformers' to 1e-3 nat",
    "seed": "another seed draws other tokens",
    "high seed word": "the upper 32 bits of a seed count",
    "position": "another position draws other tokens",
    "sample index": "another sample of a request draws other tokens",
    "purpose": "another purpose draws other tokens",
    "plain draw": "tokens are those of a draw written in plain Python",
    "top-p edge": "a cumulative probability exactly at top_p",
    "top-k tie": "of equal scores at the edge of top_k the lowest ids are kept",
    "output penalties": "presence and frequency penalties count output alone",
    "greedy tie": "of equal best scores the lowest id is taken",
    "ban": "a banned token is never drawn",
    # the fast engine and its kernels, in Triton's interpreter where there is no GPU
    "fast alone": "one request's logits and tokens are the reference's, with a step planned ahead",
    "fast beside": "the same for three requests in a bucket of four, with slots that became free and pages that begin",
    "fast scores": "log probabilities of samples and prompts are the reference's",
    "not a number": "logits that are no numbers end their row alone, in both engines",
    "staging": "whatever is planned can be staged: each token in one task, splits in order, padding on the padding page",
    "sets in flight": "a staging set stays as it is while its step is in flight",
    "padding page": "a step writes its own slots and the first slot of the padding page, nothing else",
    "law 2": "the logits of a token have the same bits in every schedule",
    "attention bits": "attention of a token has the same bits in every launch, on caches that hold NaN wherever nothing may be read",
    "used workspace": "attention over the partials and counters that another launch left",
    "task list": "the task list lets every token meet every key once, within its bounds",
    "operations": "each Triton form gives its plain form's values and writes nothing else",
    "Triton sampler": "the sampling kernels give the reference's tokens, errors and ties",
    # checks of the checks
    "law 2 finds": "the gate of law 2 holds for an engine that obeys it and fails for one that does not, for nothing compared, and for a lost position",
    "golden comparison": "NaN, zero positions, other shapes, an offset and a shift fail; right logits pass",
}  # fmt: skip
