"""Two-digit sums and differences, and the answers of demonstrations."""

import random
from dataclasses import dataclass

LARGEST_OPERAND = 99
NUM_VALIDATION = 500
NUM_TEST = 500
CHARACTERS = "0123456789+-=:,;"
PAD_TOKEN = "<pad>"
END_TOKEN = "<eos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum or difference.

    Attributes:
        left: First operand, 0 to 99.
        operator: "+" or "-".
        right: Second operand, 0 to 99.
    """

    left: int
    operator: str
    right: int

    @property
    def question(self) -> str:
        """The question, such as "37+58"; both operands have two digits."""
        return f"{self.left:02d}{self.operator}{self.right:02d}"

    @property
    def answer(self) -> str:
        """The result, such as "95" or "-21"."""
        return str(self.left + self.right if self.operator == "+" else self.left - self.right)

    @property
    def hasty_answer(self) -> str:
        """The result of each column without carrying or borrowing, which is right for less than half of the problems.

        For example, "85" for 37+58 and "25" for 52-37.
        """
        small, large = sorted((self.left, self.right))
        if self.operator == "+":
            return str((small // 10 + large // 10) % 10 * 10 + (small + large) % 10)
        sign = -1 if self.left < self.right else 1
        return str(sign * (abs(large // 10 - small // 10) * 10 + abs(large % 10 - small % 10)))

    @property
    def scratchpad(self) -> str:
        """The sums of units and tens, then the answer, such as ";15,8:95"."""
        sign = 1 if self.operator == "+" else -1
        units = self.left % 10 + sign * (self.right % 10)
        tens = self.left // 10 + sign * (self.right // 10)
        return f";{units},{tens}:{self.answer}"


def final_answer(response: str) -> str:
    """Return the answer in a response: the text after the last colon of a scratchpad, else the whole response."""
    return response.rpartition(":")[2] if response.startswith(";") else response


def split_problems(seed: int = 0) -> dict[str, list[Problem]]:
    """Return all 20,000 problems, shuffled and split into three disjoint parts.

    Use `train` for training and `validation` to choose settings; `test` is only reported.
    """
    operands = range(LARGEST_OPERAND + 1)
    problems = [Problem(left, operator, right) for left in operands for right in operands for operator in "+-"]
    random.Random(seed).shuffle(problems)
    held_out = NUM_VALIDATION + NUM_TEST
    return {
        "train": problems[held_out:],
        "validation": problems[:NUM_VALIDATION],
        "test": problems[NUM_VALIDATION:held_out],
    }
