"""The two tokenizers of the golden models, written as plain HF files. Not used at inference: an engine reads tokenizer.json like any other.

`qwen3` is a byte-level BPE with Qwen's way of splitting text (NFC, then its pre-tokenizer pattern), special tokens after the ordinary
ones, and fewer tokens than the model has embedding rows, as in real checkpoints. `micro` has one token per byte, id = byte value. Its
special tokens take the ids of bytes that UTF-8 never uses (0xFD to 0xFF): 256 ids are enough and any text survives the round trip.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Qwen2's and Qwen3's splitting rule: contractions, words with one leading non-letter, single digits, punctuation, newlines, spaces.
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception("unknown role '" + message['role'] + "': expected system, user or assistant") }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_bpe(texts: Iterable[str], num_tokens: int) -> "Tokenizer":
    """A byte-level BPE of `num_tokens` ids in all; the last three are SPECIAL_TOKENS in that order."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == num_tokens, f"{tokenizer.get_vocab_size()} tokens, wanted {num_tokens}"
    return tokenizer


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE files write for each byte value 0..255 (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def byte_tokenizer() -> "Tokenizer":
    """One token per byte of the UTF-8 text, id = byte value; SPECIAL_TOKENS are 253, 254 and 255."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_characters()[: 256 - len(SPECIAL_TOKENS)])}
    vocab |= {token: len(vocab) + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_tokenizer(tokenizer: "Tokenizer", directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (chat template inside) into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def render_conversation(turns: list[str], system: str | None = None) -> str:
    """What CHAT_TEMPLATE makes of `turns` (user first, alternating), in plain Python, so that training needs no template engine."""
    messages = [("system", system)] if system is not None else []
    messages += [(("user", "assistant")[index % 2], turn) for index, turn in enumerate(turns)]
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)
