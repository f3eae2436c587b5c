"""Faults of executors: how a plan reaches the device, what a graph pads, which step's arrays are read, how kernels are asked."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault, Switch
from twinfer.invariants.faults.switch import edited, replaced

_GITHUB = "https://github.com/"
_INPUTS, _MODEL = "twinfer.fast.inputs:StepInputs.", "twinfer.fast.model:Model."
_ALONE, _BESIDE = ("fast alone",), ("fast beside",)


def _fault(name: str, what: str, switch: Switch, red: tuple[str, ...] = _ALONE, link: str = "") -> Fault:
    return Fault(name, what, "executor", red, switch, _GITHUB + link if link else "")


_LAUNCH = "    launch(x, weight, out, bias, tile_for("
_BY_STEP = (
    """    if len(x) > 16:
        half, rest = x.shape[1] // 2, torch.empty_like(out)
        for part, into, add in ((slice(half), out, bias), (slice(half, None), rest, None)):
            tile = tile_for(_capability(x.device), x.dtype, len(x), len(weight), half)
            launch(x[:, part].contiguous(), weight[:, part].contiguous(), into, add, tile)
        out += rest
        return
"""
    + _LAUNCH
)

FAULTS: tuple[Fault, ...] = (
    _fault("one staging set under look-ahead", "The host fills the set that the step in flight still reads.",
           edited("twinfer.fast.executor:FastExecutor.__init__", "some.device, limits.look_ahead + 1)", "some.device, 1)"), ("sets in flight",),
           "noonghunna/club-3090/pull/1051"),
    _fault("one staging set in the ghost", "The same without a device: a step reads what was staged for the next.",
           edited("twinfer.engine.ghost:GhostExecutor.__init__", "range(limits.look_ahead + 1)", "range(1)"), ("machine",)),
    _fault("padding written to the pool", "Padding tokens have slot -1, which as an index is somebody's last slot.",
           edited("twinfer.engine.flatten:pad_tokens", "[flat.num_tokens :] = 0", "[flat.num_tokens :] = -(name == \"write_slots\")"), ("staging",),
           "vllm-project/vllm/pull/45005"),
    _fault("padding written over the last token", "Padding tokens repeat the slot of the step's last token.",
           edited("twinfer.engine.flatten:pad_tokens", "[flat.num_tokens :] = 0", "[flat.num_tokens :] = getattr(staging, name)[flat.num_tokens - 1]"),
           ("padding page", "staging"), "vllm-project/vllm/pull/13922"),
    _fault("padding draws for row 0", "A padding row of a graph draws a token for the first row, and feeds it back.",
           edited(_INPUTS + "_stage_samples", "= PADDING_ROW", "= 0"), _BESIDE, "lightseekorg/tokenspeed/pull/700"),
    _fault("tasks of the step before", "A task list keeps its number of tasks where a step lists none.",
           edited(_INPUTS + "stage", "self._task_counts(host)[:] = 0", "pass"), ("staging",)),
    _fault("two kinds of rows forget each other", "Short and long rows that spread share a list, and each reckons with all of it.",
           replaced("twinfer.fast.inputs:count_tasks", lambda count: lambda *arguments: (0, 0)), ("staging",)),
    _fault("stale page table", "A change of one entry never reaches the device, so a row goes on in an old page.",
           edited(_INPUTS + "_send_changes", "if count:", "if count > 1:"), _BESIDE, "vllm-project/vllm/issues/39589"),
    _fault("page table by row", "A row reads the page list of the batch slot that has its own number.",
           edited(_INPUTS + "stage", "host[\"row_slot\"][:num_rows] = plan.slot", "host[\"row_slot\"][:num_rows] = range(num_rows)"), _BESIDE,
           "vllm-project/vllm/issues/41190"),
    _fault("feed read one step late", "A token that only the device has is taken from the step before the last.",
           edited(_MODEL + "forward", "    embedding(b[\"token_ids\"][:num_tokens], b[\"token_feed\"], w.embedding, residual)",
                  "    late = self.__dict__.setdefault(\"late\", b[\"token_feed\"].clone())\n"
                  "    embedding(b[\"token_ids\"][:num_tokens], late, w.embedding, residual)\n"
                  "    late.copy_(b[\"token_feed\"])"), _ALONE, "vllm-project/vllm/issues/41190"),
    _fault("reference forgets its own tokens", "The reference executor does not keep what it sampled for rows planned ahead.",
           edited("twinfer.reference.executor:ReferenceExecutor._compute", "feed[plan.slot[drawn]] = ", "_ = ")),
    _fault("sampled from the first token", "The logits of a row are those of its first token in the step.",
           edited(_INPUTS + "_stage_samples", "flat.row_indptr[1:][rows] - back", "flat.row_indptr[:-1][rows]")),
    _fault("wrong scale", "Attention is three percent too sharp on the fast engine.",
           edited("twinfer.fast.attention:Attention._attend", "self.config.head_dim**-0.5", "1.03 * self.config.head_dim**-0.5")),
    _fault("residual forgotten", "The MLP's result replaces the residual stream of the last layer instead of joining it.",
           edited(_MODEL + "forward", "        following = ", "        residual *= i + 1 < len(w.layers)\n        following = ")),
    _fault("scores of the row before", "Prompt log probabilities are read at the end of a row instead of at its beginning.",
           edited("twinfer.fast.sampling:Sampling._score", "staged.flat.row_indptr[:-1][rows] + into", "staged.flat.row_indptr[1:][rows] - 1 - into"),
           ("fast scores",)),
    _fault("alternatives of another width", "The alternatives of a position are read as if every step asked for as many.",
           edited("twinfer.fast.sampling:Sampling.output", ".reshape(-1)[: count * num_top].reshape(count, num_top)", "[:count, :num_top]"), ("fast scores",)),
    _fault("products split by the size of the step", "A sum over K is cut in two where a step has more than 16 tokens, so bits depend on the batch.",
           edited("twinfer.kernels.matmul.kernel:matmul", _LAUNCH, _BY_STEP), ("law 2",), "vllm-project/vllm/pull/49827"),
)  # fmt: skip
