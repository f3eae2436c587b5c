"""End tokens and sampling defaults read from a checkpoint's files, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import twinfer.golden
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.errors import CheckpointError
from twinfer.sampling import SamplingParams


def write(directory: Path, generation: Any = None, config: Any = None) -> Path:
    for name, data in (("generation_config.json", generation), ("config.json", config)):
        if data is not None:
            (directory / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return directory


def test_golden_checkpoint() -> None:
    defaults = GenerationDefaults.from_directory(Path(twinfer.golden.__file__).parent / "qwen3")
    assert defaults.eos_token_ids == (2039, 2037)
    assert defaults.sampling_values() == {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    assert defaults.unused == ()
    assert defaults.source is not None
    assert defaults.source.endswith("generation_config.json")


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 7}, (5, 3, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {"text_config": {"eos_token_id": 4}}, (4,)),
        ({}, {}, ()),
        (None, None, ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(tmp_path: Path, generation: Any, config: Any, eos: tuple[int, ...]) -> None:
    defaults = GenerationDefaults.from_directory(write(tmp_path, generation, config))
    assert defaults.eos_token_ids == eos
    assert (defaults.source is None) == (generation is None)


def test_every_honoured_field_reaches_the_parameters(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    generation |= {"presence_penalty": 1.5, "frequency_penalty": 0.2, "max_new_tokens": 99, "min_new_tokens": 3}
    params = SamplingParams(**GenerationDefaults.from_directory(write(tmp_path, generation)).sampling_values())  # type: ignore[arg-type]
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (0.6, 20, 0.9, 0.05, 1.1)
    assert (params.presence_penalty, params.frequency_penalty, params.max_tokens, params.min_tokens) == (1.5, 0.2, 99, 3)


def test_missing_and_null_fields_are_off(tmp_path: Path) -> None:
    defaults = GenerationDefaults.from_directory(write(tmp_path, {"top_k": None, "do_sample": True}))
    assert defaults.sampling_values() == {}


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    defaults = GenerationDefaults.from_directory(write(tmp_path, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    assert defaults.sampling_values() == {"temperature": 0, "top_p": 0.9}


def test_fields_that_would_change_results_are_listed(tmp_path: Path) -> None:
    generation = {"num_beams": 4, "typical_p": 0.9, "suppress_tokens": [7], "invented_by_a_later_version": 1, "max_length": 20}
    neutral = {"num_beam_groups": 1, "length_penalty": 1.0, "eta_cutoff": 0.0, "early_stopping": False, "bad_words_ids": None}
    bookkeeping = {"transformers_version": "5.5.0", "pad_token_id": 0, "bos_token_id": 1, "_from_model_config": True, "use_cache": True}
    defaults = GenerationDefaults.from_directory(write(tmp_path, generation | neutral | bookkeeping))
    assert sorted(defaults.unused) == [
        "invented_by_a_later_version = 1",
        "max_length = 20",
        "num_beams = 4",
        "suppress_tokens = [7]",
        "typical_p = 0.9",
    ]


def test_what_transformers_writes_by_itself_changes_nothing(tmp_path: Path) -> None:
    GenerationConfig().save_pretrained(tmp_path)
    assert GenerationDefaults.from_directory(tmp_path).unused == ()
    assert GenerationDefaults.from_directory(write(tmp_path, GenerationConfig().to_dict())).unused == ()


@pytest.mark.parametrize(
    ("generation", "config", "named", "says"),
    [
        ("{oops", None, "generation_config.json", "not readable as JSON"),
        ([1], None, "generation_config.json", "must be an object"),
        ({"temperature": "hot"}, None, "generation_config.json", "temperature = 'hot'"),
        ({"top_p": 1.5}, None, "generation_config.json", "top_p = 1.5"),
        ({"eos_token_id": [1, "x"]}, None, "generation_config.json", "eos_token_id = [1, 'x']"),
        ({"eos_token_id": -1}, None, "generation_config.json", "eos_token_id = -1"),
        ({}, {"eos_token_id": True}, "config.json", "eos_token_id = True"),
        ({}, "{", "config.json", "not readable as JSON"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, generation: Any, config: Any, named: str, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        GenerationDefaults.from_directory(write(tmp_path, generation, config))
    assert str(tmp_path / named) in str(caught.value)
    assert says in str(caught.value)
