"""Impossible options are refused where they are made, all in one error."""

import math
from typing import Any

import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_distill.options import LearnerOptions, ParallelOptions
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
