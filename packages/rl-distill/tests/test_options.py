"""Impossible options are refused where they are made, all in one error."""

import math
from dataclasses import astuple
from typing import Any

import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_distill.options import AdamOptions, LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_ranks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": -1e-6}, "learning_rate of LearnerOptions must be a finite number above 0; found -1e-06"),
        ({"learning_rate": math.nan}, "learning_rate of LearnerOptions must be a finite number above 0; found nan"),
        ({"eps": 0.0}, "eps of LearnerOptions must be a finite number above 0; found 0"),
        (
            {"micro_batch_tokens": "512"},
            "micro_batch_tokens of LearnerOptions must be a whole number of at least 1; found '512'",
        ),
        (
            {"micro_batch_tokens": 0},
            "micro_batch_tokens of LearnerOptions must be a whole number of at least 1; found 0",
        ),
        ({"warmup_steps": True}, "warmup_steps of LearnerOptions must be a whole number of at least 0; found True"),
        ({"num_threads": 0}, "num_threads of LearnerOptions must be a whole number of at least 1 or None; found 0"),
        ({"decay": "cosin"}, "decay of LearnerOptions must be one of 'linear', 'cosine'; found 'cosin'"),
        ({"recompute": "some"}, "recompute of LearnerOptions must be one of 'none', 'selective', 'full'; found 'some'"),
        ({"recompute_modules": ("all",)}, "must be a tuple, each one of 'core_attn', 'layernorm', 'mlp', 'moe'"),
        ({"recompute_modules": ()}, "of length at least 1; found ()"),
        ({"recompute_modules": ("mlp",)}, "recompute_modules = ['mlp'] has no effect with recompute = \"none\""),
        ({"recompute": "full", "recompute_modules": ("layernorm", "mlp")}, 'no effect with recompute = "full". Set'),
        ({"overlap_param_gather": True}, "overlap_param_gather needs overlap_grad_reduce = true"),
        ({"dtype": "float16"}, "dtype of LearnerOptions must be one of 'float32', 'bfloat16'; found 'float16'"),
        ({"betas": (0.9, 1.0)}, "a number of at least 0 and below 1; found (0.9, 1.0) (tuple), with float at 1."),
        ({"warmup_steps": 5, "decay_steps": 5}, "it must be above warmup_steps = 5"),
    ],
)
def test_impossible_learner_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        LearnerOptions(**options).check()
    assert said in str(refused.value)


def test_every_problem_is_said() -> None:
    with pytest.raises(SettingsError) as refused:
        LearnerOptions(seed=-1, clip_grad=-1.0, decay="none")  # type: ignore[arg-type]
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["decay", "clip_grad", "seed"]


def test_the_defaults_are_possible() -> None:
    assert refusal(LearnerOptions().check) is None
    assert refusal(LearnerOptions(recompute="selective", recompute_modules=("mlp",)).check) is None
    assert refusal(check_ranks, ParallelOptions()) is None


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"ranks": "2"}, "ranks of ParallelOptions must be a whole number of at least 1; found '2'"),
        ({"tensor": 0.5}, "tensor of ParallelOptions(ranks=1) must be a whole number of at least 1; found 0.5"),
        ({"ranks": 2, "tensor": 2, "sequence": "yes"}, "must be True or False; found 'yes'"),
    ],
)
def test_layouts_of_wrong_types_are_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_ranks(ParallelOptions(**layout))
    assert said in str(refused.value)


def test_the_defaults_are_those_of_the_documents() -> None:
    assert AdamOptions(learning_rate=0.0) == AdamOptions(
        learning_rate=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_grad=0.0
    )
    assert astuple(LoraOptions()) == (0, None, False, 0.0, ("all-linear",), "adapter", None)
    assert astuple(ParallelOptions()) == (1, 1, 1, 1, 1, 1, None, False, False, False)
    optimizer = (1e-6, "adam", 0, None, "linear", 0.0, (0.9, 0.999), 1e-8, 0.0, 1.0, 8192, 16)
    kernels = ("auto", "float32", "none", ("layernorm",), "auto", False, False, False, None, None, False, 0)
    assert astuple(LearnerOptions()) == optimizer + kernels


@pytest.mark.parametrize(
    ("options", "alpha", "scaling"),
    [
        ({"rank": 4}, 8.0, 2.0),
        ({"rank": 4, "alpha": 6.0}, 6.0, 1.5),
        ({"rank": 4, "alpha": 6.0, "rslora": True}, 6.0, 3.0),
        ({"rank": 16, "rslora": True}, 32.0, 8.0),
    ],
)
def test_an_adapter_is_scaled_by_its_rank_and_padding_keeps_the_scale(
    options: dict[str, Any], alpha: float, scaling: float
) -> None:
    lora = LoraOptions(**options)
    assert (lora.alpha_in_use, lora.scaling) == (alpha, scaling)
    assert lora.padded_from(lora.rank) is lora
    padded = lora.padded_from(1)
    assert padded.rank == lora.rank
    assert padded.scaling == pytest.approx(LoraOptions(**options | {"rank": 1}).scaling)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.0}, "alpha of LoraOptions"),
        ({"alpha": 1e9}, "alpha of LoraOptions"),
        ({"dropout": 1.0}, "dropout of LoraOptions"),
        ({"target_modules": ()}, "target_modules of LoraOptions"),
    ],
)
def test_impossible_adapters_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        LoraOptions(**options)
