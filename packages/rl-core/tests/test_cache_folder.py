"""The user's cache folder, and what works without one."""

import os
import pwd
from pathlib import Path

import pytest

from rl_core.errors import DataError
from rl_core.files import cache_folder, run_trial


def no_entry(uid: int) -> None:
    raise KeyError(uid)


@pytest.fixture(params=["unset", "cannot be made", "a file", "not writable"])
def without_home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    home = {"cannot be made": "/proc/nowhere", "a file": str(tmp_path / "file")}.get(request.param, str(tmp_path))
    monkeypatch.setenv("HOME", home)
    if request.param == "unset":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", no_entry)
    if request.param == "not writable":  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda *_: False)


@pytest.mark.usefixtures("without_home")
def test_there_is_no_cache_without_a_home_that_can_be_used() -> None:
    assert cache_folder("rl-core") is None


@pytest.mark.usefixtures("without_home")
def test_a_trial_works_without_a_cache(tmp_path: Path) -> None:
    script, file = tmp_path / "trial.py", tmp_path / "read.me"
    script.write_text("def main(): pass")
    file.write_text("text")
    run_trial(script, {}, files=[file], libraries=[])
    script.write_text("def main(): raise ValueError('it is broken')")
    with pytest.raises(DataError, match="it is broken"):
        run_trial(script, {}, files=[file], libraries=[])


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_project_has_a_private_folder(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = cache_folder("rl-core")
    assert folder == tmp_path / ("rl-core" if variable == "XDG_CACHE_HOME" else ".cache/rl-core")
    assert folder.stat().st_mode & 0o777 == 0o700
