"""Faults of drawing: in the reference's sampler, and in the Triton kernels that must agree with it."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_PLAIN, _TRITON = "twinfer.reference.sampler:", "twinfer.kernels.sampling.kernel:"
_WORDS = "words = uniform_words(sampling.seed[rows[drawn]], sampling.sample[rows[drawn]], positions[drawn], purpose,"


def _plain(name: str, what: str, function: str, old: str, new: str, red: str, link: str = "") -> Fault:
    return Fault(name, what, "sampling", (red,), edited(_PLAIN + function, old, new), _GITHUB + link if link else "")


def _triton(name: str, what: str, function: str, old: str, new: str, link: str = "", red: tuple[str, ...] = ("Triton sampler",)) -> Fault:
    return Fault(name, what, "sampling", red, edited(_TRITON + function, old, new), _GITHUB + link if link else "")


def _noise(name: str, what: str, argument: str, constant: str, red: str) -> Fault:
    return _plain(name, what, "sample", _WORDS, _WORDS.replace(argument, constant), red)


FAULTS: tuple[Fault, ...] = (
    _noise("seed ignored", "Every request draws the same noise.", "sampling.seed[rows[drawn]]", "np.zeros_like(sampling.seed[rows[drawn]])", "seed"),
    _noise("high seed word ignored", "Seeds that differ by a multiple of 2^32 draw the same text.",
           "sampling.seed[rows[drawn]]", "sampling.seed[rows[drawn]] & np.uint64(2**32 - 1)", "high seed word"),
    _noise("position ignored", "Every position of a text draws the same noise.", "positions[drawn]", "np.zeros_like(positions[drawn])", "position"),
    _noise("sample index ignored", "All samples of a request are one text.",
           "sampling.sample[rows[drawn]]", "np.zeros_like(sampling.sample[rows[drawn]])", "sample index"),
    _noise("purpose ignored", "Draft tokens are accepted by the noise that drew them.", "purpose,", "Purpose.DRAW,", "purpose"),
    _plain("words dealt to other tokens", "Each token gets another one's noise.", "sample", "gumbel_noise(words)", "gumbel_noise(words.flip(1))", "plain draw"),
    _plain("top-p keeps one too many", "A token is kept though those before it have p together.",
           "kept_tokens", "(before < top_p)", "(before <= top_p)", "top-p edge"),
    _plain("top-p keeps one too few", "The token that reaches p is dropped.",
           "kept_tokens", "(before < top_p)", "(before + probability <= top_p)", "top-p edge"),
    _plain("top-k keeps every tie", "More than k tokens pass where some have equal scores.",
           "kept_tokens", "ranked = ranked[:top_k]", "ranked = ranked[ranked >= ranked[top_k - 1]]", "top-k tie"),
    _plain("penalties count the prompt", "Presence and frequency count what only the prompt holds.",
           "penalise", "seen - frequency * count - presence * (count > 0)", "seen - frequency * (count + 1) - presence", "output penalties",
           "vllm-project/vllm-metal/pull/69"),
    _plain("ties go to the highest id", "Greedy text depends on which way ties are broken.", "first_argmax", "[0])", "[-1])", "greedy tie"),
    _plain("logit bias dropped", "A bias, and a ban, is accepted and ignored.",
           "apply_bias", "scores.index_add(0, ids, values)", "scores", "ban", "pegainfer-project/pegainfer/issues/237"),
    _plain("reference takes NaN for a number", "Logits that are no numbers bring their step down instead of ending their row.",
           "not_finite", "scores.isnan() | (scores == torch.inf)", "scores == torch.inf", "not a number"),
    _triton("tie broken by path", "Of equal scores the last one wins where a program walks several blocks, the first one elsewhere.",
            "stats_kernel", "better = s > best", "better = s >= best"),
    _triton("kernel takes NaN for a number", "A row whose logits are no numbers gets a token instead of an error.",
            "stats_kernel", "bad = (x != x) | (x == float(\"inf\"))", "bad = x == float(\"inf\")", "vllm-project/vllm/issues/1623",
            ("Triton sampler", "not a number")),
    _triton("kernel drops the high seed word", "The two engines draw other tokens for seeds of 2^32 and more.",
            "words_of", "(seed >> 32).to(tl.uint32)", "(seed >> 63).to(tl.uint32)"),
    _triton("kernel penalises once", "A token that came often is penalised as if it had come once.",
            "penalty_kernel", "frequency * count.to(tl.float64)", "frequency * (count > 0).to(tl.float64)"),
)  # fmt: skip
