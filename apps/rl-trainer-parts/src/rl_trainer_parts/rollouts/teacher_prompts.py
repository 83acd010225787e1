"""Prompts of a policy that teaches itself: the student's prompt with hints, demonstrations or feedback."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_core import Prompt, Trajectory
from rl_core.data import IntArray, Json
from rl_core.errors import DataError
from rl_distill.teacher import TEACHER_PROMPT, SelfTeacherOptions
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.schema import Settings

FEEDBACK, BEST_RESPONSE = "feedback", "best_response"
"""Names in templates that have values only after the rollouts."""

Pair = tuple[Prompt, Trajectory]


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
    def of(cls, settings: Settings, tokenizer: PromptTokenizer) -> "TeacherPrompts | None":
        """Return what makes the prompts; None if the teacher has none of its own."""
        options = settings.distillation.self_teacher
        if options.model is None or not options.prompts:
            return None
        positions = model_config(settings.policy.path, settings.policy.backend).max_position_embeddings
        return cls(options, tokenizer, positions - settings.rollout.max_response_tokens)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check the prompts whose text is known before the rollouts.

        Raises:
            DataError: A row lacks a column, or its prompt is too long.
        """
        for prompt in prompts:
            for template in self.options.prompts:
                names = {*_names(template)} - {FEEDBACK, BEST_RESPONSE}
                if missing := sorted(names - prompt.columns.keys() - {"prompt"}):
                    raise DataError(
                        f"distillation.self_teacher.prompts has {template!r}, but prompt {prompt.uid!r} has no column "
                        f"{missing[0]!r}; its columns: {', '.join(map(repr, sorted(prompt.columns)))}."
                    )
                ids = self._fill(template, prompt, _values(prompt))
                if ids is not None and len(ids) > self.longest:
                    raise DataError(
                        f"distillation.self_teacher.prompts: {template!r} gives prompt {prompt.uid!r} {len(ids)} "
                        f"tokens. With rollout.max_response_tokens, the model's positions leave {self.longest}. "
                        "Shorten it."
                    )

    def added(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the trajectories of whole groups, with their teacher's prompts in the extras.

        Raises:
            DataError: A trajectory does not begin with its prompt.
        """
        found = []
        for prompt, trajectory in pairs:
            size = len(prompt.input_ids)
            if trajectory.num_prompt_tokens != size or (trajectory.input_ids[:size] != prompt.input_ids).any():
                raise DataError(
                    f"session {trajectory.session_index} of prompt {prompt.uid!r} must begin with the prompt's tokens, "
                    "which distillation.self_teacher.prompts replaces. Use a rollout.loop that keeps the prompt, such "
                    'as "single_turn".'
                )
            values = _values(prompt) | {k: v for k, v in trajectory.extras.items() if k == FEEDBACK}
            if (best := self._best_response(trajectory, pairs)) is not None:
                values[BEST_RESPONSE] = best
            for template in self.options.prompts:
                ids = self._fill(template, prompt, values)
                if ids is not None and len(ids) <= self.longest:
                    trajectory = replace(trajectory, extras={**trajectory.extras, TEACHER_PROMPT: ids.tolist()})
                    break
            found.append((prompt, trajectory))
        return found

    def _best_response(self, trajectory: Trajectory, pairs: Sequence[Pair]) -> str | None:
        """Return the response with the highest reward of the group's other sessions, if it is high enough."""
        others = [
            one
            for prompt, one in pairs
            if prompt.uid == trajectory.prompt_uid and one.session_index != trajectory.session_index
        ]
        best = max(others, key=lambda one: one.reward or 0.0, default=None)
        if best is None or best.reward is None or best.reward < self.options.min_reward:
            return None
        return self.tokenizer.decode([best.input_ids[best.num_prompt_tokens :]])[0]

    def _fill(self, template: str, prompt: Prompt, values: Mapping[str, Json]) -> IntArray | None:
        """Return the tokens of a template or column; None if a name has no value."""
        if any(values.get(name) in (None, "", []) for name in _names(template)):
            return None
        filled = values[template] if template in values else NAME.sub(lambda name: str(values[name[1]]), template)
        where = f"distillation.self_teacher.prompts, prompt {prompt.uid!r}"
        if isinstance(filled, str) and not prompt.messages:
            (ids,) = self.tokenizer.encode([filled], add_special_tokens=True)
        else:
            last = (
                [*prompt.messages[:-1], {**prompt.messages[-1], "content": filled}]
                if isinstance(filled, str)
                else filled
            )
            (ids,) = self.tokenizer.encode([self.tokenizer.render(last, where=where)], add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)


NAME = re.compile(r"\{(\w+)\}")


def _names(template: str) -> list[str]:
    """Return the names in a template; a text without any is the name of a column."""
    return NAME.findall(template) or [template]


def _values(prompt: Prompt) -> dict[str, Json]:
    """Return the values of a prompt's names: its columns, and its text or last message as "prompt"."""
    text = prompt.messages[-1].get("content") if prompt.messages else prompt.columns.get("prompt")
    return {**prompt.columns, "prompt": text}
