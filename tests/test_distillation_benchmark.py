"""The distillation benchmark: its arithmetic and its workload."""

from argparse import Namespace

import pytest
import torch
from benchmark_modules import load_benchmark

distillation, workload = load_benchmark("distillation"), load_benchmark("_distillation_workload")


def answer(step_s: float, peak_bytes: float, loss: float = 2.0) -> dict[str, object]:
    norms = {"grad_norm_hidden": 1.0, "grad_norm_weight": 3.0}
    return {
        **norms,
        "step_s": step_s,
        "peak_bytes": peak_bytes,
        "start_bytes": 7e6,
        "loss": loss,
        "num_tokens": 100,
        "device": "cpu",
    }


def summarized(*, last_loss: float = 2.0) -> dict[str, object]:
    ours = [answer(9.0, 9e6), answer(1.0, 2e6), answer(2.0, 3e6), answer(4.0, 2e6, last_loss)]
    full = [answer(9.0, 9e6), answer(4.0, 9e6), answer(3.0, 12e6), answer(2.0, 9e6)]
    options = Namespace(preset="tiny", rounds=3, threads=2, quick=False)
    return distillation.summarize({"ours": ours, "full_softmax": full}, options, load_before=0.0)


def test_speed_is_of_the_median_step_and_memory_of_the_hungriest_after_the_warm_up() -> None:
    report = summarized()
    rows = {row["system"]: row for row in report["results"]}
    assert (rows["ours"]["tokens_per_s"], rows["ours"]["peak_memory_mb"]) == (50.0, 3.0)
    assert (rows["full_softmax"]["tokens_per_s"], rows["full_softmax"]["peak_memory_mb"]) == (33.3, 12.0)
    compared = report["comparison"]
    assert compared["speed"] == pytest.approx(1.5, abs=5e-3)
    assert compared["speed_of_rounds"] == [4.0, 1.5, 0.5]
    assert compared["memory"] == 0.25
    assert compared["is_speed_met"]
    assert compared["is_memory_met"]
    assert compared["do_agree"]


def test_sides_that_disagree_are_told() -> None:
    compared = summarized(last_loss=2.001)["comparison"]
    assert not compared["do_agree"]
    assert compared["largest_relative_difference"]["loss"] == pytest.approx(5e-4)


def test_the_workload_is_the_one_that_is_asked_for_and_the_same_in_every_process() -> None:
    preset = workload.PRESETS["cpu"]
    assert (preset.vocab_size, preset.top_k) == (151_936, 64)
    tiny = workload.PRESETS["tiny"]
    step, again = (workload.make_step(tiny, seed=3, device=torch.device("cpu")) for _ in range(2))
    assert torch.equal(step.hidden, again.hidden)
    assert torch.equal(step.ids, again.ids)
    assert all(len(set(row)) == tiny.top_k for row in step.ids.tolist())
    assert int(step.ids.max()) < tiny.vocab_size
    torch.testing.assert_close(step.logprobs.exp().sum(-1), torch.full((tiny.num_tokens,), 0.9))
    assert bool((step.logprobs.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("words", [["--rounds=0"], ["--json", "nowhere/at/all.json"]])
def test_mistakes_are_told_before_anything_is_measured(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distillation.main(words) == 2
    out, err = capsys.readouterr()
    assert "error" in err
    assert not out
