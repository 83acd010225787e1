"""The learner benchmark: its arithmetic and its batches."""

from math import nan

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from rl_distill.prefixes import prefix_forest

workload, summary = load_benchmark("_learner_workload"), load_benchmark("_learner_summary")
learner_bound = load_benchmark("_learner_bound")


def measured(losses: list[float], step_s: list[float]) -> object:
    about = {"peak_bytes": 300, "start_bytes": 100}
    return summary.Measured(step_s=step_s, losses=losses, grad_norms=[1.0] * len(losses), num_tokens=100, about=about)


def test_speed_is_of_the_median_step_after_the_warm_up() -> None:
    assert measured([1.0] * 4, [9.0, 1.0, 2.0, 4.0]).tokens_per_s == 50.0


def test_comparison_has_the_ratio_of_medians_and_of_each_round() -> None:
    ours, peer = measured([1.0] * 4, [9.0, 1.0, 2.0, 4.0]), measured([1.0] * 4, [1.0, 4.0, 3.0, 2.0])
    ours.about["peak_bytes"] = 200
    found = summary.comparison("ragged", ours, peer, peer="transformers")
    assert found["ratio"] == 1.5
    assert found["ratio_of_rounds"] == [4.0, 1.5, 0.5]
    assert not found["is_met"]
    assert found["memory_ratio"] == 0.5
    assert summary.comparison("equal", ours, peer, peer="transformers")["is_met"]
    assert not summary.comparison("shared_512_16", ours, peer, peer="ours_unshared")["is_met"]


def test_trees_are_held_against_their_bound() -> None:
    ours, unshared = measured([1.0] * 2, [1.0, 1.0]), measured([1.0] * 2, [1.0, 3.0])
    unshared.bound = 4.0
    found = summary.comparison("trees", ours, unshared, peer="ours_unshared")
    assert (found["bound"], found["share_of_bound"], found["wanted"], found["is_met"]) == (4.0, 0.75, 3.2, False)


def test_the_bound_weighs_what_is_left_by_its_seconds() -> None:
    forest = prefix_forest([np.arange(5), np.array([0, 1, 2, 9])], min_shared=2)
    assert learner_bound.num_pairs(forest) == 15 + 4  # a row of five tokens, and one more token that sees four
    seconds, whole = (learner_bound.Parts(tokens=a, head=1.0, attention=b) for a, b in ((6.0, 3.0), (10, 40)))
    half = learner_bound.Parts(tokens=5, head=1.0, attention=10)
    assert learner_bound.bound(seconds, unshared=whole, shared=half) == 10 / (3 + 1 + 0.75)
    fixed = learner_bound.Parts(tokens=6.0, head=1.0, attention=3.0, fixed=5.0)
    assert learner_bound.bound(fixed, unshared=whole, shared=half) == 15 / (5 + 3 + 1 + 0.75)


@pytest.mark.parametrize(
    ("operation", "shapes", "kind"),
    [
        ("aten::mm", [[8, 4], [4, 99]], "head"),
        ("aten::mm", [[8, 4], [4, 4]], "tokens"),
        ("torch_attn::_varlen_attn", [[8, 2, 4]], "attention"),
        ("aten::_fused_adamw_", [[], []], "fixed"),
        ("aten::zero_", [[512]], "fixed"),
        ("aten::fill_", [[512], []], "fixed"),
        ("aten::fill_", [[8, 4], []], "tokens"),
        ("aten::linalg_vector_norm", [[99, 4], []], "fixed"),
        ("aten::_fused_rms_norm", [[8, 1, 4]], "tokens"),
    ],
)
def test_operations_count_in_what_they_grow_with(operation: str, shapes: list[list[int]], kind: str) -> None:
    assert learner_bound.kind_of(operation, shapes, vocab_size=99) == kind


@pytest.mark.parametrize("losses", [[2.0, 2.001], [2.0, nan]])
def test_sides_that_disagree_are_refused(losses: list[float]) -> None:
    ours, peer = measured(losses, [1.0, 1.0]), measured([2.0, 2.0], [1.0, 1.0])
    with pytest.raises(summary.DisagreementError, match=r"loss must agree to 0\.0001"):
        summary.check_agreement(ours, peer, tolerance=1e-4)


def test_sides_that_agree_give_the_largest_difference() -> None:
    ours, peer = measured([2.0, 4.0002], [1.0, 1.0]), measured([2.0, 4.0], [1.0, 1.0])
    assert summary.check_agreement(ours, peer, tolerance=1e-4)["loss"] == pytest.approx(5e-5)


def test_model_flops_by_hand() -> None:
    # One layer with 2 heads of size 4: scores and weighted values take 4 * 8 FLOPs per pair. The rows have 4 + 16
    # pairs; a causal mask needs half of them. The backward pass takes twice as many FLOPs as the forward pass.
    found = summary.model_flops(num_parameters=10, lengths=[2, 4], attention_size=8)
    assert found == 6 * 10 * 6 + 3 * 4 * 8 * (4 + 16) / 2


def test_peak_is_found_by_the_name_of_the_device() -> None:
    assert summary.peak_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert summary.peak_bf16_flops("NVIDIA H100 PCIe") == 756e12
    assert summary.peak_bf16_flops("NVIDIA H200 NVL") is None
    assert summary.peak_bf16_flops("cpu") is None


@pytest.mark.parametrize("name", ["tiny", "8m", "0.6b"])
def test_workloads_have_as_many_tokens_and_the_fill_that_they_say(name: str) -> None:
    preset = workload.PRESETS[name]
    equal, ragged = (workload.make_rows(preset, kind, seed=3) for kind in ("equal", "ragged"))
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


def test_shared_workloads_begin_with_their_prompts() -> None:
    preset = workload.PRESETS["8m"]
    sizes = {"shared_256_8": (6400, 2), "shared_512_16": (10496, 1), "trees": (7424, 1)}
    for kind, (num_tokens, num_prompts) in sizes.items():
        rows = workload.make_rows(preset, kind, seed=1)
        assert len(rows.input_ids) == num_tokens
        assert len(set(rows.prompts.tolist())) == num_prompts
        begins: dict[int, bytes] = {}
        for start, prompt, length in zip(rows.offsets, rows.prompts, rows.prompt_lengths, strict=False):
            begin = rows.input_ids[start : start + length].tobytes()
            assert begins.setdefault(int(prompt), begin) == begin


def test_rows_are_the_same_in_every_process_and_train_their_responses() -> None:
    preset = workload.PRESETS["tiny"]
    rows, again = (workload.make_rows(preset, "ragged", seed=5) for _ in range(2))
    assert np.array_equal(rows.input_ids, again.input_ids)
    assert int(rows.loss_mask.sum()) == len(rows.input_ids) - int(rows.prompt_lengths.sum())
    first = rows.loss_mask[: rows.lengths[0]]
    assert first.tolist() == [place >= rows.prompt_lengths[0] for place in range(rows.lengths[0])]


def test_sizes_are_those_of_the_named_models() -> None:
    counts = {name: preset.num_parameters for name, preset in workload.PRESETS.items()}
    assert counts == {"tiny": 21_696, "8m": 7_999_488, "0.6b": 596_049_920}  # as Qwen3-0.6B
