"""Each command, run from a shell, begins in UTF-8 mode."""

import importlib

import pytest

PROGRAMS = ("rl_core.cli", "rl_metrics.cli", "rl_rollout.cli", "rl_sync_trainer.main", "rl_async_trainer.main")


class RestartedError(Exception):
    pass


def restart() -> None:
    raise RestartedError


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_restarts_before_it_reads_anything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module(name)
    monkeypatch.setattr(program, "use_utf8", restart)
    with pytest.raises(RestartedError):
        program.main()
