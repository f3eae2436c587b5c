"""`twinfer chat`: turns, commands, a history that is whole or refused, piped and typed input, Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import run
from tests.serve.test_examples import TINY
from twinfer.engine import engine as loop
from twinfer.engine.tokenizer import Tokenizer

CHAT = ("chat", "--model", "micro", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture
def histories(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The messages of every turn, as the chat template got them. The empty turn that is checked before the weights are read is none."""
    seen: list[list[tuple[str, str]]] = []
    apply = Tokenizer.apply_chat_template

    def spy(self: Tokenizer, messages: Any, *arguments: Any, **named: Any) -> list[int]:
        if messages[-1]["content"]:
            seen.append([(m["role"], m["content"]) for m in messages])
        return apply(self, messages, *arguments, **named)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", spy)
    return seen


def test_each_line_is_a_turn_and_the_history_grows(histories: list[list[tuple[str, str]]]) -> None:
    done = run(*CHAT, "--system", "Be brief.", stdin="Who art thou?\n\n  \nWhither?\n")
    assert done.code == 0, done.err
    assert histories[0] == [("system", "Be brief."), ("user", "Who art thou?")]
    reply = histories[1][2]
    assert histories[1] == [*histories[0], ("assistant", reply[1]), ("user", "Whither?")]
    assert done.out.startswith(reply[1])
    assert len(histories) == 2
    assert "from the prefix cache" in done.err


def test_reset_and_exit(histories: list[list[tuple[str, str]]]) -> None:
    done = run(*CHAT, "--system", "S", stdin="one\n/reset\ntwo\n/exit\nthree\n")
    assert done.code == 0
    assert histories == [[("system", "S"), ("user", "one")], [("system", "S"), ("user", "two")]]
    assert "the conversation starts over" in done.err


def test_a_line_may_begin_with_a_slash(histories: list[list[tuple[str, str]]]) -> None:
    done = run(*CHAT, stdin="//etc\n/help\n")
    assert (done.code, histories) == (0, [[("user", "/etc")]])
    assert "/reset forgets" in done.err


def test_an_unknown_command_is_no_message(histories: list[list[tuple[str, str]]]) -> None:
    done = run(*CHAT, stdin="/quit\n")
    assert (done.code, histories) == (1, [])
    assert "command = '/quit'" in done.error_line


def test_a_full_context_is_refused_and_reset_helps(histories: list[list[tuple[str, str]]]) -> None:
    long = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2
    done = run(*CHAT, "--max-context", "64", stdin=f"hi\n{long}\nhi\n")
    assert done.code == 1  # a script must learn that a turn had no answer
    assert "must be below max_context = 64; nothing was cut" in done.err
    assert len(histories) == 3
    assert long.strip() not in [text for _, text in histories[2]]
    assert histories[2][0] == ("user", "hi")


def test_a_reply_that_fills_the_context_is_told() -> None:
    done = run("chat", "--model", "micro", "--max-context", "40", "--temperature", "0", stdin="hello there\n/reset\nhello there\n")
    assert done.code == 0, done.err
    assert "stopped at the end of the context (max_context = 40)" in done.err or "finish: stop" in done.err


def test_a_cut_reply_is_told() -> None:
    done = run("chat", "--model", "micro", "--max-tokens", "1", "--quiet", stdin="hello\n")
    assert "the reply was stopped at max_tokens = 1" in done.err


def test_typed_lines_have_a_prompt_and_end_with_ctrl_d() -> None:
    done = run(*CHAT, typed="hello\n")
    assert (done.code, done.out.count("you> ")) == (0, 2)


def test_typed_errors_do_not_fail_the_session() -> None:
    assert run(*CHAT, typed="/quit\n").code == 0


def test_random_weights_talk_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    done = run("chat", "--model", "micro", "--max-tokens", "4", "--random-weights", "1", stdin="hello\n")
    assert done.code == 0, done.err
    assert "with random weights (seed 1)" in done.err
    (tmp_path / "config.json").write_text(TINY)
    refused = run("chat", "--model", str(tmp_path), "--random-weights", "1", stdin="hello\n")
    assert (refused.code, "has no tokenizer.json" in refused.error_line) == (2, True)


def test_nothing_piped_is_an_empty_conversation() -> None:
    assert run(*CHAT, stdin="").code == 0


def test_what_is_no_text_is_one_line() -> None:
    refused = run(*CHAT, stdin=b"hello\n\xff\n")
    assert (refused.code, "line 2 of standard input" in refused.error_line) == (2, True)


def test_bad_options_are_refused_before_the_first_turn() -> None:
    refused = run(*CHAT, "--top-p", "7", stdin="hello\n")
    assert (refused.code, "top_p = 7" in refused.error_line, refused.out) == (2, True, "")


@pytest.mark.parametrize(("piped", "code", "turns"), [(True, 130, 1), (False, 0, 2)])
def test_ctrl_c_stops_a_reply(piped: bool, code: int, turns: int, histories: list[list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = loop.Engine.step, [0]

    def interrupted(self: loop.Engine) -> Any:
        steps[0] += 1
        if steps[0] == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(loop.Engine, "step", interrupted)
    lines = "hello\nagain\n"
    done = run("chat", "--model", "micro", "--max-tokens", "30", stdin=lines if piped else None, typed=None if piped else lines)
    assert done.code == code, done.err
    assert "the reply was stopped here by Ctrl-C" in done.err
    assert len(histories) == turns
    if turns == 2:  # what was seen of the stopped reply is what the model sees
        assert histories[1][1][0] == "assistant"
        assert histories[1][1][1] in done.out


def test_ctrl_c_at_the_prompt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert run(*CHAT, typed="").code == 130
