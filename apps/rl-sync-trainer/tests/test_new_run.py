"""From `new` to the report, with the printed commands."""

import json
import shlex
from pathlib import Path

import pytest
from tiny_run import example_module, make_tiny_policy

from rl_sync_trainer.main import main
from rl_trainer_parts.machine.needs import needs_of
from rl_trainer_parts.settings.sources import load_settings

QUICK = (
    *("--rollout.engine=transformers", "--optimizer.num_threads=1"),
    *("--trainer.steps=2", "--trainer.keep_checkpoints=1"),
)


def test_commands_lead_from_new_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import torch

    monkeypatch.chdir(tmp_path)
    make_tiny_policy(Path("policy"), example_module("prepare").make_tokenizer())
    assert main(["new", "mine", "--model", "policy"]) == 0
    check, dry_run, train = (shlex.split(line) for line in capsys.readouterr().out.splitlines()[2:])
    assert dry_run == [*train, "--dry-run"]
    status = main([*check[1:], *QUICK, "--json"])
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert status == int(any(one["state"] == "problem" for one in checks.values()))
    assert "checkpoints need 1.2 MB" in checks["disk"]["found"]  # 2 * 38,176 parameters * 16 bytes
    num_threads = torch.get_num_threads()
    try:
        assert main([*train[1:], *QUICK]) == 0
    finally:
        torch.set_num_threads(num_threads)
    run = Path("runs/mine")
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
    assert (run / "report.html").stat().st_size > 10_000
    needs = needs_of(load_settings(Path("mine/settings.toml"), QUICK))
    tensors = [*run.glob("checkpoints/*/state/**/*.safetensors"), *run.glob("checkpoints/*/policy/*.safetensors")]
    assert len(tensors) >= 2
    size = sum(file.stat().st_size for file in tensors)
    assert needs.disk / 2 <= size < 1.3 * needs.disk / 2
