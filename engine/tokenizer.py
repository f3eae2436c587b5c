"""Text to token ids and back, by a checkpoint's own tokenizer.json and chat template, offline. Streaming text is the detokenizer's.

Only byte-level tokenizers (all of Qwen's) are read: there the text of a sequence of ids is the UTF-8 decoding of the tokens' bytes, joined, with
U+FFFD for what is not UTF-8. Streaming rests on that, so another kind of decoder is refused when the tokenizer is loaded, not found out by wrong
text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinfer.errors import CheckpointError, RequestRefused

Message = Mapping[str, Any]


class Tokenizer:
    """A checkpoint's tokenizer.

    directory    where it was read from
    vocab_size   number of tokens, added ones included; a model may have more rows of logits (padding), whose ids have no text
    special_ids  ids that skip_special_tokens leaves out of text
    eos_ids      the tokenizer's own end token, if it names one. Which ids end an output is the generation config's
    """

    def __init__(self, fast: Any, directory: Path) -> None:
        """Takes a loaded transformers fast tokenizer. Raises CheckpointError when its decoder is not byte-level."""
        self.directory = directory
        self._fast, self._backend = fast, fast.backend_tokenizer
        # Settings that a tokenizer.json may carry along; an engine that cuts or pads a prompt would answer another question.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        kind = decoder.get("type")
        if kind != "ByteLevel":
            raise CheckpointError(f"{directory / 'tokenizer.json'}: decoder {kind!r} is not supported; supported: ByteLevel")
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.eos_ids: tuple[int, ...] = () if fast.eos_token_id is None else (int(fast.eos_token_id),)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat template of a checkpoint directory. Raises CheckpointError naming the file."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file}: no such file; text needs a tokenizer.json beside the model; without one, prompts are token ids (--prompt-ids, or "
                "Engine.from_pretrained(..., tokenizer=False))"
            )
        for part in (file, directory / "tokenizer_config.json"):
            _check_json(part)
        from transformers import PreTrainedTokenizerFast

        try:
            # This class runs tokenizer.json as it is written and looks for nothing outside the directory.
            fast = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exception for a file that it can't parse
            raise CheckpointError(f"{file}: the tokenizer can't be built from it ({error})") from None
        return cls(fast, directory)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in it become their ids. With add_special_tokens, also what the tokenizer puts around a text (Qwen's:
        nothing).

        Raises RequestRefused for a text that has no UTF-8 form (half of a surrogate pair).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestRefused("text", text, f"Unicode text; the character at index {error.start} is half of a surrogate pair") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids that stand for no token add nothing; bytes that are not UTF-8 become U+FFFD. Spaces are not cleaned up."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text, special or not; empty for an id that stands for no token."""
        if token not in self._bytes:
            content = self._backend.id_to_token(token)
            self._bytes[token] = b"" if content is None else _content_bytes(content)
        return self._bytes[token]

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **template_options: Any
    ) -> str:
        """The conversation as one text, by the checkpoint's chat template. `template_options` reach the template (enable_thinking, for instance).

        Raises CheckpointError without a template, RequestRefused when the template refuses the messages.
        """
        from jinja2 import TemplateError

        if self._fast.chat_template is None:
            raise CheckpointError(f"{self.directory}: no chat template, neither in tokenizer_config.json nor in chat_template.jinja")
        try:
            text: str = self._fast.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **template_options
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise RequestRefused("messages", list(messages), f"a conversation that the chat template takes; it says: {error}") from None
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **template_options: Any
    ) -> list[int]:
        """Ids of `render_chat`'s text. The template writes all special tokens itself, so none are added."""
        return self.encode(self.render_chat(messages, tools, add_generation_prompt, **template_options))


def _check_json(file: Path) -> None:
    if not file.exists():
        return
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: the top level must be an object, it is {type(data).__name__}")


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a printable character: itself where printable in Latin-1, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _content_bytes(content: str) -> bytes:
    """Bytes of a vocabulary entry. One with a character outside the byte alphabet (an added token with a space) stands for its own UTF-8."""
    if all(character in _BYTE_OF_CHARACTER for character in content):
        return bytes(_BYTE_OF_CHARACTER[character] for character in content)
    return content.encode("utf-8")
