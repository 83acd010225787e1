"""The learner benchmark: its arithmetic, its batches, and a run of the smallest preset that times nothing of note."""

import importlib.util
import json
import subprocess
import sys
from math import nan
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


workload, summary = load("_learner_workload"), load("_learner_summary")


def measured(losses: list[float], step_s: list[float]) -> object:
    return summary.Measured(step_s=step_s, losses=losses, grad_norms=[1.0] * len(losses), num_tokens=100)


def test_speed_is_of_the_median_step_after_the_warm_up() -> None:
    assert measured([1.0] * 4, [9.0, 1.0, 2.0, 4.0]).tokens_per_s == 50.0


def test_comparison_has_the_ratio_of_medians_and_of_each_round() -> None:
    ours, peer = measured([1.0] * 4, [9.0, 1.0, 2.0, 4.0]), measured([1.0] * 4, [1.0, 4.0, 3.0, 2.0])
    found = summary.comparison("ragged", ours, peer)
    assert found["ratio"] == 1.5
    assert found["ratio_of_rounds"] == [4.0, 1.5, 0.5]
    assert not found["is_met"]
    assert summary.comparison("equal", ours, peer)["is_met"]


@pytest.mark.parametrize("losses", [[2.0, 2.001], [2.0, nan]])
def test_sides_that_disagree_are_refused(losses: list[float]) -> None:
    ours, peer = measured(losses, [1.0, 1.0]), measured([2.0, 2.0], [1.0, 1.0])
    with pytest.raises(summary.DisagreementError, match=r"loss must agree to 0\.0001"):
        summary.check_agreement(ours, peer, tolerance=1e-4)


def test_sides_that_agree_give_the_largest_difference() -> None:
    ours, peer = measured([2.0, 4.0002], [1.0, 1.0]), measured([2.0, 4.0], [1.0, 1.0])
    assert summary.check_agreement(ours, peer, tolerance=1e-4)["loss"] == pytest.approx(5e-5)


def test_model_flops_by_hand() -> None:
    # One layer of 2 heads of 4: scores and their sum of values take 4 * 8 FLOPs a pair, 2 rows have 4 + 16 pairs, of
    # which causality needs half; the backward pass takes twice the forward one.
    found = summary.model_flops(num_parameters=10, lengths=[2, 4], attention_size=8)
    assert found == 6 * 10 * 6 + 3 * 4 * 8 * (4 + 16) / 2


def test_peak_is_found_by_the_name_of_the_device() -> None:
    assert summary.peak_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert summary.peak_bf16_flops("NVIDIA H100 PCIe") == 756e12
    assert summary.peak_bf16_flops("cpu") is None


@pytest.mark.parametrize("name", ["tiny", "8m", "0.6b"])
def test_workloads_have_as_many_tokens_and_the_fill_that_they_say(name: str) -> None:
    preset = workload.PRESETS[name]
    equal, ragged = (workload.make_rows(preset, kind, seed=3) for kind in workload.WORKLOADS)
    assert len(set(equal.lengths.tolist())) == 1
    assert abs(len(equal.input_ids) - len(ragged.input_ids)) <= preset.num_rows
    fills = []
    for seed in range(20):
        lengths = workload.make_rows(preset, "ragged", seed=seed).lengths
        parts = workload.padded_micro_batches(lengths, budget=preset.budget)
        assert sorted(np.concatenate(parts).tolist()) == list(range(preset.num_rows))
        assert all(len(part) * lengths[part].max() <= preset.budget for part in parts)
        fills.append(lengths.sum() / workload.num_padded_tokens(lengths, parts))
    assert 0.57 < np.mean(fills) < 0.68


def test_rows_are_the_same_in_every_process_and_train_their_responses() -> None:
    preset = workload.PRESETS["tiny"]
    rows, again = (workload.make_rows(preset, "ragged", seed=5) for _ in range(2))
    assert np.array_equal(rows.input_ids, again.input_ids)
    assert int(rows.loss_mask.sum()) == len(rows.input_ids) - int(rows.prompt_lengths.sum())
    first = rows.loss_mask[: rows.lengths[0]]
    assert first.tolist() == [place >= rows.prompt_lengths[0] for place in range(rows.lengths[0])]


def test_sizes_are_those_of_the_named_models() -> None:
    counts = {name: preset.num_parameters for name, preset in workload.PRESETS.items()}
    assert counts == {"tiny": 21_696, "8m": 7_999_488, "0.6b": 596_049_920}  # Qwen3-0.6B's


def test_quick_run_writes_rows_on_which_the_sides_agree(tmp_path: Path) -> None:
    report_path = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "learner.py"), "--quick", "--json", str(report_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    rows = report["results"]
    found = {(row["system"], row["workload"]) for row in rows}
    assert found == {(side, kind) for side in ("ours", "transformers") for kind in ("equal", "ragged")}
    assert all(row["tokens_per_s"] > 0 and row["peak_memory_mb"] > row["start_memory_mb"] > 0 for row in rows)
    fills = {(row["system"], row["workload"]): row["fill"] for row in rows}
    assert fills["ours", "ragged"] == fills["transformers", "equal"] == 1.0 > fills["transformers", "ragged"]
    for compared in report["comparisons"]:
        differences = compared["largest_relative_difference"]
        assert max(differences.values()) < 1e-4
    losses = {(row["system"], row["workload"]): row["losses"] for row in rows}
    assert len(set(losses["ours", "ragged"])) == 3  # it trains: a warm-up and two rounds, on batches of their own
