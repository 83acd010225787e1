import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_rollout.rewards import RewardInput, exact_match, last_boxed, last_number, number_match
from rl_rollout.rewards.answers import final_answer, opens_thinking
from rl_rollout.rewards.math_notation import plain_math
from rl_rollout.rewards.quantities import quantity


def response(text, ground_truth):
    return RewardInput(prompt_uid="p", response_text=text, response_ids=np.array([1]), ground_truth=ground_truth)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("3 then $1,234.50 in all", "1234.50"),
        ("x = -7", "-7"),
        ("(-7)", "-7"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("half is .5", "0.5"),
        ("-.5", "-0.5"),
        ("1,2", "2"),
        ("12,345,6", "6"),
        ("1,2345", "2345"),
        ("75%", "75"),
        ("2026-11-05", "5"),
        ("16 = 4²", "16"),
        ("7 and 1,234⁵", "7"),
        ("7 and 44½", "7"),
        ("7, not 4^2", "7"),
        ("7, not 4**12 or 2^{-3}", "7"),
        ("7 ²", "7"),
        ("x = \u22127", "-7"),
        ("(\u20137) or \uff0d7", "-7"),
        ("pages 3\u20137", "7"),
        ("7, not 1/4, 1 / 4 or 2026/11/05", "7"),
        (r"7, not \frac{1}{4}, \dfrac{1} {-4} or \frac14", "7"),
        ("7, not 1e5 or 4E-3", "7"),
        ("7, not 1_000_000", "7"),
        ("7, not 2 ^ 4 or 2 ** 4", "7"),
        ("**18**", "18"),
        ("The answer is **18**.", "18"),
        ("**Answer: 18**", "18"),
        ("**Answer:** 18", "18"),
        ("***18*** then `19`", "19"),
        ("5 or 5", "5"),
        ("__18__", "18"),
        ("**$18**", "18"),
        (r"**\boxed{18}**", "18"),
        ("**7** and **4**12", "7"),
        (r"$90^\circ$", "90"),
        (r"$90^{\circ}$", "90"),
        ("90^\u00b0", "90"),
        ("1{,}234", "1234"),
        (r"1\,234\,567.5", "1234567.5"),
        (r"1,\!234", "1234"),
        (r"1\!,\!234", "1234"),
        ("1\u202f234", "1234"),
        ("1 234", "1234"),
        ("In 2019 500 came", "500"),
        ("-$18", "-18"),
        (r"-\$18.50", "-18.50"),
        ("x = - 18", "-18"),
        ("5 - 3", "3"),
        ("18 cm^2", "18"),
        (r"18\,\text{cm}^{2}", "18"),
        ("18 m2", "18"),
        ("7, not x_1", "7"),
        ("7, not 2 1/4", "7"),
        (r"7, not 2\frac{1}{4} or 2 \frac14", "7"),
        ("7, not 2516_{8}", "7"),
        ("**18**apples", "18"),
        ("** 18 ** apples", "18"),
        ("18^{th}", "18"),
        (r"18^{\text{th}}", "18"),
        ("$18^{}$", "18"),
        ("90^o", "90"),
        ("1'234'567", "1234567"),
        ("18 m**2", "18"),
        ("18 CO2 or H2O", "18"),
        ("18 [1], [2].", "2"),
        ("18 [1, 2].", "18"),
        ("The answer is [18]", "18"),
        ("18 (Step 2 verified)", "18"),
        ("18x as fast", "18"),
        ("It is 18!", "18"),
        ("7, not 4x or 2\\pi", "7"),
        ("7, not 3\\sqrt{13}, \\sqrt{2}/2 or \u221a5", "7"),
        ("7, not 10-18", "7"),
    ],
)
def test_the_last_number_is_found(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "4²",
        "44²",
        "4.4³",
        "3½",
        "4₂",
        "4①",
        "4^2",
        "4**2",
        "2^{10}",
        "1/4",
        "1e4",
        "1_4",
        "4 1/2",
        r"4\frac12",
        "4_8",
        "4!",
        "4x",
    ],
)
def test_what_is_written_with_several_numbers_is_none_of_them(text):
    assert last_number(text) is None
    assert number_match(response(text, "4")) == 0.0


@pytest.mark.parametrize(
    "text", ["4 or 5", "4 or 5 or 5", "4, or maybe 5", r"$4$ or $\boxed{\text{5}}$", "1/4 or 5", "7-9 or 5"]
)
def test_a_number_that_or_joins_to_another_is_none(text):
    assert last_number(text) is None


def test_text_without_a_number_has_none():
    assert last_number("none at all, - . ,") is None


def test_last_number_of_long_text_takes_linear_time():
    assert last_number("1," * 200_000 + "7") == 7
    assert last_number("1 / " * 100_000 + r"\frac{" * 50_000 + "7") == 7


@pytest.mark.parametrize(
    "part",
    [
        *"!(){}[]$-+*/^_.,:;=<>|\\ \n1aA`'\"&%~\u03c0\u221a\xb2\xb0\u7b54",
        "\\(",
        "\\[",
        "\\frac",
        "\\boxed{",
        "\\begin{align}",
        "not $",
    ],
)
def test_long_texts_of_one_part_take_no_quadratic_time(part):
    start = time.process_time()
    for text in (part * (20_000 // len(part)), "1" + part * (20_000 // len(part)) + "1"):
        final_answer(text)
        last_number(text)
        quantity(plain_math(text[:5_000]))
    assert time.process_time() - start < 10.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{}", ""),
        (r"} { \boxed{7}", "7"),
        (r"\boxed{\boxed{7} + 1}", "7"),
        (r"\boxed 18", None),
        ("18", None),
    ],
)
def test_the_last_boxed_answer_is_found(text, inside):
    assert last_boxed(text) == inside


def test_last_boxed_of_many_open_boxes_is_not_quadratic():
    assert last_boxed(r"\boxed{" * 20_000) is None


def test_exact_match_compares_text():
    assert exact_match(response(" 18\n", "18")) == 1.0
    assert exact_match(response("18", 18)) == 1.0
    assert exact_match(response("18.0", 18)) == 0.0


@pytest.mark.parametrize(
    ("text", "begins_thinking", "reward"),
    [
        ("<think>18", False, 0.0),
        ("<think>17</think>18", False, 1.0),
        ("<think>18</think>17", False, 0.0),
        ("<think>17</think> or <think>18", False, 0.0),
        ("17</think>18", False, 1.0),
        ("18", True, 0.0),
        ("17</think>18", True, 1.0),
        ("18 <think>17", False, 1.0),
    ],
)
def test_thinking_is_no_answer(text, begins_thinking, reward):
    given = replace(response(text, "18"), begins_thinking=begins_thinking)
    assert number_match(given) == reward
    assert last_boxed(given.final_text.replace("18", r"\boxed{18}")) == ("18" if reward else None)


def test_a_long_space_before_an_answer_takes_no_long_time():
    started = time.monotonic()
    assert not opens_thinking(f"<|im_start|>{' ' * 200_000}a", ["<|im_start|>"])
    assert time.monotonic() - started < 10  # quadratic, it took minutes


def test_number_match_compares_the_last_number():
    assert number_match(response("12 + 6 is 18.0", "18")) == 1.0
    assert number_match(response("it is 1,018", "1018")) == 1.0
    assert number_match(response("18 or 19", "18")) == 0.0
    assert number_match(response("no idea", "18")) == 0.0
    with pytest.raises(DataError, match=r"must have a number for number_match; found 'one half'\. Repair the row"):
        number_match(response("no idea", "one half"))
