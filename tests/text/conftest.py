"""Two small byte-level tokenizers, written as checkpoint directories: a BPE trained on a few lines, and one token a byte. No model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders as backend_decoders

from twinfer.engine.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if thinking is defined %}[{{ thinking }}]{% endif %}{% if tools %}({{ tools | length }}){% endif %}"
)
LINES = ["the cat sat on the mat", "naïve café, über", "日本語のテキスト、日本", "👩‍👩‍👧 family 👍🏽", "don't\tstop\n\n  now", "🙂🙃🙂🙃"] * 4


def _add_tokens(backend: Backend) -> None:
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Ordinary added tokens: one outside the byte alphabet, one in it with a meaning of its own there.
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("é", normalized=False)])


def _trained() -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = backend_decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    _add_tokens(backend)
    return backend


def _bytes() -> Backend:
    """Token id = byte value, from the alphabet in the order in which the library's own encoding of each byte shows it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(0x100 + len(names) - len(printable))
    assert set(names.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = backend_decoders.ByteLevel()
    _add_tokens(backend)
    return backend


def _write(backend: Backend, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories by kind, `bpe` and `bytes`."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: _write(make(), root / kind) for kind, make in (("bpe", _trained), ("bytes", _bytes))}


@pytest.fixture(scope="session")
def load(directories: dict[str, Path]) -> Callable[[str], Tokenizer]:
    """The tokenizer of a kind, read once."""
    tokenizers = {kind: Tokenizer.from_directory(path) for kind, path in directories.items()}
    return tokenizers.__getitem__
