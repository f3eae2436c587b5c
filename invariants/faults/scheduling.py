"""Faults of decisions: pages, prefix cache, rows, admission, page table, and the loop that ends requests."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_POOL, _PREFIX = "twinfer.engine.pages:PagePool.", "twinfer.engine.prefix:PrefixCache."
_SCHEDULER, _ENGINE = "twinfer.engine.scheduler:Scheduler.", "twinfer.engine.engine:Engine."
_BOTH_ORDERS = ("eviction by pool", "eviction by engine")


def _fault(name: str, what: str, place: str, old: str, new: str, link: str = "", red: tuple[str, ...] = ("machine",)) -> Fault:
    return Fault(name, what, "scheduler", red, edited(place, old, new), _GITHUB + link if link else "")


FAULTS: tuple[Fault, ...] = (
    # pages and what is found of them
    _fault("digest without its parent", "Equal pages after different beginnings are taken for one another.", _PREFIX + "extend", "before + tokens", "tokens"),
    _fault("digest cut to 2 bits", "Hashes collide and nobody compares tokens, so a row reads a stranger's page.",
           _PREFIX + "extend", "blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()", "bytes([blake2b(before + tokens).digest()[0] % 4])",
           "openvinotoolkit/openvino.genai/issues/3722"),
    _fault("sealed one token ahead", "A page is found by others one token before its last slot is written.",
           _SCHEDULER + "_advance", "full = after // size", "full = (after + 1) // size", "pegainfer-project/pegainfer/pull/836"),
    _fault("sealed when launched", "A page is found by others while the step that writes it is still in flight.",
           _SCHEDULER + "delivered", "self._writer.delivered()",
           "self._writer.delivered(); [self._seal(self._sequence_at(int(s)), int(a) // self.limits.page_size, int(a + n) // self.limits.page_size) "
           "for s, a, n in zip(plan.slot, plan.start, plan.length) if self._sequence_at(int(s)).use_cache]",
           "vllm-project/vllm/pull/37152"),
    _fault("whole prompt may be hit", "A full hit leaves no token to compute, so there are no logits to sample from.",
           _SCHEDULER + "_match", "(len(sequence.tokens) - 1) //", "len(sequence.tokens) //", "GeeeekExplorer/nano-vllm/issues/144"),
    _fault("hit without a reference", "A shared page is freed or evicted while a second sequence still lists it.",
           _POOL + "share", "self.references[page] += 1", "pass"),
    _fault("reference taken late", "A hit is referenced after the row's own pages were allocated, which may have evicted it.",
           _SCHEDULER + "_admit", "slot = self._enter(sequence, hit)\n        now = ceil_div(cached + length, size) - len(hit.pages)\n"
           "        self._writer.append(slot, self.pool.allocate(now))\n",
           "now = ceil_div(cached + length, size) - len(hit.pages)\n        fresh = self.pool.allocate(now)\n"
           "        slot = self._enter(sequence, hit)\n        self._writer.append(slot, fresh)\n"),
    _fault("evicted page stays findable", "A page that holds something else by now is still found under its old digest.",
           _POOL + "allocate", "self._on_evict(page)", "pass", "vllm-project/vllm/pull/4761"),
    _fault("pages leak", "A sequence that leaves keeps its references, until nothing can be admitted.",
           _SCHEDULER + "_release", "self.pool.release(self.table.page_list(slot).tolist())", "pass", "jjang-ai/vmlx/pull/68"),
    _fault("page released twice", "One of a leaving sequence's pages goes back a second time, under whoever holds it.",
           _SCHEDULER + "_release", "self._writer.clear(slot)", "self.pool.release(self.table.page_list(slot).tolist()[:1])", "vllm-project/vllm/pull/42615"),
    _fault("cached length one short", "The hit ends in the middle of a page, which is then written though it is shared.",
           _SCHEDULER + "_enter", "cached = len(hit.pages) * self.limits.page_size", "cached = max(0, len(hit.pages) * self.limits.page_size - 1)"),
    _fault("cache off still finds", "Without a prefix cache pages are sealed all the same, and stay registered.",
           _SCHEDULER + "add", "use_cache=self.prefix_cache and", "use_cache=", "pegainfer-project/pegainfer/issues/681"),
    _fault("most recently used goes first", "The pages that will be asked for next are evicted.",
           _POOL + "allocate", "popitem(last=False)", "popitem(last=True)", red=_BOTH_ORDERS),
    _fault("head is cached before its tail", "A list's first page is evicted first, and with it goes what follows.",
           _POOL + "release", "reversed(pages)", "pages", red=_BOTH_ORDERS),
    _fault("a hit keeps its old place", "A page that was just used is evicted as if it had not been.",
           _POOL + "share", "del self._cached[page]", "pass", red=_BOTH_ORDERS),
    _fault("released pages go to the front", "What was released last is evicted first.",
           _POOL + "release", "self._cached[page] = None", "self._cached[page] = None; self._cached.move_to_end(page, last=False)", red=_BOTH_ORDERS),
    _fault("evicted though pages are free", "A page that somebody might hit goes while an empty one is there.",
           _POOL + "allocate", "if self._free:", "if self._free and not self._cached:", red=_BOTH_ORDERS),
    # what a step may hold
    _fault("hits not counted against the pool", "Cached pages that a hit takes are also promised to others, so running rows find none.",
           _SCHEDULER + "_admit", "total + unreferenced + owed", "total", "pegainfer-project/pegainfer/issues/85"),
    _fault("pages not checked before reserving", "The allocator is asked for more than there is.",
           _SCHEDULER + "plan", "total <= self.pool.num_available", "True", "pegainfer-project/pegainfer/issues/288"),
    _fault("step tokens ignored", "Chunks fill the step beyond max_step_tokens.",
           _SCHEDULER + "_choose", "(limits.max_step_tokens - before).clip(0)", "(10**6 - before).clip(0)"),
    _fault("step context ignored", "Rows join the step until its contexts are more than it may list.",
           _SCHEDULER + "_choose", "np.searchsorted(reach, limits.max_step_context", "np.searchsorted(reach, 10**9"),
    _fault("chunk size ignored", "A long prompt is computed in one chunk and holds up the decode rows.",
           _SCHEDULER + "_choose", "np.minimum(lengths[by_kind], limits.max_chunk_tokens)", "lengths[by_kind]"),
    _fault("admission ignores the step's tokens", "Newcomers are admitted though the budget of the step is used up.",
           _SCHEDULER + "_admit", "limits.max_chunk_tokens, tokens_left, context_left", "limits.max_chunk_tokens, context_left",
           "sgl-project/sglang/pull/30743"),
    _fault("preempted sequence is lost", "Whoever gave up its pages is never computed again.",
           _SCHEDULER + "_preempt", "self._waiting.appendleft(sequence)", "pass"),
    _fault("never-fitting request accepted", "A request longer than the pool waits at the head of the queue for ever.",
           "twinfer.engine.admission:max_new_tokens", "if asked > most:", "if False:", "vllm-project/vllm/issues/39734"),
    _fault("one token too many", "A request generates one token beyond max_tokens.",
           _SCHEDULER + "commit", "num_generated >= sequence.max_new", "num_generated > sequence.max_new", "sgl-project/sglang/pull/33814"),
    _fault("slot given twice", "Two sequences get one batch slot and write each other's pages.",
           _SCHEDULER + "_release", "self._free_slots.append(slot)", "self._free_slots.extend([slot, slot])", "sgl-project/sglang-jax/pull/994"),
    # states
    _fault("hit without its state", "A prefix hit skips tokens that the state has not seen.",
           "twinfer.engine.slots:SlotTable.__init__", "prefix_cache and (not limits.num_state_slots or limits.num_snapshots > 0)", "prefix_cache",
           red=("snapshots",)),
    _fault("state slots leak", "A sequence that leaves keeps its state slot, until nothing can be admitted.",
           _SCHEDULER + "_release", "self.states.release(int(self._state_slot[slot]))", "pass"),
    _fault("state slot given twice", "Two sequences go on from one state.", "twinfer.engine.states:StatePool.take", "self._free.pop()", "self._free[-1]"),
    _fault("state of another row", "Rows go on from each other's states.",
           "twinfer.engine.rows:RowBuilder.build", "state_slot=state_slot[slots],", "state_slot=state_slot[slots[::-1]],"),
    _fault("state outlives its sequence", "A state slot counts as filled when somebody else gets it.",
           "twinfer.engine.states:StatePool.take", "self.owner[slot], self.length[slot] = sequence, 0", "self.owner[slot] = sequence"),
    # what travels to the executor
    _fault("token not remembered", "The next decode row computes a token that is not the one sampled last.",
           "twinfer.engine.rows:RowBuilder.read_tokens", "self._last_token[slots[latest]] = tokens[latest]", "pass"),
    _fault("changes of a refused plan forgotten", "Page table entries that travelled with a refused plan never reach the executor.",
           "twinfer.engine.tables:TableWriter.delta", "return TableDelta(self._delivered, slots",
           "self._entries.clear(); self._lengths.clear(); return TableDelta(self._delivered, slots"),
    _fault("first change of a place wins", "A page table entry that changed twice between steps arrives with its old value.",
           "twinfer.engine.tables:_last_of", "place[::-1], return_index=True", "place, return_index=True"),
    _fault("written one place late", "Each key goes to the slot behind its own.",
           "twinfer.engine.flatten:flatten_tokens", "np.divmod(place, page_size)", "np.divmod(place + 1, page_size)"),
    _fault("position local to the chunk", "A later chunk is computed and written as if it began at position 0.",
           "twinfer.engine.flatten:flatten_tokens", "np.repeat(start - row_indptr[:-1], plan.length)", "np.repeat(-row_indptr[:-1], plan.length)",
           "Wenyueh/MinivLLM/pull/98"),
    _fault("page list of the wrong slot", "Rows read each other's page lists.", "twinfer.engine.flatten:list_pages",
           "map(table.page_lists.__getitem__, slots)", "map(table.page_lists.__getitem__, slots[::-1])"),
    _fault("next page listed", "At the end of a page the list holds the next one, which is not begun.",
           "twinfer.engine.flatten:list_pages", "num_pages = -(-flat.context // page_size)", "num_pages = flat.context // page_size + 1",
           "pegainfer-project/pegainfer/issues/291"),
    # failures and ends
    _fault("failed step commits", "The rows of a step that failed go on as if they had been computed.",
           _ENGINE + "_finish", "self._fail(plan, range(plan.num_rows), str(error))", "pass", "pegainfer-project/pegainfer/pull/333"),
    _fault("abort keeps pages", "An aborted request goes on, with its pages.",
           "twinfer.engine.live:LiveRequests.abort", "self.scheduler.drop([s.sequence for s in streams])", "pass", "pegainfer-project/pegainfer/issues/215"),
    _fault("no terminal event", "A request ends and its client waits for ever.",
           _ENGINE + "_end", "terminal = not live.open", "terminal = False", "sgl-project/sglang-jax/pull/984"),
    _fault("healthy without an executor", "The executor is gone, every request fails, and health stays true.",
           _ENGINE + "healthy", "self.lost is None", "True", "vllm-project/vllm/issues/11996", ("containment",)),
    _fault("requests of a lost executor wait", "The executor is gone and nobody tells those who wait for it.",
           _ENGINE + "_lose", "for stream in streams:", "for stream in []:", "m87-labs/kestrel/pull/98", ("containment",)),
    _fault("one bad row fails its step", "Logits that are no numbers in one row end the others with it.",
           _ENGINE + "_take", "self._fail(plan, errors, errors)",
           "errors = errors and dict.fromkeys(range(plan.num_rows), 'failed'); self._fail(plan, errors, errors)",
           red=("containment",)),
    _fault("output of another step accepted", "Plan and output no longer go together, and tokens go to whoever has the row now.",
           _ENGINE + "_finish", "if output.step != plan.step:", "if False:", red=("containment",)),
)  # fmt: skip
