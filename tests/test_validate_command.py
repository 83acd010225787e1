"""`validate` with several files and two policies, in both trainers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TinyRun, example_module, make_tiny_policy, make_tiny_run

from rl_async_trainer.main import main as async_main
from rl_core.testing import make_prompt, make_trajectory
from rl_metrics.validation import PairedDifference
from rl_sync_trainer.main import main
from rl_trainer_parts.commands import evaluate as evaluate_module
from rl_trainer_parts.commands.evaluate import comparison_lines
from rl_trainer_parts.rollouts import evaluation
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.settings.schema import Settings

REWARD = '''"""Whether the first digit is even. Each call adds a line to a file."""

from pathlib import Path

from rl_rollout.rewards import RewardResult

SCORES = Path(__file__).parent / "scores.txt"


def reward(given):
    first = given.response_text[:1]
    is_even = float(first in ("0", "2", "4", "6", "8"))
    if len(given.response_ids):
        with SCORES.open("a") as file:
            file.write(f"{given.prompt_uid} {'nan' if first == '7' else is_even}\\n")
    if first == "7":
        raise ValueError("seven")
    return RewardResult(reward=is_even, components={"acc": is_even}, extras={"pred": first})
'''
SAMPLED = ("--prompts.validation_samples=4", "--prompts.validation_temperature=1.0", "--metrics.console=off")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("validate"))
    make_tiny_policy(run.folder / "other", example_module("prepare").make_tokenizer(), seed=3)
    (run.folder / "reward.py").write_text(REWARD)
    return run


def scores_of(run: TinyRun, num_policies: int) -> list[dict[str, list[float]]]:
    """Return the scores of each policy by prompt, in the order of the calls."""
    lines = [line.split() for line in (run.folder / "scores.txt").read_text().splitlines()]
    size = len(lines) // num_policies
    found: list[dict[str, list[float]]] = [{} for _ in range(num_policies)]
    for number, (uid, score) in enumerate(lines):
        found[number // size].setdefault(uid, []).append(float(score))
    return found


def test_two_policies_on_two_files(
    run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    make = evaluation.make_engine
    monkeypatch.setattr(evaluation, "make_engine", lambda *given, **named: started.append(1) or make(*given, **named))
    (run.folder / "scores.txt").unlink(missing_ok=True)
    policies = [str(run.folder / name) for name in ("policy", "other")]
    data = [f"--data={run.folder}/train.parquet", "--data", f"held={run.folder}/validation.parquet"]
    words = [str(run.settings_file), *SAMPLED, *data, *(f"--policy={policy}" for policy in policies)]
    assert main(["validate", *words, "--json", str(run.folder / "scores.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(started) == 2, "one start of the engine for each policy"
    found = json.loads((run.folder / "scores.json").read_text())
    assert list(found["policies"]) == policies
    assert list(found["comparison"]) == ["train", "held"]
    of_policies = scores_of(run, 2)
    assert len(of_policies[0]) == 40
    means = {uid: [np.nanmean(scores[uid]) for scores in of_policies] for uid in of_policies[0]}
    held = set(list(means)[32:])  # the files are answered in their order
    for name, of_file in (("train", means.keys() - held), ("held", held)):
        pairs = np.array([means[uid] for uid in sorted(of_file)])
        one, differences = found["comparison"][name], pairs[:, 1] - pairs[:, 0]
        assert one["num_prompts"] == len(pairs)
        assert [one["a"], one["b"]] == pytest.approx(pairs.mean(axis=0))
        assert one["low"] < differences.mean() < one["high"]
        assert (one["p"] < 0.05) == (not one["low"] <= 0.0 <= one["high"])
    for metrics, side in zip(found["policies"].values(), "ab", strict=True):
        for name, one in found["comparison"].items():
            whole, sources = metrics[name]["set"], metrics[name]["sources"]
            assert whole[f"val-core/{name}/acc/mean@4"] == pytest.approx(one[side])
            assert sources["val-core/arithmetic/acc/mean@4"] == whole[f"val-core/{name}/acc/mean@4"]
            estimates = ("pass@4", "maj@4/mean", "pass@4/ci_low", "maj@4/ci_high")
            assert {f"val-core/{name}/acc/{estimate}" for estimate in estimates} <= set(whole)
    header, row = said[1].split(), said[2].split()
    assert header == ["set", "prompts", "mean", "pass@k", "majority"]
    assert row[:3] == ["train", "32", "mean@4"]
    assert row[3] == f"{found['comparison']['train']['a']:.3f}"
    num_complete = sum(not np.isnan(of_policies[0][uid]).any() for uid in means.keys() - held)
    assert found["policies"][policies[0]]["train"]["set"]["val-aux/train/acc/pass@4/num_prompts"] == num_complete < 32
    assert said[2].count(f" of {num_complete} prompts") == 2, "of pass@4 and of the majority"
    failed = " of 128 sessions of train failed and are left out. The first: reward function 'reward.py:reward'"
    assert any(line.startswith("note: ") and failed in line for line in said)
    assert said[-6:-4] == [f"A: {policies[0]}", f"B: {policies[1]}"]


def test_a_policy_is_scored_alone_as_in_a_comparison_and_in_both_trainers(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The asynchronous trainer, with two files and one of two policies, gives the first test's numbers."""
    file = run.folder / "alone.json"
    words = [str(run.settings_file), *SAMPLED, f"--data=held={run.folder}/validation.parquet"]
    assert async_main(["validate", *words, "--policy", str(run.folder / "other"), f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert found["comparison"] == {}
    alone = found["policies"][str(run.folder / "other")]["held"]
    words += [f"--policy={run.folder}/{name}" for name in ("policy", "other")]
    assert main(["validate", *words, f"--json={file}"]) == 0
    assert json.loads(file.read_text())["policies"][str(run.folder / "other")]["held"] == alone


def test_a_set_without_a_common_score_and_a_set_named_as_a_source(
    run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is compared and written, and the metrics of a set do not replace those of its data sources."""

    async def answered(settings: Settings, inputs: Inputs) -> dict[str, list[Answer]]:
        is_other = settings.policy.path.name == "other"
        return {
            "lost": [answer_to("0", "math", None if is_other else 1.0)],
            "math": [answer_to("0", "math", 0.0), *(answer_to(str(n), "code", float(is_other)) for n in range(1, 9))],
        }

    monkeypatch.setattr(evaluate_module, "validate_policy", answered)
    file = run.folder / "some.json"
    words = [str(run.settings_file), *(f"--policy={run.folder}/{name}" for name in ("policy", "other"))]
    assert main(["validate", *words, f"--json={file}"]) == 0
    said, found = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert said[-1] == "note: lost is not compared, because no prompt of it has a score of both policies."
    assert said[-2].startswith("B is better on 1 of 1 set, A on 0 ")
    assert found["comparison"].keys() == {"math"}
    assert found["comparison"]["math"]["p"] == found["comparison"]["math"]["p_holm"] == 2**-7
    metrics = found["policies"][str(run.folder / "other")]["math"]
    assert metrics["set"]["val-core/math/reward/mean@1"] == pytest.approx(8 / 9)
    assert metrics["sources"]["val-core/math/reward/mean@1"] == 0.0
    assert metrics["sources"]["val-core/code/reward/mean@1"] == 1.0


def answer_to(uid: str, source: str, reward: float | None) -> Answer:
    row = replace(make_trajectory(uid, 0), reward=reward)
    return Answer(prompt=replace(make_prompt(uid), data_source=source), trajectory=row, failure=None, source="test")


def test_an_interval_without_ends_is_a_dash() -> None:
    one = PairedDifference(num_prompts=2, a=0.0, b=1.0, low=-np.inf, high=np.inf, p=0.5, p_holm=0.5)
    assert list(comparison_lines(["before", "after"], {"few": one}))[3].split()[5:] == ["-", "0.5000", "0.5000"]


def test_the_verdict_counts_sets_with_a_clear_difference() -> None:
    equal = PairedDifference(num_prompts=9, a=0.5, b=0.5, low=-0.1, high=0.1, p=1.0, p_holm=1.0)
    better = replace(equal, b=0.75, low=0.125, high=0.375, p=0.002, p_holm=0.01)
    unclear = replace(better, p=0.02, p_holm=0.06)
    sets = {"one": better, "two": better, "three": better, "four": replace(better, b=0.25), "five": unclear}
    lines = list(comparison_lines(["before", "after"], sets))
    assert lines[:2] == ["A: before", "B: after"]
    assert lines[3].split() == ["one", "9", "0.500", "0.750", "+0.250", "+0.125", "to", "+0.375", "0.0020", "0.0100"]
    assert lines[-1].startswith("B is better on 3 of 5 sets, A on 1 (p < 0.05 after Holm's correction;")


MISTAKES = {
    "a missing file": (["--data=nowhere.jsonl"], "nowhere.jsonl"),
    "two files of one name": (["--data=a/x.jsonl", "--data=b/x.jsonl"], "--data has two files named 'x': a/x.jsonl"),
    "three policies": (
        ["--policy=a", "--policy=b", "--policy=c"],
        "once, or twice to compare two; found a, b, c",
    ),
    "a policy twice": (["--policy=a", "--policy=a"], "--policy once, or twice to compare two; found a, a"),
    "nothing": (["--prompts.validation=none", "--prompts.test=none"], "there is nothing to evaluate: use --data FILE"),
    "no file": (["--data"], "--data needs a value"),
    "JSON into a missing folder": (["--json=nowhere/x.json"], "--json nowhere/x.json cannot be written."),
    "JSON into a folder": (["--json=/"], "--json / cannot be written."),
    "JSON below a file": (["--json=/dev/null/x.json"], "--json /dev/null/x.json cannot be written."),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_before_a_model_loads(
    run: TinyRun, words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "make_engine", None)
    assert main(["validate", str(run.settings_file), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_broken_file_is_named_before_a_model_loads(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "make_engine", None)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": 3}\n')
    assert main(["validate", str(run.settings_file), f"--data={tmp_path}/broken.jsonl"]) == 2
    assert "broken.jsonl" in capsys.readouterr().err
