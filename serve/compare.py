"""`twinfer compare`: the engines on the same prompts, side by side. It measures and judges; where tokens and logits come from is sides.py's."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.count import Count
from twinfer.limits import ceil_div
from twinfer.serve import options as o
from twinfer.serve.backend import Backend, Choice, find_device, open_engine, prepare
from twinfer.serve.failure import FAILED, BadInput, say
from twinfer.serve.model import CHOICES, DEFAULT, find, has_tokenizer
from twinfer.serve.prompt import NO_TOKENIZER, parse_ids, random_ids, read_prompt
from twinfer.serve.threads import check_threads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from twinfer.engine.admission import Admission
    from twinfer.engine.pretrained import Prepared
    from twinfer.engine.tokenizer import Tokenizer
    from twinfer.serve.sides import Side

# Two right implementations in fp32 differ by about 3e-5 nat, the weakest fault that was injected shows 3e-2. In bf16 the noise of right
# implementations overlaps real faults, so no limit on it could tell them apart.
TOLERANCE = 1e-3
JUDGED = ("float64", "float32")

PROMPTS = (
    "ROMEO.\nBut, soft! what light through yonder window breaks?\n",
    "The quick brown fox jumps over the lazy dog. 0123456789 (a + b) * c != d; \u00e9\u00fc\u4f60\u597d\n",
    "to and fro " * 40,
)


# Lengths of the prompts of a model without a tokenizer, whose ids are random: one token, less than a page, more than two.
RANDOM_PROMPTS = (1, 20, 150)


@dataclass(frozen=True, slots=True)
class Finding:
    """One side against the reference on one prompt. Positions of tokens count from the first generated one; None: no difference, or not measured."""

    side: str
    prompt: int
    num_prompt: int
    num_tokens: int
    differs_at: int | None
    ours: str | None
    theirs: str | None
    margin: float | None  # the reference's logit of its own token less that of the other's, where they first differ
    logit: float | None  # largest difference of a logit, any position, any token
    logprob: float | None  # the same of log probabilities, in nat
    passed: bool | None  # None where no tolerance is stated for the dtype


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Model directory, or a bundled model: {CHOICES}.")] = DEFAULT,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be given again. Default: three built-in ones.")
    ] = None,
    file: o.FileOption = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option("--prompt-ids", metavar="IDS", help="A prompt as token ids, such as 1,2,3; may be given again.")
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="NAME", help="fast or transformers; may be given again. Default: fast on a GPU, transformers if installed."),
    ] = None,
    random_weights: o.RandomWeightsOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens to generate for each prompt, greedily.")] = 32,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="float32 and float64 (fp32, fp64) are judged, bfloat16 and float16 (bf16, fp16) are reported.")
    ] = "float32",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Of twinfer's engines: cpu, cuda or cuda:N; default: the GPU if there is one.")
    ] = None,
    threads: o.ThreadsOption = None,
    max_context: o.MaxContextOption = None,
    page_size: o.PageSizeOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Run every engine on the same prompts and show where they differ.

    The reference is the measure; the others are fast, on a GPU, and
    transformers, where it is installed (eager, on the CPU). Each generates
    greedily; then each computes the logits of the same text, the prompt and the
    reference's tokens, and the largest differences over all its positions and
    the whole vocabulary are shown.

    Exit code 1 in float32 and float64 if a log probability differs by more than
    0.001 nat, or a token where the reference's logits of the two are further
    apart than that.

    Examples:

      $ twinfer compare
      $ twinfer compare qwen3 --dtype bf16 --max-tokens 16
      $ twinfer compare micro --prompt "To be" --json
      $ twinfer compare ./tiny/config.json --random-weights 1 --max-tokens 8
    """
    place = find(model, random_seed=random_weights)
    if max_tokens < 1:
        raise BadInput(f"max_tokens = {max_tokens}: must be an integer of at least 1")
    name = dtype_name(dtype)
    texts = list(prompt or [])
    if file is not None:
        texts.append(read_prompt(None, file, place))
    if "" in texts:
        raise BadInput("prompt = '': must be at least 1 character")
    given = [parse_ids(text) for text in prompt_ids or []]
    by_ids = not has_tokenizer(place) and (bool(given) or random_weights is not None)
    if by_ids and texts:
        raise BadInput(f"prompt = {texts[0]!r}: {NO_TOKENIZER}")
    limits = o.given_limits(max_context=max_context, page_size=page_size)
    where = find_device(device)

    from twinfer.serve.sides import fast_side, opponents, reference_side, transformers_side

    names = opponents(engines or [], ModelConfig.from_file(place.path), where, name)

    def prepared_for(backend: Backend, limits: Mapping[str, int]) -> tuple[Prepared, Choice]:
        choice = Choice(backend, where, "")
        return prepare(place, choice, limits=limits, dtype=name, random_seed=random_weights, tokenizer=not by_ids), choice

    check_threads(threads)
    prepared = [prepared_for(Backend.REFERENCE, limits)]
    admission = prepared[0][0].admission
    prompts = [*given, *_encoded(texts, given, admission, random_weights)]
    if "fast" in names:
        prepared.append(prepared_for(Backend.FAST, _for_one_request(limits, max(map(len, prompts)) + max_tokens)))
    for each, _ in prepared:  # refused before any weight is read
        for ids in prompts:
            each.admission.request(ids, admission.default_params(max_tokens=max_tokens))
    with contextlib.ExitStack() as opened:
        running = [opened.enter_context(open_engine(each, choice, threads=threads)) for each, choice in prepared]
        sides = [side(engine, where) for side, engine in zip((reference_side, fast_side), running, strict=False)]
        if "transformers" in names:
            sides.append(transformers_side(place, name, random_weights))
        if not quiet:
            say(f"{place.name}, {name}: " + " / ".join(f"{side.name} ({side.where})" for side in sides))
        findings = _compare_all(sides, prompts, max_tokens, name in JUDGED, admission.tokenizer)
    if as_json:
        for finding in findings:
            print(json.dumps({**_finite(asdict(finding)), "model": place.name, "dtype": name, "tolerance": TOLERANCE if name in JUDGED else None}))
    else:
        _print_table(findings, name)
    failed = [finding for finding in findings if finding.passed is False]
    if failed:
        say(f"error: {len(failed)} of {Count(len(findings), 'comparison')} over the tolerance of {TOLERANCE} nat in {name}")
        raise typer.Exit(FAILED)


def _encoded(texts: Sequence[str], given: Sequence[object], admission: Admission, random_seed: int | None) -> list[list[int]]:
    """Prompts beside those `given` as ids: the texts, or the built-in ones, or where there is no tokenizer ids from the seed."""
    if admission.tokenizer is not None:
        return [admission.tokenizer.encode(text) for text in (texts or ([] if given else PROMPTS))]
    if given:
        return []
    assert random_seed is not None, "a model with its own weights and no tokenizer was given ids"
    most = max(1, admission.limits.max_context // 2)
    return [random_ids(random_seed + size, min(size, most), admission.model.vocab_size) for size in RANDOM_PROMPTS]


def _for_one_request(limits: Mapping[str, int], length: int) -> dict[str, int]:
    """Limits of an engine that runs one request of at most `length` tokens at a time: few graphs to capture, few pages. What was given stays."""
    size = limits.get("page_size", 16)
    return {"max_batch": 2, "num_pages": 2 * ceil_div(length + 2, size), **limits}


def _compare_all(
    sides: list[Side], prompts: list[list[int]], max_tokens: int, judged: bool, tokenizer: Tokenizer | None
) -> list[Finding]:
    """Every side but the first against the first, on every prompt."""
    reference = sides[0]
    assert reference.logits is not None, "the reference gives logits"
    findings = []
    for index, ids in enumerate(prompts):
        ours = reference.greedy(ids, max_tokens)
        known = [*ids, *ours[:-1]]  # the last token chose nothing
        expected = reference.logits(known)
        for side in sides[1:]:
            theirs = side.greedy(ids, max_tokens)
            found = None if side.logits is None else side.logits(known)
            finding = judge(side.name, index, len(ids), ours, theirs, expected, found, judged)
            findings.append(_with_text(finding, ours, theirs, tokenizer))
    return findings


def judge(
    side: str,
    prompt: int,
    num_prompt: int,
    ours: list[int],
    theirs: list[int],
    expected: NDArray[np.float64],
    found: NDArray[np.float64] | None,
    judged: bool,
) -> Finding:
    """One finding from tokens and logits [T, vocab_size] of prompt and `ours` (but its last token). A NaN, a missing token or another shape never passes."""
    import numpy as np

    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None and len(ours) != len(theirs):
        at = min(len(ours), len(theirs))
    margin = logit = logprob = None
    if at is not None:
        margin = math.inf
        if at < min(len(ours), len(theirs)):
            # Up to here both saw the same tokens, so this row of logits chose both.
            row = expected[num_prompt + at - 1]
            margin = abs(float(row[ours[at]] - row[theirs[at]]))
    if found is not None:
        logit = logprob = math.nan
        if found.shape == expected.shape:
            logit = float(np.abs(found - expected).max())
            logprob = float(np.abs(_log_softmax(found) - _log_softmax(expected)).max())
    passed = None
    if judged:
        passed = (margin is None or margin <= TOLERANCE) and (logprob is None or logprob <= TOLERANCE)
    return Finding(side, prompt, num_prompt, len(ours), at, None, None, margin, logit, logprob, passed)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _with_text(finding: Finding, ours: list[int], theirs: list[int], tokenizer: Tokenizer | None) -> Finding:
    """The finding with the two tokens that differ first, as text or, without a tokenizer, as ids."""
    import dataclasses

    from twinfer.serve.stream import token_text

    at = finding.differs_at
    if at is None:
        return finding
    ours_text = token_text(ours[at], tokenizer) if at < len(ours) else None
    theirs_text = token_text(theirs[at], tokenizer) if at < len(theirs) else None
    return dataclasses.replace(finding, ours=ours_text, theirs=theirs_text)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity as null: JSON has neither."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}


def _print_table(findings: list[Finding], dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    limit = f"{TOLERANCE:g} nat" if dtype in JUDGED else f"none stated for {dtype}"
    table = Table(title=f"against the reference, {dtype} (tolerance: {limit})", title_justify="left")
    table.add_column("engine")
    for column in ("prompt", "tokens", "first differing token", "largest logit diff", "largest logprob diff (nat)", "result"):
        table.add_column(column, justify="left" if column.startswith(("first", "result")) else "right")
    for finding in findings:
        differs = "none"
        if finding.differs_at is not None:
            differs = f"{finding.differs_at}: {finding.ours!r} / {finding.theirs!r}"
            if finding.margin is not None and math.isfinite(finding.margin):
                differs += f", margin {finding.margin:.2g}"
        table.add_row(
            finding.side,
            f"{finding.prompt + 1} ({Count(finding.num_prompt, 'token')})",
            str(finding.num_tokens),
            differs,
            "-" if finding.logit is None else f"{finding.logit:.2e}",
            "-" if finding.logprob is None else f"{finding.logprob:.2e}",
            {True: "passed", False: "FAILED", None: "-"}[finding.passed],
        )
    # A pipe has no width; a table cut to 80 columns would lose the figures.
    Console(width=None if Console().is_terminal else 140, markup=False, highlight=False).print(table)
