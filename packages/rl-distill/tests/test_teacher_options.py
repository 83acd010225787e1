"""Options of distillation and their requirements on teachers, without importing torch."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rl_core.errors import SettingsError
from rl_distill.teacher.options import DistillationOptions, ResourceOptions, TeacherOptions

TEACHER = TeacherOptions(model="folder", data_sources=("math",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "num_top", "needs_hidden"),
    [
        ({"loss": "forward_kl"}, 64, False),
        ({"loss": "js", "top_k": 3}, 3, False),
        ({"loss": "uld", "top_k": 3}, 3, False),
        ({"loss": "k1"}, 0, False),
        ({"loss": "reverse_kl", "distribution": "full"}, 0, True),
    ],
)
def test_what_teachers_are_asked_for(options: dict[str, Any], num_top: int, needs_hidden: bool) -> None:
    found = DistillationOptions(teachers={"a": TEACHER}, **options)
    assert (found.num_top, found.needs_hidden, found.is_on) == (num_top, needs_hidden, True)


def test_without_teachers_and_texts_it_is_off_and_says_what_makes_no_sense_then() -> None:
    assert not DistillationOptions().is_on
    assert list(DistillationOptions().problems()) == []
    (problem,) = DistillationOptions(default_teacher="a").problems()
    assert problem.startswith("default_teacher = 'a' has no effect, since distillation is off. Add [distillation.")
    changed = DistillationOptions(loss="k1", top_k=12, coefficient=3.0)
    assert [line.split(" ")[0] for line in changed.problems()] == ["loss", "top_k", "coefficient"]


def test_texts_need_no_teacher_with_nll_alone() -> None:
    assert list(DistillationOptions(texts="answer", loss="nll").problems()) == []
    (problem,) = DistillationOptions(texts="answer").problems()
    assert 'loss = "forward_kl" compares with a teacher' in problem
    (problem,) = DistillationOptions(texts="answer", loss="nll", teachers={"a": TEACHER}).problems()
    assert "omit teachers" in problem


@pytest.mark.parametrize(
    "make",
    [
        lambda: TeacherOptions(model="folder", replicas=0),  # type: ignore[arg-type]
        lambda: TeacherOptions(model="folder", data_sources=("",)),  # type: ignore[arg-type]
        lambda: ResourceOptions(gpus=-1),
        lambda: DistillationOptions(coefficient=0),
    ],
)
def test_impossible_values_are_refused_where_they_are_made(make: Callable[[], object]) -> None:
    with pytest.raises(SettingsError, match=r"(replicas|data_sources|gpus|coefficient) of .* must be"):
        make()


def test_options_and_service_load_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, rl_distill.teacher.options, rl_distill.teacher.service, rl_distill.teacher.replicas; "
        "sys.exit(bool({'torch', 'megatron', 'vllm', 'transformers', 'ray', 'zarr'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
