"""Prompts of a policy that teaches itself: templates, columns, feedback, the group's best response."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tiny_run import TinyRun, make_tiny_run

from rl_core import Prompt, Trajectory
from rl_core.errors import DataError
from rl_distill.teacher import TEACHER_PROMPT
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.rollouts.teacher_prompts import TeacherPrompts
from rl_trainer_parts.settings.sources import load_settings

SDPO = ["{prompt}:{best_response};{feedback}", "{prompt}:{best_response}", "{prompt};{feedback}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("teacher-prompts"))


@pytest.fixture(scope="module")
def tokenizer(run: TinyRun) -> PromptTokenizer:
    return PromptTokenizer.load(run.folder / "policy")


def prompts_of(run: TinyRun, tokenizer: PromptTokenizer, *prompts: str, **options: Any) -> TeacherPrompts:
    words = [f"--distillation.self_teacher.{name}={value}" for name, value in options.items()]
    words += ["--distillation.self_teacher.model=policy", f"--distillation.self_teacher.prompts={list(prompts)}"]
    return TeacherPrompts.of(load_settings(run.settings_file, words, {}), tokenizer)


def plain(text: str, tokenizer: PromptTokenizer, **columns: Any) -> Prompt:
    ids = tokenizer.encode([text], add_special_tokens=True)[0]
    return Prompt(uid=text, input_ids=np.asarray(ids, np.int32), columns={"prompt": text, **columns})


def chat(*contents: str, tokenizer: PromptTokenizer, **columns: Any) -> Prompt:
    messages = tuple({"role": "user", "content": content} for content in contents)
    ids = tokenizer.encode([tokenizer.render(messages)], add_special_tokens=False)[0]
    return Prompt(
        uid=contents[-1], input_ids=np.asarray(ids, np.int32), messages=messages, columns={"prompt": "?", **columns}
    )


def response(
    prompt: Prompt,
    text: str,
    tokenizer: PromptTokenizer,
    *,
    session: int = 0,
    reward: float = 0.0,
    extras: Mapping[str, Any] | None = None,
) -> Trajectory:
    own = tokenizer.encode([text], add_special_tokens=False)[0]
    ids = np.asarray([*prompt.input_ids, *own], np.int32)
    mask = np.arange(len(ids)) >= len(prompt.input_ids)
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=session,
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        extras=extras or {},
    )


def texts(made: TeacherPrompts, *pairs: tuple[Prompt, Trajectory]) -> list[str | None]:
    """Return the teacher's prompt of each trajectory as text."""
    found = [one.extras.get(TEACHER_PROMPT) for _, one in made.added(pairs)]
    assert all(one is None or one[0] == len(prompt.input_ids) for one, (prompt, _) in zip(found, pairs, strict=True))
    return [None if one is None else made.tokenizer.decode([one[1]])[0] for one in found]


def test_a_template_fills_the_prompt_and_columns(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    made = prompts_of(run, tokenizer, "{hint}:{prompt}")
    raw, messages = plain("1+2", tokenizer, hint="9-9"), chat("7", "3+4", tokenizer=tokenizer, hint="5")
    made.check([raw, messages])
    pairs = [(one, response(one, "3", tokenizer)) for one in (raw, messages)]
    assert texts(made, *pairs) == ["9-9:1+2", "75:3+4="], "the last message is filled, and the template ends with ="
    assert [set(one.extras) for _, one in made.added(pairs)] == [{TEACHER_PROMPT}] * 2


def test_a_column_has_the_teacher_s_text_or_messages(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    made = prompts_of(run, tokenizer, "shown")
    given = chat("3+4", tokenizer=tokenizer, shown=[{"role": "user", "content": "1+1=2,3+4"}])
    text = chat("3+5", tokenizer=tokenizer, shown="1+1:3+5")
    assert texts(made, *((one, response(one, "7", tokenizer)) for one in (given, text))) == ["1+1=2,3+4=", "1+1:3+5="]


def test_a_column_of_numbers_is_a_text_and_other_values_are_refused(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    made = prompts_of(run, tokenizer, "hint")
    raw, messages = plain("1+2", tokenizer, hint=9), chat("3+4", tokenizer=tokenizer, hint=0)
    made.check([raw, messages])
    assert texts(made, *((one, response(one, "7", tokenizer)) for one in (raw, messages))) == ["9", "0="]
    for value in ({"a": 1}, ["1"], [{"content": "1"}]):
        for one in (plain("1+2", tokenizer, hint=value), chat("1+2", tokenizer=tokenizer, hint=value)):
            with pytest.raises(DataError, match=r"'hint' for prompt '1\+2' must be a text, a number, or messages .*"):
                made.check([one])


def test_doubled_braces_are_single_ones(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    made, one = prompts_of(run, tokenizer, "{{prompt}}{{{prompt}}}{}"), plain("1+2", tokenizer)
    made.check([one])
    braces = ["{prompt}{1+2}{}"]
    assert (
        made._filled(made.options.prompts[0], one, {"prompt": "1+2"})
        == tokenizer.encode(braces, add_special_tokens=True)[0]
    )


def test_the_first_template_with_all_values_is_used(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    """Feedback is the trajectory's own; a response is shown to the group's other sessions if its reward suffices."""
    made = prompts_of(run, tokenizer, *SDPO)
    first, second = plain("1+2", tokenizer), plain("2+2", tokenizer)
    made.check([first, second])
    pairs = [
        (first, response(first, "3", tokenizer, session=0, reward=1.0)),
        (first, response(first, "5", tokenizer, session=1, reward=0.5)),
        (first, response(first, "8", tokenizer, session=2, extras={"feedback": "8-5"})),
        (second, response(second, "6", tokenizer, session=0, reward=0.9, extras={"feedback": "6-2"})),
        (second, response(second, "7", tokenizer, session=1, reward=0.8)),
    ]
    assert texts(made, *pairs) == [None, "1+2:3", "1+2:3;8-5", "2+2;6-2", None]
    lower = prompts_of(run, tokenizer, *SDPO, min_reward=0.5)
    assert texts(lower, *pairs) == ["1+2:5", "1+2:3", "1+2:3;8-5", "2+2:7;6-2", "2+2:6"]


def test_without_templates_nothing_changes(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    one = plain("1+2", tokenizer)
    pairs = [(one, response(one, "3", tokenizer))]
    assert prompts_of(run, tokenizer).added(pairs) is pairs


def test_prompts_that_cannot_be_made_are_refused_by_name(run: TinyRun, tokenizer: PromptTokenizer) -> None:
    made, one = prompts_of(run, tokenizer, "{hint}:{prompt}"), plain("1+2", tokenizer, other="1")
    with pytest.raises(DataError, match=r"'\{hint\}:\{prompt\}' for prompt '1\+2' needs the column 'hint'; the row"):
        made.check([one])
    long = plain("1+2", tokenizer, hint="1" * 60)
    with pytest.raises(DataError, match=r"has 64 tokens; the model's positions leave 56 beside rollout\.max_response"):
        made.check([long])
    assert texts(made, (long, response(long, "3", tokenizer))) == [None]
    elsewhere = response(plain("9+9", tokenizer), "3", tokenizer)
    with pytest.raises(DataError, match=r"prompt '1\+2' must begin with the prompt's tokens, which distillation\.self"):
        made.added([(one, elsewhere)])
