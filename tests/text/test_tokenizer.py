"""The tokenizer against transformers on the same files, and its errors; streaming is tested apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import twinfer.golden
from tests.budget import examples, repeatable
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import CheckpointError, RequestRefused

SETTINGS = settings(max_examples=examples(150), deadline=None, derandomize=repeatable())
KINDS = st.sampled_from(["bpe", "bytes"])
GOLDEN = Path(twinfer.golden.__file__).parent
TALK = [{"role": "user", "content": "Who's there? 👍"}, {"role": "assistant", "content": "Nay, answer me."}, {"role": "user", "content": "Ho!"}]
Load = Callable[[str], Tokenizer]


@pytest.mark.parametrize("model", ["qwen3", "micro"])
def test_golden_tokenizers_equal_transformers(model: str) -> None:
    ours, theirs = Tokenizer.from_directory(GOLDEN / model), AutoTokenizer.from_pretrained(GOLDEN / model, local_files_only=True)
    texts = [file.read_text(encoding="utf-8")[:3000] for file in sorted((GOLDEN / "prompts").glob("*.txt"))]
    texts += ["", " ", "naïve 日本 👩‍👩‍👧\r\n\t x", "<|im_start|>user<|im_end|>", "e\u0301"]
    assert len(texts) >= 6
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.render_chat(TALK) == theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(TALK) == list(theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"])
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | {theirs.convert_tokens_to_ids("<|im_start|>")}


@SETTINGS
@given(kind=KINDS, text=st.text())
def test_text_survives_the_round_trip(load: Load, kind: str, text: str) -> None:
    tokenizer = load(kind)
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    again = tokenizer.decode(ids, skip_special_tokens=False)
    # The added token é is written in the byte alphabet, where it means one byte that is not UTF-8: the library's own reading.
    if "é" not in again + text:
        assert tokenizer.encode(again) == ids
        assert kind == "bpe" or again == text


@SETTINGS
@given(kind=KINDS, ids=st.lists(st.integers(0, 420), max_size=30))
def test_text_is_the_decoding_of_the_tokens_bytes(load: Load, kind: str, ids: list[int]) -> None:
    tokenizer = load(kind)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode("utf-8", errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_ids_without_a_token_have_no_text(load: Load) -> None:
    tokenizer = load("bpe")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""


def test_half_a_surrogate_pair_is_refused(load: Load) -> None:
    with pytest.raises(RequestRefused, match="index 1 is half of a surrogate pair"):
        load("bpe").encode("a\ud800b")


def test_chat_template_takes_options_tools_and_no_prompt(load: Load) -> None:
    tokenizer = load("bpe")
    plain = "<|im_start|>user\nhi<|im_end|>\n"
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(talk, add_generation_prompt=False) == plain
    assert tokenizer.render_chat(talk) == plain + "<|im_start|>assistant\n"
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
    assert tokenizer.render_chat(talk, tools=[tool], add_generation_prompt=False, thinking="on") == plain + "[on](1)"
    assert tokenizer.apply_chat_template(talk) == tokenizer.encode(tokenizer.render_chat(talk))


@pytest.mark.parametrize("messages", [[{"role": "wizard", "content": "hi"}], [{"role": "user"}], [{"role": None, "content": "x"}]])
def test_messages_that_the_template_refuses(load: Load, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestRefused, match=r"messages = .*chat template"):
        load("bpe").render_chat(messages)


def test_missing_template_names_the_directory(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(directories["bpe"] / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == ()
    with pytest.raises(CheckpointError, match="no chat template") as caught:
        tokenizer.apply_chat_template(TALK)
    assert str(tmp_path) in str(caught.value)


def test_template_in_a_file_of_its_own(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(directories["bpe"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_directory(tmp_path).render_chat(TALK) == "Who's there? 👍!"


def test_settings_that_cut_or_pad_a_prompt_are_off(directories: dict[str, Path], tmp_path: Path) -> None:
    data = json.loads((directories["bpe"] / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    text = "the cat sat on the mat, twice"
    assert Tokenizer.from_directory(tmp_path).encode(text) == Tokenizer.from_directory(directories["bpe"]).encode(text)


@pytest.mark.parametrize(
    ("files", "named", "says"),
    [
        ({}, "tokenizer.json", "no such file"),
        ({"tokenizer.json": "{oops"}, "tokenizer.json", "not readable as JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json", "must be an object"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "tokenizer.json", "can't be built"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{oops"}, "tokenizer_config.json", "not readable as JSON"),
    ],
)
def test_broken_files_are_named(directories: dict[str, Path], tmp_path: Path, files: dict[str, str | None], named: str, says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text((directories["bpe"] / name).read_text() if content is None else content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path / named) in str(caught.value)
    assert says in str(caught.value)


def test_another_kind_of_decoder_is_refused_by_name(directories: dict[str, Path], tmp_path: Path) -> None:
    data = json.loads((directories["bpe"] / "tokenizer.json").read_text())
    data["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="decoder 'Metaspace' is not supported; supported: ByteLevel"):
        Tokenizer.from_directory(tmp_path)
