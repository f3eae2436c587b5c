"""GenerationDefaults: end tokens and sampling defaults that a checkpoint brings along. It reads files; requests override every value.

A field that is missing is off, whatever default transformers fills in. A field that would change results and that twinfer does not honour is listed
in `unused`, so that whoever starts the engine can say so; none is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinfer.errors import CheckpointError, RequestRefused
from twinfer.sampling import SamplingParams

FILE = "generation_config.json"

# Field of the file -> field of SamplingParams.
_HONOURED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Fields that choose no token: bookkeeping, ids that only training or padded batches need, and how transformers caches, compiles and returns.
_HARMLESS = {
    "bos_token_id", "cache_config", "cache_implementation", "chat_format", "compile_config", "continuous_batching_config", "decoder_start_token_id",
    "disable_compile", "do_sample", "eos_token_id", "low_memory", "max_cache_len", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "pad_token_id", "prefill_chunk_size", "return_dict_in_generate", "transformers_version", "use_cache",
}  # fmt: skip
# Values at which a field of transformers does nothing. null does nothing everywhere.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "diversity_penalty": (0,),
    "length_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generation.

    eos_token_ids  ids that end an output: those of generation_config.json, then those that only config.json names. Either file may be incomplete,
                   and an id that one of them calls the end is meant as one
    values         SamplingParams field -> default, only fields that the file sets; with do_sample false the temperature is 0
    unused         "field = value" of fields that would change results and are not honoured
    source         the generation_config.json that was read; None when there is none
    """

    eos_token_ids: tuple[int, ...] = ()
    values: tuple[tuple[str, float | int], ...] = ()
    unused: tuple[str, ...] = ()
    source: str | None = None

    @classmethod
    def from_directory(cls, path: str | Path) -> GenerationDefaults:
        """Reads generation_config.json (optional) and config.json's end tokens. Raises CheckpointError naming the file and the field."""
        directory = Path(path)
        file, config_file = directory / FILE, directory / "config.json"
        data, config = _read(file), _read(config_file)
        eos = _token_ids(data or {}, file) + _token_ids(config or {}, config_file)
        if data is None:
            return cls(eos_token_ids=tuple(dict.fromkeys(eos)))
        values = {ours: data[theirs] for theirs, ours in _HONOURED.items() if data.get(theirs) is not None}
        if data.get("do_sample") is False:
            values["temperature"] = 0
        try:
            SamplingParams(**{"max_tokens": None, **values})
        except RequestRefused as error:
            raise CheckpointError(f"{file}: {error}") from None
        unused = tuple(f"{field} = {json.dumps(value)}" for field, value in data.items() if _changes_results(field, value))
        return cls(tuple(dict.fromkeys(eos)), tuple(values.items()), unused, str(file))

    def sampling_values(self) -> dict[str, float | int]:
        """Keyword arguments for SamplingParams: the checkpoint's own defaults."""
        return dict(self.values)


def _changes_results(field: str, value: object) -> bool:
    if field in _HONOURED or field in _HARMLESS or field.startswith("_"):
        return False
    # False switches a feature off; it is compared apart because it equals 0.
    return value is not None and value is not False and value not in _NEUTRAL.get(field, ())


def _read(file: Path) -> Mapping[str, Any] | None:
    """A JSON object, None when there is no such file."""
    if not file.exists():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: the top level must be an object, it is {type(data).__name__}")
    return data


def _token_ids(data: Mapping[str, Any], file: Path) -> list[int]:
    """eos_token_id of a file: an id, a list of ids, or nothing. Models with several parts keep it in text_config."""
    value = data.get("eos_token_id")
    if value is None and isinstance(data.get("text_config"), dict):
        value = data["text_config"].get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CheckpointError(f"{file}: eos_token_id = {value!r} must be a token id or a list of them")
    return ids
