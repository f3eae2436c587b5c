"""Both tokenizers: any text survives, special tokens are single ids, the chat template says what training rendered."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.golden.conftest import MODELS, ROOT
from twinfer.golden.recipe import RECIPES
from twinfer.golden.tokenizer import SPECIAL_TOKENS, byte_characters, byte_tokenizer, render_conversation, train_bpe

LOADED = {model: AutoTokenizer.from_pretrained(ROOT / model) for model in MODELS}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


@settings(deadline=None)
@given(text=TEXTS)
@example(text="e\u0301\r\n\t  a<|im_end|>\x00\U0010ffff 世界 42")
def test_qwen3_round_trip(text: str) -> None:
    """Like Qwen's, this tokenizer composes characters (NFC) and changes nothing else."""
    ids = LOADED["qwen3"].encode(text, add_special_tokens=False)
    assert all(0 <= token < RECIPES["qwen3"].num_tokens for token in ids)
    # A special token's own characters pass unnormalised, the stretches around it are normalised one by one.
    if "<|" not in text:
        assert LOADED["qwen3"].decode(ids) == unicodedata.normalize("NFC", text)


@settings(deadline=None)
@given(text=TEXTS)
@example(text="e\u0301\r\n\t\x00\U0010ffff")
def test_micro_round_trip(text: str) -> None:
    ids = LOADED["micro"].encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert LOADED["micro"].decode(ids) == text


@pytest.mark.parametrize("model", MODELS)
def test_special_tokens(model: str) -> None:
    tokenizer = LOADED[model]
    ids = tokenizer.encode("".join(SPECIAL_TOKENS), add_special_tokens=False)
    last = RECIPES[model].num_tokens
    assert ids == [last - 3, last - 2, last - 1]
    assert tokenizer.decode(ids) == "".join(SPECIAL_TOKENS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert len(tokenizer) == last <= RECIPES[model].shape["vocab_size"]
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("model", MODELS)
def test_chat_template(model: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who's there?"},
        {"role": "assistant", "content": "Nay, answer me."},
    ]
    rendered = LOADED[model].apply_chat_template(messages, tokenize=False)
    assert rendered == render_conversation(["Who's there?", "Nay, answer me."], "Be brief.")
    opened = LOADED[model].apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert opened == render_conversation(["Who's there?"], "Be brief.") + "<|im_start|>assistant\n"
    with pytest.raises(TemplateError, match="narrator"):
        LOADED[model].apply_chat_template([{"role": "narrator", "content": ""}], tokenize=False)


def test_files_are_what_the_makers_make() -> None:
    assert byte_tokenizer().to_str(pretty=True) == Tokenizer.from_file(str(ROOT / "micro" / "tokenizer.json")).to_str(pretty=True)
    assert len(set(byte_characters())) == 256
    small = train_bpe(["to be or not to be " * 20], 264)
    assert [small.token_to_id(token) for token in SPECIAL_TOKENS] == [261, 262, 263]


def test_english_is_short_in_qwen3_tokens() -> None:
    text = (ROOT / "prompts" / "comedy.txt").read_text()
    assert len(text) / len(LOADED["qwen3"].encode(text)) > 2.5
