"""Secrets in settings do not reach files, messages or trackers; on resume, the user provides them again."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import SettingsError
from rl_core.secret_settings import REDACTED
from rl_metrics.trackers import ConsoleTracker
from rl_rollout.rewards import build_scorer
from rl_trainer_parts.reporting.trackers import make_trackers
from rl_trainer_parts.run.folder import open_run
from rl_trainer_parts.settings.fields import plain_settings
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings, load_settings

SECRETS = ("sk-literal-1", "sk-literal-2", "sk-literal-3", "pw-literal-4", "sk-resolved")


def settings_in(tmp_path: Path, **headers: str) -> Settings:
    reward = {"url": "https://me:pw-literal-4@judge", "headers": {"Authorization": "Bearer sk-literal-1", **headers}}
    server = {"command": ["serve"], "env": {"TOKEN": "sk-literal-2", "OTHER": "$JUDGE_KEY"}}
    return build_settings(
        {
            "run": {"directory": tmp_path / "runs"},
            "policy": {"path": "policy"},
            "prompts": {"train": "train.jsonl"},
            "reward": {
                "parts": [
                    {"function": "http", "options": reward},
                    {"function": "mine.py:judge", "options": {"api_key": "sk-literal-3"}},
                ]
            },
            "rollout": {"loop": "tools", "loop_options": {"mcp_servers": {"files": server}}},
            "metrics": {"mlflow_uri": "https://me:pw-literal-4@mlflow"},
        }
    )


def begin(settings: Settings, *, resume: bool = False) -> Path:
    with open_run(settings, resume=resume, say=pytest.fail) as folder:
        return folder.path


def texts_below(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-resolved")
    folder = begin(settings_in(tmp_path, other="$JUDGE_KEY"))
    text = texts_below(folder)
    assert not [secret for secret in SECRETS if secret in text]
    written = tomllib.loads((folder / "settings.toml").read_text())
    headers = written["reward"]["parts"][0]["options"]["headers"]
    assert headers == {"Authorization": REDACTED, "other": "$JUDGE_KEY"}
    env = written["rollout"]["loop_options"]["mcp_servers"]["files"]["env"]
    assert env == {"TOKEN": REDACTED, "OTHER": "$JUDGE_KEY"}
    assert written["metrics"]["mlflow_uri"] == f"https://me:{REDACTED}@mlflow"


def test_a_resume_takes_secrets_from_the_user_and_compares_their_names(tmp_path: Path) -> None:
    begin(settings_in(tmp_path))
    begin(settings_in(tmp_path, Authorization="Bearer sk-literal-renewed"), resume=True)
    begin(settings_in(tmp_path, Authorization="Bearer $JUDGE_KEY"), resume=True)
    begin(settings_in(tmp_path), resume=True)
    with pytest.raises(SettingsError, match=r"reward\.parts: the run has") as caught:
        begin(settings_in(tmp_path, another="sk-literal-2"), resume=True)
    assert not [secret for secret in SECRETS if secret in str(caught.value)]


def test_a_run_begun_before_secrets_were_redacted_is_resumed(tmp_path: Path) -> None:
    file = begin(settings_in(tmp_path)) / "settings.toml"
    file.write_text(file.read_text().replace(f'Authorization = "{REDACTED}"', 'Authorization = "Bearer sk-literal-1"'))
    begin(settings_in(tmp_path), resume=True)
    assert "sk-literal-1" not in file.read_text()


def test_the_file_of_a_run_is_refused_where_it_lacks_a_secret(tmp_path: Path) -> None:
    file = begin(settings_in(tmp_path)) / "settings.toml"
    with pytest.raises(
        SettingsError, match=r"reward\.parts\[0\]\.options\.url: the secret is redacted in this file \("
    ):
        load_settings(file, environment={})


@pytest.mark.parametrize(("name", "kind"), [("wandb", "WandbTracker"), ("mlflow", "MlflowTracker")])
def test_trackers_get_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    seen: dict[str, Mapping[str, Any]] = {}

    class Tracker:
        def __init__(self, *_: Any, config: Mapping[str, Any], **__: Any) -> None:
            seen.update(config=config)

        def close(self) -> None:
            pass

    monkeypatch.setattr(f"rl_trainer_parts.reporting.trackers.{kind}", Tracker)
    settings = settings_in(tmp_path)
    metrics = replace(settings.metrics, trackers=(name,), report=False)
    console = ConsoleTracker(kind="off")
    make_trackers(settings.model_copy(update={"metrics": metrics}), tmp_path, console).close()
    text = json.dumps(seen["config"])
    assert REDACTED in text
    assert not [secret for secret in SECRETS if secret in text]
    assert seen["config"]["reward"] == plain_settings(settings)["reward"]


@pytest.mark.parametrize(
    "value",
    [
        '{headers = {Authorization = "Bearer sk-literal-1"}',
        '{url = "https://me:pw-literal-4@judge", headers = "sk-literal-1"}',
        '["sk-literal-1", {headers = {A = "sk-literal-2"}}]',
    ],
)
def test_a_mistake_in_options_does_not_show_them(tmp_path: Path, value: str) -> None:
    environment = {"RL__REWARD__OPTIONS": value, "RL__REWARD__FUNCTION": "http"}
    arguments = ["--policy.path=p", "--prompts.train=t"]
    with pytest.raises(SettingsError) as caught:
        build_scorer(load_settings(None, arguments, environment).reward)
    assert not [secret for secret in SECRETS if secret in str(caught.value) and value[0] != "["]
    assert "sk-literal-2" not in str(caught.value)


def test_a_reference_without_its_variable_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    environment = {
        "RL__REWARD__OPTIONS": '{url = "http://j", headers = {A = "$JUDGE_KEY"}}',
        "RL__REWARD__FUNCTION": "http",
    }
    settings = load_settings(None, ["--policy.path=p", "--prompts.train=t"], environment)
    with pytest.raises(
        SettingsError, match=r"headers\.A refers to the environment variable JUDGE_KEY, which is not set"
    ):
        build_scorer(settings.reward)
