"""Faults of snapshots of states: when they are taken and restored, who finds them, what of a state is copied, and the grid that they lie on."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_KEEPING, _POOL = "twinfer.engine.keeping:Keeping.", "twinfer.engine.snapshots:SnapshotPool."
_SCHEDULER, _STEP = "twinfer.engine.scheduler:Scheduler.", "twinfer.reference.executor:ReferenceExecutor._compute"
_HITS, _TRAFFIC, _COPIES = ("snapshot hits",), ("snapshots",), ("copies of states",)
_SAVE = "        for slot, snapshot in plan.saves.tolist():\n            snapshots.save(slot, snapshot)\n"
_RESTORE = "        for snapshot, slot in plan.restores.tolist():\n            snapshots.restore(snapshot, slot)\n"
_FORWARD = "        hidden = self._forward(flat)\n"
_ALL_ROWS = (
    "[self._digest(self._sequence_at(int(b)), int(a + n) // self.limits.page_size) for b, a, n in zip(plan.slot, plan.start, plan.length)]; "
    "self.keeping.over(plan, {int(s): self._sequence_at(int(b)) for s, b in zip(plan.state_slot, plan.slot)})"
)


def _fault(name: str, what: str, place: str, old: str, new: str, red: tuple[str, ...], link: str = "", kind: str = "scheduler") -> Fault:
    return Fault(name, what, kind, red, edited(place, old, new), _GITHUB + link if link else "")


FAULTS: tuple[Fault, ...] = (
    # when
    _fault("snapshot one token late", "The step that saves a state ends one token behind the grid: the snapshot is of more tokens than it is found by.",
           _KEEPING + "copies", "(ends % self.grid == 0) & ((ends == self.stop[slots]) |", "(ends % self.grid == 1) & (", _TRAFFIC,
           "vllm-project/vllm/pull/34587"),
    _fault("saved before the step", "A snapshot is taken before the step that writes the state.", _STEP, _FORWARD + _SAVE, _SAVE + _FORWARD, _COPIES,
           "sgl-project/sglang/issues/24221", "executor"),
    _fault("restored after the step", "A row is computed before its state is there.",
           _STEP, _RESTORE + _FORWARD, _FORWARD + _RESTORE, _COPIES, kind="executor"),
    _fault("a chunk runs over the grid", "No chunk ends where a snapshot is wanted, so hardly a prompt leaves one.",
           _SCHEDULER + "_choose", "if self.keeping.active:", "if False:", _HITS, "syv-ai/qwen38-27b-rtx3090/pull/43"),
    _fault("snapshot at a prompt's very end alone", "A prompt of whole chunks leaves a snapshot where no token is left to compute, and never hits.",
           _KEEPING + "_points", "(known - 1) // self.grid", "known // self.grid", _HITS, "vllm-project/vllm/pull/50409"),
    _fault("no snapshot of an answer", "What was generated leaves none, so the next turn computes the whole answer again.",
           _KEEPING + "copies", "((ends == self.stop[slots]) | (ends == known))", "(ends == self.stop[slots])", _HITS),
    _fault("no snapshot at a branch", "Prompts with one beginning compute it again and again, since none ends where they part.",
           _KEEPING + "_points", "{branch, last,", "{last,", _HITS),
    _fault("every point that is passed is kept", "One long answer fills the pool with snapshots of its own.",
           _KEEPING + "over", "self.pool.pass_by(sequence.passed)", "pass", _HITS),
    # what
    _fault("convolution's history not restored", "A state goes on behind the convolution inputs of another sequence.",
           "twinfer.reference.state:SnapshotCache.restore", "history[snapshot], recurrent", "self.states.history[layer][slot], recurrent", _COPIES,
           kind="executor"),
    _fault("convolution's history not saved", "A snapshot holds the recurrent state alone.",
           "twinfer.reference.state:SnapshotCache.save", "self.history[layer, snapshot] = history[slot]", "pass", _COPIES, kind="executor"),
    _fault("snapshot shared with its maker", "A snapshot is the slot itself: the sequence that left it goes on writing it.",
           "twinfer.engine.ghost:GhostExecutor._compute", "self.snapshot_hash[plan.saves[:, 1]] = self.state_hash[plan.saves[:, 0]]",
           "self._alias = {**getattr(self, '_alias', {}), **{int(b): int(a) for a, b in plan.saves}}; "
           "[self.snapshot_hash.__setitem__(b, self.state_hash[a]) for b, a in self._alias.items()]",
           _TRAFFIC, "FlashML-org/FreeToken/pull/287", "executor"),
    # who finds it
    _fault("hit beyond its snapshot", "A hit is as long as the pages that are found, and its snapshot is of fewer tokens.",
           _KEEPING + "hit", "Hit(pages[: point * step], snapshot,", "Hit(pages, snapshot,", _TRAFFIC, "modular/modular/issues/6681"),
    _fault("snapshot found by another length", "The key of a snapshot is the digest of the page before its last.",
           _KEEPING + "over", "length // self._page_size - 1]", "length // self._page_size - 2]", _TRAFFIC, "ovg-project/kvcached/pull/451"),
    _fault("snapshot of a failed step is found", "What a failed step was to save is registered all the same.",
           _SCHEDULER + "failed", "self.keeping.over(plan, {})", _ALL_ROWS, _TRAFFIC),
    _fault("snapshot of a dropped token is found", "With look-ahead, what the step behind a sequence's end has saved is registered.",
           _SCHEDULER + "_advance", "np.flatnonzero(alive).tolist()})", "range(plan.num_rows)})", _TRAFFIC),
    _fault("snapshot outlives its page", "A snapshot stays when the page before it is gone, where nobody can hit it.",
           _SCHEDULER + "_forget", "self.keeping.pool.forget(digest)", "pass", _TRAFFIC),
    _fault("snapshots trusted behind bad numbers", "A state that is no number is found by the next prompt with the same beginning.",
           _SCHEDULER + "distrust", "self.keeping.pool.forget(digest)", "pass", ("distrust",)),
    _fault("computed again and kept twice", "Pages that a prompt had to compute anew are not found, and evict those that are.",
           _SCHEDULER + "_seal", "elif self.pool.references[known] == 0:", "elif False:", _HITS),
    # who holds it
    _fault("snapshot reused while a restore is pending", "A snapshot that a row is about to read is evicted and given to somebody to write.",
           _POOL + "pin", "self._cached.pop(snapshot, None)", "pass", _TRAFFIC),
    _fault("snapshots of dead rows leak", "What was taken for a row that ended is never given back, until nothing can be saved.",
           _KEEPING + "over", "self.pool.unpin(snapshot)\n            continue", "continue", _TRAFFIC),
    _fault("refused plan keeps its snapshots", "A plan that was not launched keeps what it had taken to save in.",
           _KEEPING + "cancel", "self.pool.unpin(snapshot)", "pass", _TRAFFIC),
    _fault("most recently used snapshot goes first", "The snapshot that will be asked for next is evicted.",
           _POOL + "take", "next(iter(self._cached), NO_SNAPSHOT)", "next(reversed(self._cached), NO_SNAPSHOT)", _HITS),
    _fault("pages without a grid in common accepted", "A page of 48 tokens and chunks of 64 have hardly a length in common at which a state is whole.",
           "twinfer.invariants.resolve:_check_states", "STATE_CHUNK % page_size and page_size % STATE_CHUNK", "False", ("grid of states",),
           "local-inference-lab/vllm/pull/672"),
)  # fmt: skip
