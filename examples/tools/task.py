"""Products of two-digit numbers, and the two kinds of answers in demonstrations."""

import random
from dataclasses import dataclass

SMALLEST, LARGEST = 10, 99
NUM_VALIDATION = 256
NUM_TEST = 256
PAD_TOKEN = "<pad>"
END_TOKEN = "<eos>"
TOOLS = "multiply:"
"""The tools, as the chat template shows them before the question: one token."""
CALL, BETWEEN, CLOSE = '<tool_call>{"name": "multiply", "arguments": {"left": ', ', "right": ', "}}</tool_call>"
"""A call in the Hermes format: three tokens around its numbers."""
CHARACTERS = "0123456789*=[]"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ message.content }}="
    "{% elif message.role == 'tool' %}[{{ message.content }}]"
    "{% else %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One product.

    Attributes:
        left: First factor, 10 to 99.
        right: Second factor, 10 to 99.
    """

    left: int
    right: int

    @property
    def question(self) -> str:
        """The question, such as "37*58"."""
        return f"{self.left}*{self.right}"

    @property
    def answer(self) -> str:
        """The product, such as "2146"."""
        return str(self.left * self.right)

    @property
    def hasty_answer(self) -> str:
        """The product of the tens, such as "1500" for 37*58, which is right for one problem in a hundred."""
        return str(self.left // 10 * (self.right // 10) * 100)

    @property
    def call(self) -> str:
        """The call of the calculator that answers the question."""
        return f"{CALL}{self.left}{BETWEEN}{self.right}{CLOSE}"


def split_problems(seed: int = 0) -> dict[str, list[Problem]]:
    """Return all 8,100 problems, shuffled and split into three disjoint parts.

    Use `train` for training and `validation` to choose settings; `test` is only reported.
    """
    factors = range(SMALLEST, LARGEST + 1)
    problems = [Problem(left, right) for left in factors for right in factors]
    random.Random(seed).shuffle(problems)
    held_out = NUM_VALIDATION + NUM_TEST
    return {
        "train": problems[held_out:],
        "validation": problems[:NUM_VALIDATION],
        "test": problems[NUM_VALIDATION:held_out],
    }
