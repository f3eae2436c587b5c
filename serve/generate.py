"""`twinfer generate`: one prompt in, text out. Text goes to stdout as it comes, everything else to stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.request import Event, FinishReason
from twinfer.serve import options as o
from twinfer.serve.backend import Backend, choose, described, open_engine, prepare
from twinfer.serve.failure import FAILED, INTERRUPTED, BadInput, one_line, say
from twinfer.serve.model import DEFAULT, find, has_tokenizer
from twinfer.serve.parameters import choose_params
from twinfer.serve.progress import Bar
from twinfer.serve.prompt import NO_TOKENIZER, Prompt, read_any, shown_ids

if TYPE_CHECKING:
    from twinfer.engine.tokenizer import Tokenizer
    from twinfer.serve.stream import Run, Sample


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.", show_default=False)
    ] = None,
    model: o.ModelOption = DEFAULT,
    file: o.FileOption = None,
    prompt_ids: o.PromptIdsOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template, as a user's message.")] = False,
    system: o.SystemOption = None,
    random_weights: o.RandomWeightsOption = None,
    backend: o.BackendOption = Backend.AUTO,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    max_tokens: o.MaxTokensOption = None,
    temperature: o.TemperatureOption = None,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    min_p: o.MinPOption = None,
    seed: o.SeedOption = None,
    n: o.SamplesOption = None,
    stop: o.StopOption = None,
    stop_token_id: o.StopTokenOption = None,
    min_tokens: o.MinTokensOption = None,
    ignore_eos: o.IgnoreEosOption = False,
    repetition_penalty: o.RepetitionOption = None,
    presence_penalty: o.PresenceOption = None,
    frequency_penalty: o.FrequencyOption = None,
    checkpoint_defaults: o.DefaultsOption = True,
    max_context: o.MaxContextOption = None,
    max_batch: o.MaxBatchOption = None,
    max_step_tokens: o.MaxStepTokensOption = None,
    max_chunk_tokens: o.MaxChunkTokensOption = None,
    page_size: o.PageSizeOption = None,
    num_pages: o.NumPagesOption = None,
    memory: o.MemoryOption = None,
    logprobs: o.LogprobsOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Continue a prompt. The text streams to standard output, statistics go to
    stderr.

    Without a model the bundled one writes (a small one, trained on
    Shakespeare). Without a prompt, standard input is read if it is a pipe or a
    file, else a default prompt is used. Ctrl-C aborts the request and exits
    with 130.

    --random-weights runs any config.json with made-up weights. Where there is
    no tokenizer, prompt and output are token ids.

    Examples:

      $ twinfer generate "ROMEO."
      $ twinfer generate "To be, or" --temperature 0 --max-tokens 24
      $ twinfer generate --file prompt.txt --seed 7 --stop "." --stop "!"
      $ echo "Who art thou?" | twinfer generate --chat
      $ twinfer generate "JULIET." --n 3 --json --quiet
      $ twinfer generate --model ./tiny/config.json --random-weights 1
    """
    place = find(model, random_seed=random_weights)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "n": n,
        "stop": tuple(stop) if stop else None,
        "stop_token_ids": tuple(stop_token_id) if stop_token_id else None,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos or None,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
    }
    chosen = choose_params(place, given, checkpoint_defaults)
    limits = o.given_limits(
        max_context=max_context,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=max_chunk_tokens,
        page_size=page_size,
        num_pages=num_pages,
    )
    memory_bytes = o.given_memory(memory)
    dtype = None if dtype is None else dtype_name(dtype)
    asked = read_any(prompt, file, prompt_ids, place, random_weights)
    as_chat = chat or system is not None
    if as_chat and asked.ids is not None:
        what = f"prompt_ids = {prompt_ids!r}: a chat template takes text" if prompt_ids is not None else f"chat: {NO_TOKENIZER}"
        raise BadInput(what)
    choice = choose(backend, device, ModelConfig.from_file(place.path), dtype)
    for warning in chosen.warnings:
        say(f"warning: {warning}")

    from twinfer.serve.stream import run, with_room

    prepared = prepare(
        place, choice, limits=limits, dtype=dtype, memory_bytes=memory_bytes, random_seed=random_weights,
        tokenizer=asked.ids is None or has_tokenizer(place),
    )  # fmt: skip
    ids = _encoded(asked, prepared.tokenizer, as_chat, system)
    # A number that nobody gave must not refuse a long prompt.
    params = chosen.params if max_tokens is not None else with_room(chosen.params, prepared.admission.room(len(ids)))
    prepared.admission.request(ids, params)  # refused before any weight is read
    with open_engine(prepared, choice, threads=threads) as engine:
        if not quiet:
            say(f"{described(place, choice, engine)}; {chosen.line}")
        streams = params.n == 1 and not as_json
        if streams:
            result = run(engine, ids, params, _Typewriter(engine.tokenizer is not None))
        else:
            with Bar("tokens", params.n * (params.max_tokens or engine.limits.max_context)) as bar:
                result = run(engine, ids, params, _Counter(bar))
        _print_samples(result, engine.tokenizer, asked, streams, as_json)
    if not quiet:
        say(result.statistics())
    if result.error is not None:
        say(f"error: {one_line(result.error)}")
        raise typer.Exit(FAILED)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _encoded(asked: Prompt, tokenizer: Tokenizer | None, as_chat: bool, system: str | None) -> list[int]:
    """The prompt's token ids."""
    if asked.ids is not None:
        return list(asked.ids)
    assert tokenizer is not None, "a text was read, so the engine has a tokenizer"
    assert asked.text is not None, "a prompt is text or ids"
    if as_chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return tokenizer.apply_chat_template([*messages, {"role": "user", "content": asked.text}])
    return tokenizer.encode(asked.text)


class _Typewriter:
    """Writes the text of one sample as it comes, or its token ids where there is no tokenizer, and a newline at the end."""

    def __init__(self, as_text: bool) -> None:
        self._as_text, self._last = as_text, ""

    def __call__(self, event: Event) -> None:
        text = event.text
        if not self._as_text and event.tokens:
            text = ("," if self._last else "") + shown_ids(event.tokens)
        if text:
            sys.stdout.write(text)
            self._last = text[-1]
        if event.terminal and self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()


class _Counter:
    """Counts the tokens of results that are printed at the end, for a bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._count = bar, 0

    def __call__(self, event: Event) -> None:
        self._count += len(event.tokens)
        self._bar(self._count)


def _print_samples(result: Run, tokenizer: Tokenizer | None, prompt: Prompt, streamed: bool, as_json: bool) -> None:
    """What has not been streamed: JSON lines, several samples, log probabilities."""
    for index, sample in enumerate(result.samples):
        if as_json:
            print(json.dumps(_record(result, sample, index, prompt, tokenizer), ensure_ascii=False))
            continue
        if not streamed:
            print(f"--- sample {index + 1} of {len(result.samples)} ({sample.finish})")
            text = sample.text if tokenizer is not None else shown_ids(sample.tokens)
            print(text, end="" if text.endswith("\n") else "\n")
        if sample.logprobs:
            _print_logprobs(sample, tokenizer)
    sys.stdout.flush()


def _record(result: Run, sample: Sample, index: int, prompt: Prompt, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from twinfer.serve.stream import logprob_record

    record: dict[str, Any] = {
        "prompt": prompt.text if prompt.ids is None else list(prompt.ids),
        "sample": index,
        "text": sample.text if tokenizer is not None else None,
        "tokens": sample.tokens,
        "finish_reason": str(sample.finish),
        "prompt_tokens": result.num_prompt,
        "cached_tokens": result.num_cached,
    }
    if sample.logprobs:
        record["logprobs"] = [logprob_record(entry, tokenizer) for entry in sample.logprobs]
    if sample.finish is FinishReason.ERROR:
        record["error"] = sample.error
    return record


def _print_logprobs(sample: Sample, tokenizer: Tokenizer | None) -> None:
    """One line a token: its log probability in nat, the token, and the alternatives, best first."""
    from twinfer.serve.stream import token_text

    for entry in sample.logprobs:
        top = "  ".join(f"{token_text(token, tokenizer)!r} {logprob:.4f}" for token, logprob in entry.top)
        print(f"{entry.logprob:9.4f}  {token_text(entry.token, tokenizer)!r:<14}  {top}".rstrip())
