"""Reads built-in and user workloads from TOML."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.files import parse_toml, read_toml
from rl_core.record_fields import converts_arguments
from rl_rollout.loops.options import read_options
from rl_rollout.simulation.workload import Workload

BUILT_IN = "qwen2.5-math-7b-dapo"
SHIPPED = files("rl_rollout.simulation") / "workloads"


def built_in_workload(name: str = BUILT_IN) -> Workload:
    """Return the built-in workload with this name."""
    return parse_workload((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


@converts_arguments
def read_workload(file: Path) -> Workload:
    """Read a user's workload.

    Raises:
        SettingsError: The file cannot be read, is not TOML, or has an invalid value.
    """
    return _workload(read_toml(file, error=SettingsError), where=str(file))


def parse_workload(text: str, *, where: str) -> Workload:
    """Parse a workload from TOML.

    Raises:
        SettingsError: The text is not TOML, or has an invalid value.
    """
    return _workload(parse_toml(text, where=where, error=SettingsError), where=where)


def _workload(table: dict[str, Any], *, where: str) -> Workload:
    try:
        return read_options(Workload, table, where="the workload")
    except (SettingsError, ArithmeticError) as error:
        raise SettingsError(f"{where}: {error}") from error
