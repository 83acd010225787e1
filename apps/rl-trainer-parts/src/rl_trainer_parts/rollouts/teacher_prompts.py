"""Prompts of a policy that teaches itself: its own prompts with hints, demonstrations or feedback."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_core import Prompt, Trajectory
from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.files import preview
from rl_distill.teacher import TEACHER_PROMPT, SelfTeacherOptions
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.schema import Settings

FEEDBACK, BEST_RESPONSE = "feedback", "best_response"
"""Names in templates whose values are known only after the rollouts."""
NAME = re.compile(r"\{\{|\}\}|\{(\w+)\}")
"""A name in braces, or a doubled brace, which stands for a single one."""

Pairs = Sequence[tuple[Prompt, Trajectory]]


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """Makes the teacher's prompts.

    Attributes:
        options: Templates and columns of the prompts.
        tokenizer: The policy's tokenizer.
        longest: Maximum length in tokens.
    """

    options: SelfTeacherOptions
    tokenizer: PromptTokenizer
    longest: int

    @classmethod
    def of(cls, settings: Settings, tokenizer: PromptTokenizer) -> "TeacherPrompts":
        """Return what makes the prompts of a run; without templates, it changes nothing."""
        options = settings.distillation.self_teacher
        if not options.prompts:
            return cls(options, tokenizer, 0)
        positions = model_config(settings.policy.path, settings.policy.backend).max_position_embeddings
        return cls(options, tokenizer, positions - settings.rollout.max_response_tokens)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check the prompts whose text is known before the rollouts.

        Raises:
            DataError: A row lacks a column or has neither a text nor messages there, or its prompt is too long.
        """
        for prompt in prompts if self.options.prompts else ():
            values = _values(prompt)
            for template in self.options.prompts:
                where = f"distillation.self_teacher.prompts: {template!r} for prompt {prompt.uid!r}"
                if missing := {*_names(template)} - values.keys() - {FEEDBACK, BEST_RESPONSE}:
                    columns = ", ".join(map(repr, sorted(prompt.columns)))
                    raise DataError(f"{where} needs the column {min(missing)!r}; the row has {columns}.")
                if (size := len(self._filled(template, prompt, values))) > self.longest:
                    raise DataError(
                        f"{where} has {size} tokens; the model's positions leave {self.longest} beside "
                        "rollout.max_response_tokens. Shorten it."
                    )

    def added(self, pairs: Pairs) -> Pairs:
        """Return the trajectories of whole groups, with their teacher's prompts in the extras.

        Raises:
            DataError: A trajectory does not begin with its prompt.
        """
        return [(prompt, self._taught(prompt, one, pairs)) for prompt, one in pairs] if self.options.prompts else pairs

    def _taught(self, prompt: Prompt, one: Trajectory, pairs: Pairs) -> Trajectory:
        """Return a trajectory with the first teacher's prompt whose values are all known and that is not too long."""
        size = len(prompt.input_ids)
        if not np.array_equal(one.input_ids[:size], prompt.input_ids):
            raise DataError(
                f"session {one.session_index} of prompt {prompt.uid!r} must begin with the prompt's tokens, which "
                "distillation.self_teacher.prompts replaces. Use a rollout.loop that keeps them, such as "
                '"single_turn".'
            )
        values = {**_values(prompt), BEST_RESPONSE: self._best_response(one, pairs)}
        values |= {name: value for name, value in one.extras.items() if name == FEEDBACK}
        filled = (self._filled(template, prompt, values) for template in self.options.prompts)
        ids = next((ids for ids in filled if 0 < len(ids) <= self.longest), None)
        return one if ids is None else replace(one, extras={**one.extras, TEACHER_PROMPT: [size, ids]})

    def _best_response(self, one: Trajectory, pairs: Pairs) -> str | None:
        """Return the response with the highest reward of the group's other sessions; None if none is good enough."""
        others = [t for _, t in pairs if t.prompt_uid == one.prompt_uid and t.session_index != one.session_index]
        rewards = [t.reward or 0.0 for t in others]
        if max(rewards, default=-np.inf) < self.options.min_reward:
            return None
        best = others[int(np.argmax(rewards))]
        return self.tokenizer.decode([best.input_ids[best.num_prompt_tokens :]])[0]

    def _filled(self, template: str, prompt: Prompt, values: Mapping[str, Json]) -> list[int]:
        """Return the tokens of a template or column; none if a name has no value."""
        if any(values.get(name) in (None, "", []) for name in _names(template)):
            return []
        fill = lambda part: str(values[part[1]]) if part[1] else part[0][0]
        found = values[template] if template in values else NAME.sub(fill, template)
        where = f"distillation.self_teacher.prompts: {template!r} for prompt {prompt.uid!r}"
        found = str(found) if isinstance(found, int | float) else found
        if isinstance(found, str) and not prompt.messages:
            return self.tokenizer.encode([found], add_special_tokens=True)[0]
        if isinstance(found, str):
            found = [*prompt.messages[:-1], {**prompt.messages[-1], "content": found}]
        if not isinstance(found, list) or not all(isinstance(one, Mapping) and one.get("role") for one in found):
            expected = "a text, a number, or messages with role and content"
            raise DataError(f"{where} must be {expected}; found {preview(found)}.")
        text = self.tokenizer.render(found, where=where)
        return self.tokenizer.encode([text], add_special_tokens=False)[0]


def _names(template: str) -> list[str]:
    """Return the names in a template; a text without any is the name of a column."""
    return [name for name in NAME.findall(template) if name] or [template]


def _values(prompt: Prompt) -> dict[str, Json]:
    """Return the columns of a prompt, and its text or last message as "prompt"."""
    return {**prompt.columns, **({"prompt": prompt.messages[-1].get("content")} if prompt.messages else {})}
