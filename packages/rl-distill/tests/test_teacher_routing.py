"""Routing of prompts to teachers, and errors at the start that name the setting."""

from typing import Any

import pytest
from distillation_fakes import make_options, make_prompt

from rl_core.errors import DataError, SettingsError
from rl_distill.teacher.routing import TeacherRouter


def problems(sources: dict[str, list[str]], prompts: list[Any], **options: Any) -> list[str]:
    return list(TeacherRouter(make_options(sources, **options)).problems(prompts))


def test_prompts_go_by_data_source_and_the_rest_to_the_default() -> None:
    router = TeacherRouter(make_options({"a": ["math", "algebra"], "b": ["code"]}, default_teacher="b"))
    found = [router.teacher_of(make_prompt("p", source)) for source in ("math", "algebra", "code", "law")]
    assert found == ["a", "a", "b", "b"]


def test_a_single_teacher_without_sources_scores_every_prompt() -> None:
    router = TeacherRouter(make_options({"only": []}))
    assert [router.teacher_of(make_prompt("p", source)) for source in ("math", "law")] == ["only", "only"]
    assert problems({"only": []}, [make_prompt("p0", "math"), make_prompt("p1", "law")]) == []


def test_prompts_go_by_any_column_as_python_writes_its_values() -> None:
    router = TeacherRouter(make_options({"easy": ["1"], "hard": ["2"], "yes": ["True"]}, route_by="level"))
    assert [router.teacher_of(make_prompt("p", level=level)) for level in (1, "2", True)] == ["easy", "hard", "yes"]


def test_a_prompt_that_no_teacher_answers_for_is_named() -> None:
    router = TeacherRouter(make_options({"a": ["math"]}))
    with pytest.raises(DataError, match=r"prompt 'p7', whose data_source is 'law'; 'a' scores 'math'"):
        router.teacher_of(make_prompt("p7", "law"))


@pytest.mark.parametrize("columns", [{}, {"level": None}, {"level": [1]}])
def test_a_prompt_without_one_value_in_the_column_is_named(columns: dict[str, Any]) -> None:
    router = TeacherRouter(make_options({"a": ["1"]}, route_by="level"))
    with pytest.raises(DataError, match=r"prompt 'p7' has none: .*(columns: none|it has )"):
        router.value_of(make_prompt("p7", **columns))


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({"a": ["math"], "b": ["math"]}, {}, r"teachers.a and distillation.teachers.b both score 'math'"),
        ({"a": ["math", "math"]}, {}, r"teachers.a.data_sources has 'math' twice"),
        ({"a": [], "b": ["math"]}, {}, r"teachers.a scores nothing: set its data_sources, or .*default_teacher = 'a'"),
        ({"a": ["math"]}, {"default_teacher": "b"}, r"default_teacher = 'b' is not a teacher; teachers: 'a'"),
    ],
)
def test_routes_that_no_prompts_could_make_right_are_refused(
    sources: dict[str, list[str]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        TeacherRouter(make_options(sources, **options))


def test_routes_that_fit_the_prompts_have_no_problem() -> None:
    prompts = [make_prompt("p0", "math"), make_prompt("p1", "code")]
    assert problems({"a": ["math"], "b": ["code"]}, prompts) == []
    assert problems({"a": ["math"], "b": []}, prompts, default_teacher="b") == []


def test_every_value_without_a_teacher_is_listed_once() -> None:
    prompts = [make_prompt(str(index), source) for index, source in enumerate(["law", "math", "art", "law"])]
    (problem,) = problems({"a": ["math"]}, prompts)
    assert "no teacher scores prompts whose data_source is 'law', 'art'; 'a' scores 'math'" in problem


def test_a_value_that_no_prompt_has_is_refused_even_with_a_default() -> None:
    (problem,) = problems({"a": ["mth"], "b": []}, [make_prompt("p", "math")], default_teacher="b")
    assert "teachers.a.data_sources has 'mth', but no prompt has it as its data_source" in problem
    assert "Did you mean 'math'?" in problem


def test_a_default_that_would_score_nothing_is_refused() -> None:
    (problem,) = problems({"a": ["math"], "b": []}, [make_prompt("p", "math")], default_teacher="b")
    assert "default_teacher = 'b' would score nothing" in problem
