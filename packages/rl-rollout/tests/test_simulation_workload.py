"""Workload files: the shipped one is valid, and errors name the place of an invalid value."""

from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from rl_rollout.simulation.workload import EngineCosts, LearnerCosts, Lengths, read_workload

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "simulate").glob("*.toml"))
SMALL = """
name = "small"
[batch]
groups = 8
group_size = 4
mini_batch_groups = 2
[lengths]
quantiles = [[0, 10], [0.5, 100.5], [1, 1000]]
maximum = 800
[engine]
gpus = 2
slots = 16
decode = [[1, 0.01], [16, 0.025]]
[learner]
update_gpu_s_per_token = 1e-3
"""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_are_read(file: Path) -> None:
    assert read_workload(file).name == file.stem


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("groups = 8", "groups = 9", "batch.groups must be a multiple of batch.mini_batch_groups; found 9 and 2"),
        (
            "groups = 8",
            'groups = "8"',
            "groups of the workload: batch must be a whole number of at least 1; found '8' (str)",
        ),
        (
            "groups = 8",
            "groups = true",
            "groups of the workload: batch must be a whole number of at least 1; found True (bool)",
        ),
        ("gpus = 2", "gpu = 2", "unknown option of the workload: engine 'gpu'. Did you mean 'gpus'?"),
        ("gpus = 2", "", "engine needs the option 'gpus'"),
        ("gpus = 2", "gpus = 0", "gpus of the workload: engine must be a whole number of at least 1; found 0"),
        (
            "update_gpu_s_per_token = 1e-3",
            "update_gpu_s_per_token = 0.0",
            "learner must be a finite number above 0; found 0.0",
        ),
        ("[[1, 0.01], [16, 0.025]]", "[[16, 0.01], [1, 0.025]]", "engine.decode must be pairs"),
        (
            "[[1, 0.01], [16, 0.025]]",
            "[1, 0.01]",
            "a tuple, each a tuple, a number, a number; found [1, 0.01] (list), with int at 0",
        ),
        ("[[1, 0.01], [16, 0.025]]", "[[1, 0.01, 2]]", "decode of the workload: engine must be a tuple, each a tuple"),
        ("maximum = 800", "maximum = 800\nmedian = 5", "either median and sigma, or quantiles"),
        ("[[0, 10], [0.5, 100.5], [1, 1000]]", "[[0, 10], [0.5, 5]]", "lengths.quantiles must be pairs"),
        (
            "maximum = 800",
            "maximum = 800\ngroup_correlation = 1.5",
            "lengths must be a number of at least 0 and at most 1; found 1.5",
        ),
        (
            "[learner]",
            "[learner]\nefficiency_per_doubling = 0",
            "learner must be a number above 0 and at most 1; found 0",
        ),
        ("[engine]", "[engine", "is not TOML"),
        ("[[1, 0.01], [16, 0.025]]", f"[[1, {'9' * 400}]]", "with int too large to convert to float"),
        ("[engine]", "engine = 3\n[engines]", "engine"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    (tmp_path / "small.toml").write_text(SMALL.replace(old, new, 1))
    with pytest.raises(SettingsError, match=r"small\.toml") as refusal:
        read_workload(tmp_path / "small.toml")
    assert message in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml does not exist"):
        read_workload(tmp_path / "gone.toml")


def test_decoding_is_linear_between_points_and_goes_on_after_the_last() -> None:
    curve = EngineCosts(gpus=1, slots=8, decode=((2, 1.0), (4, 2.0), (6, 6.0))).step_seconds()
    assert curve == [1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert EngineCosts(gpus=1, slots=2, decode=((1, 3.0),)).step_seconds() == [3.0, 3.0, 3.0]


def test_learner_gets_faster_with_gpus_as_its_efficiency_says() -> None:
    costs = LearnerCosts(
        update_gpu_s_per_token=0.01,
        update_s=2.0,
        efficiency_per_doubling=0.9,
        reference_gpus=4,
        logprobs_gpu_s_per_token=0.002,
    )
    assert costs.updates_seconds(1000, num_updates=3, gpus=2) == pytest.approx(5.0 + 6.0)
    assert costs.updates_seconds(1000, num_updates=3, gpus=16) == pytest.approx(10 / (16 * 0.81) + 6.0)
    assert costs.logprobs_seconds(1000, gpus=4) == pytest.approx(0.5)


def test_lengths_need_one_distribution() -> None:
    with pytest.raises(SettingsError, match=r"either median and sigma, or quantiles"):
        Lengths(maximum=10)
    with pytest.raises(SettingsError, match=r"sigma of Lengths.* must be"):
        replace(read_workload().lengths, sigma=-1.0)
