"""No name or text can move the terminal's cursor, set its title or colour it."""

import io
import sys

import pytest
import structlog

from rl_core.errors import RLError
from rl_core.terminal_text import say
from rl_trainer_parts.commands.command_line import complain, run_command

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202e\r"


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def assert_harmless(capsys):
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in f"{out}{err}".split("\n"))
    return out + err


def test_what_commands_say_and_complain_of_is_escaped(capsys):
    say(f"run runs/{HOSTILE}\nand\ud800")
    complain(f"first {HOSTILE}", f"second\n{HOSTILE}\ud800")
    assert assert_harmless(capsys).count(r"\x1b]0;owned\x07\x9b31m\u202e\r") == 3


@pytest.mark.parametrize("error", [RLError, ValueError])
def test_errors_and_warnings_of_a_command_are_escaped(capsys, error):
    def command(_words):
        structlog.get_logger().warning("reward_failed", reason=HOSTILE, more=[HOSTILE], name="\ud800")
        raised = error(HOSTILE)
        raised.add_note(f"Traceback in the rollouter:\n{HOSTILE}")
        raise raised

    if error is RLError:
        assert run_command(["x"], {"x": command}) == 1
    else:
        with pytest.raises(ValueError, match="owned") as caught:
            run_command(["x"], {"x": command})
        sys.excepthook(caught.type, caught.value, caught.tb)
    said = assert_harmless(capsys)
    assert "reward_failed" in said
    assert said.count(r"\x1b]0;owned") == 4
    assert "Traceback in the rollouter:\n" in said


class Gone(io.StringIO):
    def write(self, text):
        raise OSError("the terminal is gone")


def test_a_warning_to_a_terminal_that_is_gone_is_no_error(monkeypatch):
    def command(_words):
        monkeypatch.setattr(sys, "stderr", Gone())
        structlog.get_logger().warning("reward_failed")
        return 0

    assert run_command(["x"], {"x": command}) == 0
