"""Faults of laws: rules of a plan that are judged wrongly."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_LAWS = "twinfer.invariants.laws:"
_BREAKERS = ("breakers",)


def _fault(name: str, what: str, function: str, old: str, new: str, red: tuple[str, ...] = _BREAKERS, link: str = "") -> Fault:
    return Fault(name, what, "law", red, edited(_LAWS + function, old, new), link)


FAULTS: tuple[Fault, ...] = (
    _fault("law: the padding page may be written", "A row may write page 0, which padding writes too.",
           "_written_holds", "view.least_page >= 1", "view.least_page >= 0"),
    _fault("law: sealed pages may be written", "A page that others find by its content may change.", "_frozen", " | view.pages.sealed[view.written]", ""),
    _fault("law: shared pages may be written", "A page that others read may change.", "_frozen", "(view.pages.references[view.written] != 1) | ", ""),
    _fault("law: rows may write one page", "Two rows may write the same page in one step.",
           "_distinct_holds", "pages[1:] == pages[:-1]", "pages[1:] < pages[:-1]"),
    _fault("law: rows may share a slot", "Two rows may be in one batch slot.", "_slots_hold", "<= 1)", "<= 2)"),
    _fault("law: an empty row is a row", "A row may have no token, so nothing to sample from.", "_length_holds", ">= 1", ">= 0"),
    _fault("law: a row may begin before 0", "A start of -1 indexes from the end.", "_start_holds", ">= 0", ">= -1"),
    _fault("law: tokens need not add up", "A step may have more tokens than its rows.", "_sum_holds", "==", "<="),
    _fault("law: any version of the table", "A plan may follow a page table that it was not made for.", "_version_holds", "==", ">="),
    _fault("law: a page may be missing", "The last page of a row need not be in the table.", "_uncovered", "< view.row_pages", "< view.row_pages - 1",
           link="https://github.com/vllm-project/vllm/issues/39589"),
    _fault("law: any negative token", "A token of another slot's may be taken from the device.", "_outside_vocab", "(ids < 0) | ", "", ("judge",)),
    _fault("law: one token beyond the vocabulary", "The id that is the vocabulary's size reads past the embedding.",
           "_tokens_hold", "< view.vocab_size", "<= view.vocab_size",
           link="https://github.com/sgl-project/sglang/pull/31908"),
    _fault("law: a delta may name a place twice", "Which of two pages a place gets is left to chance.",
           "_delta_holds", ".tolist())) < slot.size", ".tolist())) < 1"),
    _fault("law: more samples than tokens", "A row may sample where it has no token.", "_samples_fault", "> view.plan.length", "> view.plan.length + 1"),
    _fault("law: a target beyond the vocabulary", "The log probability of a token that does not exist is read.",
           "_scored_rows", "_outside_vocab(plan.targets, view)", "plan.targets < 0"),
    _fault("law: a position beyond its context", "A position may lie past the end of the rope table.", "_position_rows", ">= np.repeat", "> np.repeat"),
    _fault("law: a mask of any width", "A mask as wide as the tokenizer's vocabulary is read past its end.", "_width_holds", "==", "<="),
    _fault("law: more seen than context", "Seen tokens may be more than the row's context, so their sum is not bounded by the contexts'.",
           "_seen_rows", "counts > view.context", "counts > view.limits.max_context"),
    _fault("law: padding page may be listed", "A row may read page 0.", "_outside", "pages < 1", "pages < 0"),
    _fault("law: a written page may be listed twice", "A row may write what another one reads.",
           "_private_rows", "counts > 1", "counts > 2", ("breakers", "judge")),
    _fault("law: an id may come twice", "A bias is added twice, or once, as kernels happen to run.",
           "_id_rows", "_repeats(owner * 2**31 + ids)", "np.zeros(len(ids), np.bool_)"),
    _fault("law: a mask may allow nothing", "A row may have no token to sample: NaN, not an answer.",
           "_mask_rows", "~mask.any(axis=1)", "mask.all(axis=1) & ~mask.any(axis=1)",
           link="https://github.com/sgl-project/sglang/issues/27618"),
    _fault("law: a column of any dtype", "int64 where a kernel reads int32 gives every second entry.",
           "columns_fault", "if column.dtype != dtype:\n                return f\"{prefix}", "if False:\n                return f\"{prefix}"),
)  # fmt: skip
