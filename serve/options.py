"""The options that several commands share: names, types and help texts, stated once. Values are checked by whoever uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinfer.errors import LimitError
from twinfer.serve.backend import Backend
from twinfer.serve.model import CHOICES
from twinfer.serve.threads import SMALL_MODEL

_ENGINE, _SAMPLING, _LIMITS, _OUTPUT = "Engine", "Sampling", "Limits", "Output"

# ---- model and engine ----------------------------------------------------------------------------------------------------------

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="DIR", help=f"Model directory in Hugging Face format, or a bundled model: {CHOICES}.", rich_help_panel=_ENGINE
    ),
]
BackendOption = Annotated[
    Backend, typer.Option("--backend", help="Engine: auto takes fast on a GPU, else reference.", rich_help_panel=_ENGINE)
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float64, float32, bfloat16, float16 (fp64, fp32, bf16, fp16); default: the checkpoint's.",
        rich_help_panel=_ENGINE,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; default: the GPU if there is one.", rich_help_panel=_ENGINE)
]

ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help=f"CPU threads of torch; default: 1 below {SMALL_MODEL // 10**6} M parameters, where more of them wait, else torch's own number.",
        rich_help_panel=_ENGINE,
    ),
]

RandomWeightsOption = Annotated[
    int | None,
    typer.Option(
        "--random-weights",
        metavar="SEED",
        help="Made-up weights of the model's shapes instead of its own: any config.json, or a directory with one, will do.",
        rich_help_panel=_ENGINE,
    ),
]

# ---- prompt --------------------------------------------------------------------------------------------------------------------

FileOption = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a UTF-8 file; - is standard input.")]
PromptIdsOption = Annotated[
    str | None, typer.Option("--prompt-ids", metavar="IDS", help="The prompt as token ids, such as 1,2,3; what a model without a tokenizer needs.")
]
SystemOption = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message that opens the conversation.")]

# ---- sampling ------------------------------------------------------------------------------------------------------------------

MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Tokens to generate at most; default: the checkpoint's, else 256.", rich_help_panel=_SAMPLING),
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", "-t", metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopKOption = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Keep the K best tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Keep the best tokens whose probabilities reach P; 1 keeps all.", rich_help_panel=_SAMPLING),
]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Drop tokens below P times the best probability.", rich_help_panel=_SAMPLING)
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Other noise. Without it the same command gives the same text every time.", rich_help_panel=_SAMPLING),
]
SamplesOption = Annotated[
    int | None, typer.Option("--n", "-n", metavar="N", help="Samples of the same prompt, printed when all are done.", rich_help_panel=_SAMPLING)
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends the output and is cut from it; may be given again.", rich_help_panel=_SAMPLING),
]
StopTokenOption = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", metavar="ID", help="Token id that ends the output; may be given again.", rich_help_panel=_SAMPLING),
]
MinTokensOption = Annotated[
    int | None, typer.Option("--min-tokens", metavar="N", help="Before so many tokens nothing ends the output.", rich_help_panel=_SAMPLING)
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end tokens.", rich_help_panel=_SAMPLING)]
RepetitionOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", help="Divides the logits of tokens seen in prompt or output; 1 is off.", rich_help_panel=_SAMPLING
    ),
]
PresenceOption = Annotated[
    float | None,
    typer.Option("--presence-penalty", metavar="X", help="Subtracted once from the logits of tokens in the output.", rich_help_panel=_SAMPLING),
]
FrequencyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="Subtracted once for each occurrence in the output.", rich_help_panel=_SAMPLING),
]
DefaultsOption = Annotated[
    bool,
    typer.Option(
        "--checkpoint-defaults/--no-checkpoint-defaults",
        help="Sampling defaults and end tokens from the model's generation_config.json (they are printed), or plain sampling.",
        rich_help_panel=_SAMPLING,
    ),
]

# ---- limits --------------------------------------------------------------------------------------------------------------------

MaxContextOption = Annotated[
    int | None, typer.Option("--max-context", metavar="N", help="Tokens of one request, prompt and output together.", rich_help_panel=_LIMITS)
]
MaxBatchOption = Annotated[
    int | None, typer.Option("--max-batch", metavar="N", help="Requests (samples) that run at once: rows of a step.", rich_help_panel=_LIMITS)
]
MaxStepTokensOption = Annotated[
    int | None, typer.Option("--max-step-tokens", metavar="N", help="Tokens of a step, over all its rows.", rich_help_panel=_LIMITS)
]
MaxChunkTokensOption = Annotated[
    int | None,
    typer.Option("--max-chunk-tokens", metavar="N", help="Tokens of one row of a step: the chunk of a long prompt.", rich_help_panel=_LIMITS),
]
MaxStepContextOption = Annotated[
    int | None,
    typer.Option("--max-step-context", metavar="N", help="Sum of the contexts of a step's rows, shared pages once a row.", rich_help_panel=_LIMITS),
]
MaxLogitTokensOption = Annotated[
    int | None, typer.Option("--max-logit-tokens", metavar="N", help="Tokens whose logits exist at once.", rich_help_panel=_LIMITS)
]
PageSizeOption = Annotated[int | None, typer.Option("--page-size", metavar="N", help="Tokens of a page of the KV cache.", rich_help_panel=_LIMITS)]
NumPagesOption = Annotated[
    int | None, typer.Option("--num-pages", metavar="N", help="Pages of the pool; default: what the memory leaves.", rich_help_panel=_LIMITS)
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory for everything, such as 8GiB: weights, buffers and pages.", rich_help_panel=_LIMITS),
]

# ---- output --------------------------------------------------------------------------------------------------------------------

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output instead of text.", rich_help_panel=_OUTPUT)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No statistics on stderr; errors and warnings remain.", rich_help_panel=_OUTPUT)]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs", metavar="K", help="Log probability of each token and of K alternatives, listed after the text.", rich_help_panel=_OUTPUT
    ),
]


def given_limits(**values: int | None) -> dict[str, int]:
    """The fields of Limits that the command line names."""
    return {name: value for name, value in values.items() if value is not None}


def given_memory(memory: str | None) -> int | None:
    """--memory in bytes, None where it is not given. Raises LimitError for what is no size."""
    if memory is None:
        return None
    from twinfer.invariants.size import parse_bytes

    try:
        return parse_bytes(memory)
    except LimitError as error:
        what = str(error).removeprefix(repr(memory)).strip().removeprefix("is ")
        raise LimitError(f"memory = {memory!r}: {what}") from None
