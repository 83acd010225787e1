"""A run's folder: one holder at a time, and the runs that may follow an earlier one."""

import datetime
import math
import os
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import DataError, EngineError, SettingsError
from rl_trainer_parts.run.folder import FORMAT, RunFolder, choose_date, choose_products, open_run, require_format
from rl_trainer_parts.settings.fields import changeable_on_resume, setting_fields
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

HOLDER = """
import sys
import tempfile
from pathlib import Path
from rl_trainer_parts.run.folder import RunFolder
RunFolder(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def settings_in(tmp_path: Path, **changes: Any) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": tmp_path / "runs"},
        "policy": {"path": "policy"},
        "prompts": {"train": "train.jsonl", "template_options": {"style": "short"}},
        "reward": {"function": "exact_match"},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    return build_settings(values)


@contextmanager
def held_elsewhere(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Let another process hold the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def begin(settings: Settings, *, resume: bool = False) -> list[str]:
    """Open and close a run; return its messages."""
    said: list[str] = []
    with open_run(settings, resume=resume, say=said.append):
        pass
    return said


def test_a_resumed_run_computes_with_the_products_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("rl_distill.learners.chosen_products", lambda wanted: asked.append(wanted) or "onednn")
    settings = settings_in(tmp_path)
    begun = choose_products(settings, resume=False)
    begin(begun)
    monkeypatch.setattr("rl_distill.learners.chosen_products", lambda wanted: asked.append(wanted) or wanted)

    resumed = choose_products(settings, resume=True)

    assert asked == ["auto", "onednn"]
    assert resumed.optimizer.products == begun.optimizer.products == "onednn"
    begin(resumed, resume=True)
    with pytest.raises(SettingsError, match=r"optimizer\.products: the run has 'onednn', now 'torch'"):
        begin(settings_in(tmp_path, optimizer__products="torch"), resume=True)


@pytest.mark.parametrize(("written", "found"), [(None, "1"), ("3\n", "3"), ("5", "5"), ("two", "two"), ("", "unknown")])
def test_a_run_of_another_format_is_refused(tmp_path: Path, written: str | None, found: str) -> None:
    settings = settings_in(tmp_path)
    begin(settings)
    require_format(settings.run_folder)
    (settings.run_folder / "events.jsonl").touch()
    file = settings.run_folder / "format"
    assert file.read_text() == f"{FORMAT}\n"
    file.unlink() if written is None else file.write_text(written)
    reader = {"1": "version 0.1", "3": "commit 135fed37"}.get(found, "the version that wrote it")
    with pytest.raises(SettingsError, match=rf"is a run in format {found}, .* reads format 4. Use {reader}"):
        require_format(settings.run_folder)
    with pytest.raises(SettingsError, match="reads format 4"):
        begin(settings, resume=True)
    (tmp_path / "settings.toml").touch()  # a user's own settings beside the folder of runs, such as those of `new`
    require_format(tmp_path / "runs" / "new")
    require_format(tmp_path)


def test_a_resumed_run_keeps_the_date_on_which_it_began(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    today = datetime.date.today().isoformat()
    assert choose_date(settings, resume=True).prompts.date == today, "no run is there yet"
    begin(settings_in(tmp_path, prompts__date="2020-02-29"))
    resumed = choose_date(settings, resume=True)
    assert resumed.prompts.date == "2020-02-29"
    begin(resumed, resume=True)
    assert choose_date(settings, resume=False).prompts.date == today
    with pytest.raises(SettingsError, match=r"prompts\.date: the run has '2020-02-29', now '2021-01-01'"):
        begin(settings_in(tmp_path, prompts__date="2021-01-01"), resume=True)


def test_a_run_of_an_earlier_version_has_no_date_to_keep(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    begin(settings)
    assert choose_date(settings, resume=True) == settings


def test_a_new_run_writes_its_settings_defaults_included(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, trainer__steps=7)
    with open_run(settings, resume=False, say=pytest.fail) as folder:
        assert folder.path == tmp_path / "runs" / "run"
        written = tomllib.loads((folder.path / "settings.toml").read_text())
    assert written["trainer"]["steps"] == 7
    assert written["rollout"]["group_size"] == 8
    assert written["prompts"]["template_options"] == {"style": "short"}
    assert "top_k" not in written["rollout"]
    assert build_settings(written) == settings


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with held_elsewhere(settings.run_folder) as holder:
        for resume in (False, True):
            (settings.run_folder / "settings.toml").touch()
            with pytest.raises(SettingsError, match=rf"is in use by a live run \(process {holder.pid}\)"):
                begin(settings, resume=resume)
        (settings.run_folder / "settings.toml").unlink()
    begin(settings)  # the kernel has released the lock


def test_the_lock_does_not_outlive_its_holder_through_a_child(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        folder.release()
        folder.release()
        other = RunFolder(tmp_path / "run")
        other.acquire()
        assert child.poll() is None
        other.release()


def test_the_holder_is_named_again_after_another(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "run"):
        pass
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())
    folder.release()


def test_an_earlier_run_is_refused_resumed_or_archived(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    assert begin(settings) == []
    (settings.run_folder / "mark").touch()
    with pytest.raises(SettingsError, match="already holds a run"):
        begin(settings)
    assert begin(settings, resume=True) == []
    assert begin(settings_in(tmp_path, run__if_exists="resume")) == []
    assert (settings.run_folder / "mark").exists()
    archiving = settings_in(tmp_path, run__if_exists="archive")
    assert begin(archiving, resume=True) == []
    (said,) = begin(archiving)
    aside = Path(said.removeprefix("the earlier run was moved to "))
    assert (aside / "mark").exists()
    assert not (settings.run_folder / "mark").exists()
    (second,) = begin(archiving)
    assert second != said
    assert sorted(path.name for path in aside.iterdir()) == [".lock", "format", "mark", "settings.toml"]


def test_the_lock_is_held_after_archiving(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, run__if_exists="archive")
    begin(settings)
    with (
        open_run(settings, resume=False, say=lambda line: None),
        pytest.raises(SettingsError, match="is in use by a live run"),
    ):
        begin(settings)


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(SettingsError, match=r"has no run to resume\. Leave out --resume"):
        begin(settings, resume=True)
    assert not settings.run_folder.exists()


def test_resuming_with_other_settings_names_them(tmp_path: Path) -> None:
    begin(settings_in(tmp_path, rollout__top_k=None, trainer__steps=5))
    other = settings_in(
        tmp_path,
        optimizer__learning_rate=0.5,
        algorithm__dual_clip=math.inf,
        prompts__template_options={"style": "long"},
        trainer__steps=9,
    )
    with pytest.raises(SettingsError) as caught:
        begin(other, resume=True)
    first, *differing, last = str(caught.value).splitlines()
    assert first.endswith("cannot be resumed with other settings:")
    assert differing == [
        "  algorithm.dual_clip: the run has 3.0, now inf",
        "  optimizer.learning_rate: the run has 1e-06, now 0.5",
        "  prompts.template_options: the run has {'style': 'short'}, now {'style': 'long'}",
    ]
    assert last.endswith("`train --help` marks the settings that may differ on resume.")
    written = tomllib.loads((tmp_path / "runs" / "run" / "settings.toml").read_text())
    assert written["trainer"]["steps"] == 5


def test_resuming_with_changeable_settings_writes_them(tmp_path: Path) -> None:
    begin(settings_in(tmp_path, trainer__steps=5))
    begin(settings_in(tmp_path, trainer__steps=9, rollout__placement="process", metrics__console="off"), resume=True)
    written = tomllib.loads((tmp_path / "runs" / "run" / "settings.toml").read_text())
    assert (written["trainer"]["steps"], written["rollout"]["placement"]) == (9, "process")


def test_a_resumed_run_may_join_another_ray_cluster(tmp_path: Path) -> None:
    """A restarted job has a new cluster with another address."""
    on_ray = {"cluster__placement": "ray", "cluster__gpus_per_rank": 0.0}
    begin(settings_in(tmp_path, **on_ray, cluster__ray_address="10.0.0.1:6379"))
    begin(settings_in(tmp_path, **on_ray, cluster__ray_address="10.0.0.2:7000"), resume=True)
    written = tomllib.loads((tmp_path / "runs" / "run" / "settings.toml").read_text())
    assert written["cluster"]["ray_address"] == "10.0.0.2:7000"


def test_a_resumed_run_may_ask_its_validation_problems_otherwise(tmp_path: Path) -> None:
    begin(settings_in(tmp_path))
    file = tmp_path / "runs" / "run" / "settings.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("validation_")]
    file.write_text("\n".join(lines))  # as from a version without these settings
    begin(settings_in(tmp_path), resume=True)
    several = {"prompts__validation_samples": 4, "prompts__validation_temperature": 0.5}
    begin(settings_in(tmp_path, **several), resume=True)
    written = tomllib.loads(file.read_text())["prompts"]
    assert (written["validation_samples"], written["validation_temperature"]) == (4, 0.5)


def test_a_resumed_run_may_have_more_replicas_of_a_teacher_but_no_other_teacher(tmp_path: Path) -> None:
    def teachers(**large: Any) -> dict[str, Any]:
        return {"distillation__teachers": {"large": {"model": "a", "data_sources": ["math"], **large}}}

    begin(settings_in(tmp_path, **teachers()))
    begin(settings_in(tmp_path, **teachers(replicas=2, resources={"cpus": 1})), resume=True)
    with pytest.raises(SettingsError, match=r"distillation.teachers.large.model: the run has 'a', now 'b'"):
        begin(settings_in(tmp_path, **teachers(model="b")), resume=True)
    with pytest.raises(SettingsError, match=r"large.data_sources: the run has \['math'\], now \['code'\]"):
        begin(settings_in(tmp_path, **teachers(data_sources=["code"])), resume=True)


def test_what_may_change_is_a_setting_and_not_what_is_learnt() -> None:
    known = setting_fields()
    assert changeable_on_resume(Settings) <= known.keys() | known["distillation.teachers"].entry_fields().keys()
    learnt = (
        "algorithm.",
        "correction.",
        "policy.",
        "rollout.temperature",
        "rollout.group_size",
        "optimizer.learning_rate",
        "run.seed",
    )
    assert not any(name.startswith(learnt) for name in changeable_on_resume(Settings))


@pytest.mark.parametrize("error", [SettingsError("no"), DataError("no")])
def test_a_mistake_before_the_first_checkpoint_leaves_no_run(tmp_path: Path, error: Exception) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(type(error)), open_run(settings, resume=False, say=pytest.fail):
        raise error
    assert not RunFolder(settings.run_folder).has_run
    begin(settings)


def write_and_fail(settings: Settings, *, say: Any) -> None:
    """Write files that a later attempt reads, then fail."""
    with open_run(settings, resume=False, say=say) as folder:
        (folder.path / "queue").mkdir()
        (folder.path / "queue" / "journal").touch()
        (folder.path / "record.jsonl").touch()
        raise DataError("row 7")


def test_what_a_mistake_left_is_moved_aside_so_that_the_next_run_begins_anew(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    said: list[str] = []
    with pytest.raises(DataError, match="row 7"):
        write_and_fail(settings, say=said.append)
    (words,) = said
    aside = Path(words.removeprefix("no step was saved; the run's files were moved to "))
    assert (aside / "settings.toml").exists()
    assert (aside / "queue" / "journal").exists()
    begin(settings_in(tmp_path, run__seed=3))
    assert sorted(path.name for path in settings.run_folder.iterdir()) == [".lock", "format", "settings.toml"]


@pytest.mark.parametrize("error", [EngineError("gone"), KeyboardInterrupt(), RuntimeError("fault")])
def test_a_failed_run_can_be_resumed(tmp_path: Path, error: BaseException) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(type(error)), open_run(settings, resume=False, say=pytest.fail):
        raise error
    begin(settings, resume=True)


def test_a_mistake_after_a_checkpoint_leaves_the_run(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    (RunFolder(settings.run_folder).checkpoints / "step_1").mkdir(parents=True)
    with pytest.raises(DataError), open_run(settings, resume=False, say=pytest.fail):
        raise DataError("row 7")
    begin(settings, resume=True)


def test_a_refused_resume_keeps_a_run_without_checkpoints(tmp_path: Path) -> None:
    begin(settings_in(tmp_path))
    with pytest.raises(SettingsError, match=r"run\.seed: the run has 0, now 3"):
        begin(settings_in(tmp_path, run__seed=3), resume=True)
    begin(settings_in(tmp_path), resume=True)


def test_a_place_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(SettingsError, match=r"runs/run cannot be created \(.*Not a directory"):
        begin(settings_in(tmp_path))


def test_a_run_that_has_done_more_steps_is_not_resumed_for_fewer(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    begin(settings)
    (settings.run_folder / "checkpoints" / "step_7").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"has finished 7 steps, more than trainer\.steps = 4"):
        begin(settings_in(tmp_path, trainer__steps=4), resume=True)
    assert begin(settings_in(tmp_path, trainer__steps=7), resume=True) == []


MODES = {"owner": (0o700, 0o600), "group": (0o750, 0o640), "everyone": (0o755, 0o644)}
WRITE = "from pathlib import Path; Path('child').mkdir(); Path('child/file').touch()"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("readable_by", MODES)
def test_who_may_read_what_a_run_and_its_children_write(tmp_path: Path, readable_by: Any, umask: int) -> None:
    of_folders, of_files = MODES[readable_by]
    with open_run(settings_in(tmp_path, run__readable_by=readable_by), resume=False, say=pytest.fail) as folder:
        subprocess.run([sys.executable, "-c", WRITE], cwd=folder.path, check=True)
        (folder.path / "file").touch()
    assert [mode_of(folder.path / name) for name in ("", "child")] == [of_folders] * 2
    assert [mode_of(folder.path / name) for name in ("file", "child/file", "settings.toml")] == [of_files] * 3
    assert mode_of(folder.path / ".lock") == 0o600
    assert mode_of(tmp_path / "runs") == 0o777 & ~umask  # the parent folder of several runs keeps the umask's mode
    assert os.umask(umask) == umask  # the umask was restored


@pytest.mark.parametrize("before", [0o755, 0o700, 0o2770])
def test_a_folder_of_another_mode_gets_the_mode_of_the_setting(tmp_path: Path, before: int) -> None:
    settings = settings_in(tmp_path)
    begin(settings)
    settings.run_folder.chmod(before)
    begin(settings, resume=True)
    assert mode_of(settings.run_folder) == 0o700 | (before & 0o7000)
    assert mode_of(settings.run_folder / ".lock") == 0o600
    begin(settings_in(tmp_path, run__readable_by="group"), resume=True)
    assert mode_of(settings.run_folder) == 0o750 | (before & 0o7000)


def test_a_refused_run_gives_the_umask_back(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    before = os.umask(0o022)
    try:
        holder = RunFolder(settings.run_folder)
        holder.acquire()
        with pytest.raises(SettingsError, match="is in use by a live run"):
            begin(settings)
        assert os.umask(0o077) == 0o077  # equal to the holder's umask
        holder.release()
        (tmp_path / "runs" / "file").touch()
        with pytest.raises(SettingsError, match="cannot be created"):
            begin(settings_in(tmp_path, run__name="file"))
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.run_folder.mkdir(parents=True)
    (settings.run_folder / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=r"cannot be created .*symbolic link"):
        begin(settings)
    assert not (tmp_path / "elsewhere").exists()


AS_NOBODY = """
import fcntl, os, sys
from pathlib import Path
os.setgroups([]), os.setgid(65534), os.setuid(65534)
def tried(act):
    try:
        act()
        return "could"
    except OSError:
        return "could not"
folder = Path(sys.argv[1])
print(tried(lambda: list(folder.parent.iterdir())), tried(lambda: list(folder.iterdir())),
      tried(lambda: (folder / "settings.toml").read_text()), tried(lambda: os.open(folder / ".lock", os.O_RDONLY)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("readable_by", "seen"),
    [("owner", "could could not could not could not"), ("everyone", "could could could could not")],
)
def test_another_user_cannot_read_a_run_or_take_its_lock(readable_by: str, seen: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        settings = settings_in(Path(place), run__readable_by=readable_by)
        before = os.umask(0o022)
        try:
            with open_run(settings, resume=False, say=pytest.fail) as folder:
                command = [sys.executable, "-c", AS_NOBODY, str(folder.path)]
                said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        finally:
            os.umask(before)
        assert said == seen


def refusal_as_nobody(folder: Path) -> str:
    """Return the error of a process of another user that tries to hold a folder."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            RunFolder(folder).acquire()
        except SettingsError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_folder_that_another_user_put_there_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        (Path(place) / "run").mkdir()
        (Path(place) / "run").chmod(0o777)
        said = refusal_as_nobody(Path(place) / "run")
        assert "must belong to user 65534; found user 0, who could read and change the run" in said
        assert list((Path(place) / "run").iterdir()) == []
