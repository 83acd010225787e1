"""Reward for JSON whose fields equal those of the ground truth."""

import json
from collections.abc import Mapping
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError
from rl_core.record_fields import NonNegativeFloat, settings_record
from rl_rollout.rewards.answers import tagged_answer
from rl_rollout.rewards.json_schema import read_json
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult


@settings_record
class JsonFields:
    """Share of the ground truth's fields that the response's JSON object has with equal values.

    The response's JSON is its text after the thinking, or else its last fenced block. Numbers are equal by value, and
    `true` is no 1; texts are equal without spaces at both ends; lists and objects in all their items. Other fields of
    the response do not count. Component: `parsed`. The extras list the wrong fields.

    Attributes:
        fields: Fields to compare; empty compares all of the ground truth.
        is_fractional: False gives 1 only if all fields are equal, else 0.
        relative: Accepted difference of numbers, as a share of the ground truth's.
        tag: Read only the text in `<tag>...</tag>`, which must occur once after the thinking.
    """

    fields: tuple[str, ...] = ()
    is_fractional: bool = True
    relative: NonNegativeFloat = 0.0
    tag: str = ""

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The ground truth is not an object with these fields.
        """
        expected = self._expected(given.ground_truth)
        text = tagged_answer(given.final_text, self.tag) if self.tag else given.final_text
        try:
            found = read_json(text or "")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            return RewardResult(reward=0.0, components={"parsed": 0.0})
        wrong = [
            name for name, value in expected.items() if name not in found or not self._is_equal(found[name], value)
        ]
        reward = 1.0 - len(wrong) / len(expected) if self.is_fractional else float(not wrong)
        return RewardResult(reward=reward, components={"parsed": 1.0}, extras={"wrong_fields": wrong} if wrong else {})

    def _expected(self, ground_truth: Json) -> dict[str, Json]:
        try:
            row = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        except ValueError:
            row = None
        names = self.fields or tuple(row if isinstance(row, Mapping) else ())
        if not names or not isinstance(row, Mapping) or not {*names} <= row.keys():
            wanted = f"the fields {', '.join(self.fields)}" if self.fields else "fields"
            raise DataError(
                f"the ground truth must be a JSON object with {wanted} for json_fields; found {preview(ground_truth)}. "
                "Repair the row."
            )
        return {name: row[name] for name in names}

    def _is_equal(self, found: Any, expected: Any) -> bool:
        """Compare values of JSON. The ground truth bounds the depth."""
        numbers = [isinstance(one, int | float) and not isinstance(one, bool) for one in (found, expected)]
        if all(numbers):
            return bool(found == expected or abs(found - expected) <= self.relative * abs(expected))
        if isinstance(expected, Mapping) and isinstance(found, Mapping):
            return found.keys() == expected.keys() and all(self._is_equal(found[k], expected[k]) for k in expected)
        if isinstance(expected, list | tuple) and isinstance(found, list):
            return len(found) == len(expected) and all(map(self._is_equal, found, expected))
        if isinstance(expected, str) and isinstance(found, str):
            return found.strip() == expected.strip()
        return type(found) is type(expected) and bool(found == expected)
