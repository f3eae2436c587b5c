"""What needs no weights to be refused is refused before any are read, with what raises the limit, in the same words from Python and from commands.

The checkpoint here has weights that can't be read: whoever looks at them first says so, and nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import run
from twinfer.engine.admission import OPTIONS
from twinfer.errors import CheckpointError, RequestRefused
from twinfer.reference.engine import Engine
from twinfer.sampling import SamplingParams
from twinfer.serve import generate
from twinfer.serve.model import bundled

UNREADABLE = "not a whole safetensors file"
LONG = "to and fro " * 600  # far beyond a context of 512


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """The smallest model, whose weights can't be read."""
    path = shutil.copytree(bundled("micro").path, tmp_path / "broken", ignore=shutil.ignore_patterns("goldens"))
    (path / "model.safetensors").write_bytes(b"no weights")
    return str(path)


def test_the_weights_are_told_where_nothing_else_is_wrong(broken: str) -> None:
    for command in (f"generate x --model {broken}", f"chat --model {broken}", f"compare {broken} --engine transformers"):
        assert UNREADABLE in run(*command.split(), stdin="hi\n").error_line, command
    with pytest.raises(CheckpointError, match=UNREADABLE):
        Engine.from_pretrained(broken)


# Arguments of `generate`, what the same is in Python (limits, parameters), and the refusal.
REFUSED: list[tuple[list[str], Mapping[str, int], dict[str, Any], str]] = [
    (
        ["x", "--max-tokens", "999999"], {}, {"max_tokens": 999999},
        "max_tokens = 999999: must be at most max_context - prompt = 4096 - 1 = 4095 tokens; that is the model's own limit (max_position_embeddings), "
        "which nothing raises: take fewer tokens or a shorter prompt",
    ),
    (
        ["x", "--max-tokens", "999", "--max-context", "512"], {"max_context": 512}, {"max_tokens": 999},
        "max_tokens = 999: must be at most max_context - prompt = 512 - 1 = 511 tokens; "
        "--max-context, limits={'max_context': N} or TWINFER_MAX_CONTEXT raises it, up to the model's 4096",
    ),
    (
        ["to be", "--max-context", "4"], {"max_context": 4}, {},
        "prompt = 5 tokens: must be at most max_context = 4 tokens; "
        "--max-context, limits={'max_context': N} or TWINFER_MAX_CONTEXT raises it, up to the model's 4096",
    ),
    (
        ["to be", "--num-pages", "1", "--page-size", "2", "--max-context", "16"], {"num_pages": 1, "page_size": 2, "max_context": 16}, {},
        "prompt = 5 tokens: must be at most 2 tokens, the room in 1 page of 2; "
        "--num-pages, limits={'num_pages': N} or TWINFER_NUM_PAGES raises it; without num_pages more memory (--memory, TWINFER_MEMORY) does",
    ),
    (
        ["x", "--max-tokens", "9", "--num-pages", "1", "--page-size", "2", "--max-context", "16"], {"num_pages": 1, "page_size": 2, "max_context": 16},
        {"max_tokens": 9},
        "max_tokens = 9: must be at most 2, the room in 1 page of 2 beside 1 prompt token; "
        "--num-pages, limits={'num_pages': N} or TWINFER_NUM_PAGES raises it; without num_pages more memory (--memory, TWINFER_MEMORY) does",
    ),
    (
        ["x", "--logprobs", "21"], {}, {"logprobs": 21},
        "logprobs = 21: must be at most max_logprobs = 20; limits={'max_logprobs': N} or TWINFER_MAX_LOGPROBS raises it",
    ),
    (["x", "--n", "1025"], {}, {"n": 1025}, "n = 1025: must be an integer from 1 to 1024; send several requests for more samples"),
    (["x", "--stop-token-id", "256"], {}, {"stop_token_ids": (256,)}, "stop_token_ids = 256: must be token ids from 0 to 255"),
    (["x", "--temperature", "-1"], {}, {"temperature": -1.0}, "temperature = -1.0: must be a number from 0 to the largest float32"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "limits", "params", "said"), REFUSED, ids=[" ".join(arguments) for arguments, *_ in REFUSED])
def test_a_request_is_refused_before_weights_are_read(
    arguments: list[str], limits: Mapping[str, int], params: dict[str, Any], said: str, broken: str
) -> None:
    refused = run("generate", *arguments, "--model", broken)
    assert (refused.code, refused.error_line) == (2, f"error: {said}")
    prepared = Engine.prepare(broken, limits=limits)
    with pytest.raises(RequestRefused) as error:
        prepared.admission.request(arguments[0], SamplingParams(**{"max_tokens": 1, **params}))
    assert str(error.value) == said
    with Engine.from_pretrained("micro", limits=limits) as engine, pytest.raises(RequestRefused) as error:
        engine.generate(arguments[0], SamplingParams(**{"max_tokens": 1, **params}))
    assert str(error.value) == said


def test_a_long_list_of_stop_tokens_is_told_what_makes_it_long(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only min_tokens bans them one by one."""
    monkeypatch.setenv("TWINFER_MAX_LOGIT_BIAS", "3")
    many = ["generate", "x", "--model", broken, *(word for token in range(9) for word in ("--stop-token-id", str(token)))]
    said = (
        "stop_token_ids = 11 entries: must be at most max_logit_bias = 3, end tokens that min_tokens bans included; "
        "limits={'max_logit_bias': N} or TWINFER_MAX_LOGIT_BIAS raises it"
    )
    ends = len(Engine.prepare(broken).admission.end_tokens | set(range(9)))
    assert run(*many, "--min-tokens", "1").error_line == f"error: {said.replace('11', str(ends))}"
    assert UNREADABLE in run(*many).error_line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", "--max-context", "512", "--system", LONG, "--model"], "must be below max_context = 512; a larger --max-context may fit"),
        (["chat", "--temperature", "-1", "--model"], "temperature = -1"),
        (["chat", "--dtype", "int4", "--model"], "dtype = 'int4'"),
        (["compare", "--max-tokens", "999999", "--engine", "transformers"], "max_tokens = 999999: must be at most max_context - prompt = 4096 - "),
        (["compare", "--prompt", LONG, "--max-context", "512", "--engine", "transformers"], "tokens: must be at most max_context = 512 tokens"),
        (["compare", "--prompt-ids", "1,999", "--engine", "transformers"], "prompt[1] = 999: must be a token id from 0 to 255"),
        (["compare", "--prompt", "x", "--page-size", "0", "--engine", "transformers"], "page_size = 0"),
        (["compare", "--prompt", "x", "--engine", "fast", "--max-tokens", "9999"], "max_tokens = 9999"),
        (["check", "--law2", "--dtype", "fp64"], "dtype = 'float64': the fast engine computes in"),
        (["generate", "x", "--threads", "0", "--model"], "threads = 0"),
        (["generate", "x", "--max-batch", "0", "--model"], "max_batch = 0"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_every_command_refuses_before_weights_are_read(words: list[str], said: str, broken: str) -> None:
    refused = run(*words, broken, stdin="hi\n")
    assert (refused.code, said in refused.error_line) == (2, True), refused.error_line


def test_a_default_that_nobody_gave_refuses_no_long_prompt(broken: str) -> None:
    (Path(broken) / "generation_config.json").write_text(json.dumps({"max_new_tokens": 999999}))
    assert UNREADABLE in run("generate", "x", "--model", broken).error_line


def test_options_that_a_remedy_names_exist() -> None:
    shown = run("generate", "--help").out
    assert all(option in shown for option in [*OPTIONS.values(), "--memory"])
    assert set(OPTIONS) <= set(generate.generate.__annotations__)
