"""Impossible options are refused on use, all in one error."""

import math
from typing import Any

import pytest

from rl_core.errors import SettingsError
from rl_distill.options import LearnerOptions, ParallelOptions
from rl_distill.parallel_layout import check_ranks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": -1e-6}, "learning_rate must be above 0; found -1e-06"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0; found nan"),
        ({"eps": 0.0}, "eps must be above 0; found 0"),
        ({"micro_batch_tokens": "512"}, "micro_batch_tokens must be a whole number of at least 1; found '512'"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be a whole number of at least 1; found 0"),
        ({"warmup_steps": True}, "warmup_steps must be a whole number of at least 0; found True"),
        ({"num_threads": 0}, "num_threads must be a whole number of at least 1, or none; found 0"),
        ({"decay": "cosin"}, "decay must be one of 'linear', 'cosine'; found 'cosin'"),
        ({"recompute": "some"}, "recompute must be one of 'none', 'selective', 'full'; found 'some'"),
        ({"recompute_modules": ("all",)}, "recompute_modules must be some of core_attn"),
        ({"recompute_modules": ("mlp",)}, "recompute_modules = ['mlp'] has no effect with recompute = \"none\""),
        ({"recompute": "full", "recompute_modules": ("layernorm", "mlp")}, 'no effect with recompute = "full". Set'),
        ({"overlap_param_gather": True}, "overlap_param_gather needs overlap_grad_reduce = true"),
        ({"dtype": "float16"}, "dtype must be one of 'float32', 'bfloat16'; found 'float16'"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers >= 0 and < 1; found (0.9, 1.0)"),
        ({"warmup_steps": 5, "decay_steps": 5}, "it must be above warmup_steps = 5"),
    ],
)
def test_impossible_learner_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        LearnerOptions(**options).check()
    assert said in str(refused.value)


def test_every_problem_is_said() -> None:
    with pytest.raises(SettingsError) as refused:
        LearnerOptions(seed=-1, clip_grad=-1.0, decay="none").check()  # type: ignore[arg-type]
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["seed", "clip_grad", "decay"]


def test_the_defaults_are_possible() -> None:
    LearnerOptions().check()
    check_ranks(ParallelOptions())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"ranks": "2"}, "ranks must be a whole number of at least 1; found '2'"),
        ({"ranks": 2, "tensor": 2.0}, "tensor must be a whole number of at least 1; found 2.0"),
        ({"ranks": 2, "tensor": 2, "sequence": "yes"}, "sequence must be one of False, True; found 'yes'"),
    ],
)
def test_layouts_of_wrong_types_are_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_ranks(ParallelOptions(**layout))
    assert said in str(refused.value)
