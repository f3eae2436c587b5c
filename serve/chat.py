"""`twinfer chat`: a conversation in the model's own chat template. Replies go to stdout; the history is kept whole or refused, never cut."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.count import Count
from twinfer.errors import RequestRefused
from twinfer.request import Event, FinishReason
from twinfer.sampling import SamplingParams
from twinfer.serve import options as o
from twinfer.serve.backend import Backend, choose, described, open_engine, prepare
from twinfer.serve.failure import FAILED, INTERRUPTED, BadInput, one_line, say
from twinfer.serve.model import DEFAULT, find, has_tokenizer
from twinfer.serve.parameters import choose_params

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine
    from twinfer.engine.pretrained import Prepared
    from twinfer.serve.stream import Run

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops a reply; //text sends a line that begins with a slash"


def chat(
    model: o.ModelOption = DEFAULT,
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
    stop: o.StopOption = None,
    repetition_penalty: o.RepetitionOption = None,
    presence_penalty: o.PresenceOption = None,
    frequency_penalty: o.FrequencyOption = None,
    checkpoint_defaults: o.DefaultsOption = True,
    max_context: o.MaxContextOption = None,
    page_size: o.PageSizeOption = None,
    num_pages: o.NumPagesOption = None,
    memory: o.MemoryOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Talk to a model, turn by turn. Each line is a message; replies stream to
    standard output.

    In a conversation: /reset forgets it, /exit or Ctrl-D ends it, Ctrl-C stops
    a reply. Lines can also be piped in, one a turn. A conversation that no
    longer fits into the context is refused with a message; nothing is cut from
    it in silence.

    Examples:

      $ twinfer chat
      $ twinfer chat --system "You are a player upon the stage."
      $ printf 'Who art thou?\\nWhither goest thou?\\n' | twinfer chat
    """
    place = find(model, random_seed=random_weights)
    if random_weights is not None and not has_tokenizer(place):
        raise BadInput(f"model = {model!r}: has no tokenizer.json, and a conversation is text; use `twinfer generate` with --prompt-ids")
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    chosen = choose_params(place, given, checkpoint_defaults)
    limits = o.given_limits(max_context=max_context, page_size=page_size, num_pages=num_pages)
    memory_bytes = o.given_memory(memory)
    dtype = None if dtype is None else dtype_name(dtype)
    choice = choose(backend, device, ModelConfig.from_file(place.path), dtype)
    for warning in chosen.warnings:
        say(f"warning: {warning}")
    prepared = prepare(place, choice, limits=limits, dtype=dtype, memory_bytes=memory_bytes, random_seed=random_weights)
    check_opening(prepared, chosen.params, system)
    with open_engine(prepared, choice, threads=threads) as engine:
        if not quiet:
            say(f"{described(place, choice, engine)}; {chosen.line}")
            say(f"context {Count(engine.limits.max_context, 'token')}; {HELP}")
        talk = Conversation(engine, chosen.params, system, quiet)
        typed = sys.stdin is not None and sys.stdin.isatty()
        try:
            for line in _typed_lines() if typed else _piped_lines():
                if not talk.take(line) and not typed:
                    raise typer.Exit(INTERRUPTED)  # Ctrl-C on a script stops the script, not one of its turns
                if talk.ended:
                    break
        except KeyboardInterrupt:
            say("")
            raise typer.Exit(INTERRUPTED) from None
    if talk.num_failed and not typed:
        raise typer.Exit(FAILED)


def check_opening(prepared: Prepared, params: SamplingParams, system: str | None) -> None:
    """Raises BadInput or RequestRefused, before any weight is read, where not even an empty first message would get an answer."""
    from twinfer.serve.stream import with_room

    assert prepared.tokenizer is not None, "a conversation is text, so one was read"
    turn = [] if system is None else [{"role": "system", "content": system}]
    ids = prepared.tokenizer.apply_chat_template([*turn, {"role": "user", "content": ""}])
    room = prepared.admission.room(len(ids))
    if room < 1:
        what = "the chat template around an empty message" if system is None else "the system message and an empty one"
        most = prepared.limits.max_context
        raise BadInput(f"system = {Count(len(ids), 'token')} ({what}): must be below max_context = {most}; a larger --max-context may fit")
    prepared.admission.request(ids, with_room(params, room))


@dataclass(slots=True)
class Conversation:
    """The messages so far and the engine that answers them. A turn that gets no answer leaves no trace in the history."""

    engine: Engine
    params: SamplingParams
    system: str | None
    quiet: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    num_failed: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to the system message alone."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def take(self, line: str) -> bool:
        """One line of the user: a command or a message. False when Ctrl-C stopped the reply."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            self._command(text)
        elif text:
            return self._answer(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def _command(self, text: str) -> None:
        if text == "/exit":
            self.ended = True
        elif text == "/reset":
            self.reset()
            say("the conversation starts over")
        elif text == "/help":
            say(HELP)
        else:
            self.num_failed += 1
            say(f"error: command = {text!r}: must be /reset, /exit or /help; {HELP}")

    def _answer(self, text: str) -> bool:
        from twinfer.serve.stream import run, with_room

        assert self.engine.tokenizer is not None, "from_pretrained reads one or raises"
        turn = [*self.messages, {"role": "user", "content": text}]
        most = self.engine.limits.max_context
        try:
            ids = self.engine.tokenizer.apply_chat_template(turn)
            if len(ids) >= most:
                raise BadInput(
                    f"conversation = {Count(len(ids), 'token')} with this message: must be below max_context = {most}; nothing was cut, the message is not "
                    "in it; /reset starts over, a shorter message or a larger --max-context may fit"
                )
            result = run(self.engine, ids, with_room(self.params, self.engine.room(len(ids))), _write)
        except (RequestRefused, BadInput) as error:
            self.num_failed += 1
            say(f"error: {one_line(str(error))}")
            return True
        reply = result.samples[0]
        sys.stdout.write("\n")
        sys.stdout.flush()
        if result.error is not None:
            self.num_failed += 1
            say(f"error: {one_line(result.error)}")
            return True
        if reply.tokens:
            # A stopped reply stays as far as it was seen: what the user read is what the model will read.
            self.messages = [*turn, {"role": "assistant", "content": reply.text}]
        self._remark(result, len(ids) + len(reply.tokens) >= most)
        return not result.interrupted

    def _remark(self, result: Run, full: bool) -> None:
        reply = result.samples[0]
        if result.interrupted:
            say("the reply was stopped here by Ctrl-C")
        elif reply.finish is FinishReason.LENGTH and full:
            say(f"the reply was stopped at the end of the context (max_context = {self.engine.limits.max_context}); /reset starts over")
        elif reply.finish is FinishReason.LENGTH:
            say(f"the reply was stopped at max_tokens = {self.params.max_tokens} (--max-tokens)")
        if not self.quiet:
            say(f"({result.statistics()})")


def _write(event: Event) -> None:
    sys.stdout.write(event.text)
    sys.stdout.flush()


def _typed_lines() -> Iterator[str]:
    """Lines from a terminal, with line editing where the platform has it, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (its import is what gives input() its editing)
    while True:
        try:
            yield input("you> ")
        except EOFError:
            return


def _piped_lines() -> Iterator[str]:
    """Lines from a pipe or a file. Raises BadInput for what is not UTF-8."""
    if sys.stdin is None:
        return
    for number, data in enumerate(sys.stdin.buffer, 1):
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"line {number} of standard input: must be UTF-8 text; byte {error.start} of it is not: {error.reason}") from None
