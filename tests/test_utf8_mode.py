"""Each command, run from a shell, begins in UTF-8 mode."""

import importlib

import pytest

COMMAND_LINE = "rl_trainer_parts.commands.command_line"
PROGRAMS = {
    "rl_core.cli": "rl_core.cli",
    "rl_metrics.cli": "rl_metrics.cli",
    "rl_rollout.cli": "rl_rollout.cli",
    "rl_sync_trainer.main": COMMAND_LINE,
    "rl_async_trainer.main": COMMAND_LINE,
}
"""Each program's module, and the module that restarts it."""


class RestartedError(Exception):
    pass


def restart() -> None:
    raise RestartedError


@pytest.mark.parametrize(("name", "restarts"), PROGRAMS.items())
def test_a_program_restarts_before_it_reads_anything(name: str, restarts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module(name)
    monkeypatch.setattr(importlib.import_module(restarts), "use_utf8", restart)
    with pytest.raises(RestartedError):
        program.main()
