"""The graders' classic traps: responses that must not score without a right answer, and right ones that must.

Programs that attack the tests or the sandbox are in test_rewards_cheats.py and test_rewards_attacks.py, forms of
mathematical answers in test_rewards_answers.py, and verdicts of judges in test_rewards_judge.py.
"""

import asyncio
import functools
import json
import sys
import time
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest

from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards import RewardInput, RewardScorer, resolve_reward
from rl_rollout.rewards.registry import REWARDS

ESSAY = "word " * 20_000
DOUBLES = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}]
PERSON = {"name": "Ada", "age": 36}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
THINK_ANSWER = {"tags": ["think", "answer"]}
PATTERN = {"pattern": r"a (\w+\s?)*=.*!", "timeout_s": 0.3}


class Trap(NamedTuple):
    """A response with the reward that it deserves."""

    text: str
    truth: object
    reward: float
    options: dict = MappingProxyType({})


def numbers(reward_of_thirds):
    """Return traps of answers that are numbers; the graders differ in whether 1/3 is one."""
    return {
        "right": Trap("So the answer is 42.", "42", 1.0),
        "empty": Trap("", "42", 0.0),
        "white space": Trap(" \n\t ", "42", 0.0),
        "in the thinking only": Trap("<think>It is 42.</think> I do not know.", "42", 0.0),
        "in thinking that does not end": Trap("<think>It is 42.", "42", 0.0),
        "thinking opened twice": Trap("<think><think>42</think>", "42", 0.0),
        "hedge": Trap("4 or 42", "42", 0.0),
        "hedge with a doubt": Trap("I get 4, or maybe 42", "42", 0.0),
        "hedge over many": Trap("3 or 4 or 5 or 6 or 42", "42", 0.0),
        "another number after it": Trap("It is 42. Or 43.", "42", 0.0),
        "a list that holds it": Trap("4, 42", "4", 0.0),
        "prompt echo": Trap("What is 40 + 2?", "42", 0.0),
        "prompt echo after a sentence": Trap("Add. What is 40.5 + 1.5?", "42", 0.0),
        "prefix": Trap("The answer is 420.", "42", 0.0),
        "suffix": Trap("The answer is 142.", "42", 0.0),
        "as part of a decimal": Trap("The answer is 42.5.", "42", 0.0),
        "opposite sign": Trap("The answer is -42.", "42", 0.0),
        "typographic minus": Trap("The answer is \u221242.", "-42", 1.0),
        "thousands": Trap("The answer is 1,234,567.", "1234567", 1.0),
        "thousands in the truth": Trap("The answer is 1234567.", "1,234,567", 1.0),
        "unit": Trap("The answer is 42 km.", "42", 1.0),
        "trailing zeros": Trap("The answer is 42.00.", "42", 1.0),
        "truncated fraction": Trap("The answer is 0.333.", "1/3", 0.0),
        "huge digits": Trap("The answer is " + "9" * 50_000, "42", 0.0),
        "huge exponent": Trap("The answer is 1e999999999.", "42", 0.0),
        "a long text": Trap(ESSAY, "42", 0.0),
        "digits of another script": Trap("The answer is \u0664\u0663.", "42", 0.0),
        "superscript digits": Trap("The answer is \u2074\u00b2.", "42", 0.0),
        "zero-width space in it": Trap("The answer is 4\u200b2.", "42", 0.0),
        "half of a surrogate pair": Trap("The answer is \ud800.", "42", 0.0),
        "null character": Trap("The answer is 4\x002.", "42", 0.0),
        "the truth of None": Trap("None", "42", 0.0),
        "infinity": Trap("Infinity", "42", 0.0),
        "not a number": Trap("NaN", "42", 0.0),
        "fraction": Trap("The answer is 1/3.", "1/3", reward_of_thirds),
    }


BOXES = {
    "last of several boxes": Trap(r"\boxed{42} no, \boxed{43}", "42", 0.0),
    "boxes joined": Trap(r"\boxed{4} or \boxed{42}", "42", 0.0),
    "boxes side by side": Trap(r"$\boxed{4}$ $\boxed{42}$", "42", 0.0),
    "the same box twice": Trap("\\boxed{42}\n\n\\boxed{42}", "42", 1.0),
    "all candidates": Trap(r"\boxed{41, 42, 43}", "42", 0.0),
    "hedge in a box": Trap(r"\boxed{42 \text{ or } 43}", "42", 0.0),
    "box in the thinking": Trap(r"<think>\boxed{42}</think> I give up.", "42", 0.0),
    "unclosed box": Trap(r"\boxed{42", "43", 0.0),
    "empty box": Trap(r"The answer is \boxed{}.", "42", 0.0),
    "box in a box": Trap(r"\boxed{\boxed{43} 42}", "42", 0.0),
    "an equation that names it": Trap(r"\boxed{x = 42 + y}", "42", 0.0),
    "a range around it": Trap(r"\boxed{0 \le x \le 42}", "42", 0.0),
    "plus or minus": Trap(r"\boxed{\pm 42}", "42", 0.0),
    "a variable": Trap(r"\boxed{x}", "42", 0.0),
    "deep braces": Trap(r"\boxed{" + "{" * 5_000 + "42" + "}" * 5_000 + "}", "43", 0.0),
    "deep fractions": Trap(r"\boxed{" + r"\frac{1}{" * 2_000 + "42" + "}" * 2_000 + "}", "42", 0.0),
    "a question after it": Trap(r"\boxed{42}. Does 42 make sense?", "42", 1.0),
    "right fraction": Trap(r"\boxed{\frac{1}{3}}", "1/3", 1.0),
    "six places": Trap(r"\boxed{0.333333}", "1/3", 1.0),
    "percent of another size": Trap(r"\boxed{42\%}", "4200", 0.0),
    "another unit": Trap(r"\boxed{42\text{ m}}", r"42\text{ cm}", 0.0),
}

TRAPS = {
    "exact_match": {
        "right": Trap(" Paris \n", "Paris", 1.0),
        "prefix": Trap("Paris, France", "Paris", 0.0),
        "case": Trap("paris", "Paris", 0.0),
        "case, ignored": Trap("PARIS", "Paris", 1.0, {"ignore_case": True}),
        "empty": Trap("", "Paris", 0.0),
        "None": Trap("", None, 0.0),
        "look-alike letters": Trap("\u0420aris", "Paris", 0.0),
        "zero-width space": Trap("Paris\u200b", "Paris", 0.0),
        "list": Trap("Paris or London", "Paris", 0.0),
        "after thinking": Trap("<think>Paris?</think>Paris", "Paris", 0.0),
        "tag after thinking": Trap("<think>Rome?</think><answer> Paris </answer>", "Paris", 1.0, {"tag": "answer"}),
        "tag in the thinking": Trap("<think><answer>Paris</answer></think>", "Paris", 0.0, {"tag": "answer"}),
        "two tags": Trap("<answer>Paris</answer><answer>Rome</answer>", "Paris", 0.0, {"tag": "answer"}),
        "tag in a tag": Trap("<answer><answer>Paris</answer></answer>", "Paris", 0.0, {"tag": "answer"}),
        "open tag": Trap("<answer>Paris", "Paris", 0.0, {"tag": "answer"}),
        "closed before it opens": Trap("</answer>Paris<answer>", "Paris", 0.0, {"tag": "answer"}),
        "no tag": Trap("Paris", "Paris", 0.0, {"tag": "answer"}),
        "no tag, and an empty truth": Trap("", "", 0.0, {"tag": "answer"}),
    },
    "number_match": {
        **{name: trap for name, trap in numbers(0.0).items() if trap.truth != "1/3"},
        "within the relative tolerance": Trap("It is 101.", "100", 1.0, {"relative": 0.01}),
        "outside of it": Trap("It is 101.01.", "100", 0.0, {"relative": 0.01}),
        "within the absolute tolerance": Trap("It is 0.3.", "0", 1.0, {"absolute": 0.3}),
        "a tolerance of a negative truth": Trap("It is -99.", "-100", 1.0, {"relative": 0.01}),
        "the sign with a tolerance": Trap("It is 100.", "-100", 0.0, {"relative": 0.5}),
        "relative to zero": Trap("It is 0.1.", "0", 0.0, {"relative": 0.5}),
        "a third within a tolerance": Trap("It is 0.333.", "0.3333333", 1.0, {"absolute": 0.001}),
        "a million digits with a tolerance": Trap("9" * 1_000_001, "42", 0.0, {"relative": 0.5}),
        "hedge in boxes": Trap(r"\boxed{4} or \boxed{5}", "5", 0.0),
        "hedge with a tolerance": Trap("12 or 13 or 14", "14", 0.0, {"absolute": 1.0}),
        "hedge in bold": Trap("**4**, or perhaps **$5**", "5", 0.0),
        "hedge with a fraction": Trap("1/4 or 5", "5", 0.0),
        "a hedge before the answer": Trap("4 or 5? It is 5", "5", 1.0),
        "no hedge": Trap("2 hours or 120 minutes", "120", 1.0),
        "not that number": Trap("not 5", "5", 1.0),
        "a number after the box": Trap(r"\boxed{4}, in 5 steps", "5", 1.0),
        "tag": Trap("<answer>42</answer> 1 box", "42", 1.0, {"tag": "answer"}),
    },
    "math_verify": {**numbers(1.0), **BOXES},
    "choice": {
        "right": Trap("The answer is (B).", "B", 1.0),
        "alone": Trap("B", "(B)", 1.0),
        "with its text": Trap("B) Paris", "B", 1.0),
        "lower case alone": Trap("b", "B", 1.0),
        "in a box": Trap(r"So \boxed{\text{B}}.", "B", 1.0),
        "on the last line": Trap("Paris is the capital.\n\nB", "B", 1.0),
        "corrected": Trap("Answer: A. Wait, no. Answer: B", "B", 1.0),
        "with what it is not": Trap("The answer is B, not A.", "B", 1.0),
        "bold": Trap("**Answer: B**", "B", 1.0),
        "with a reason": Trap("Answer: B because Paris is the capital.", "B", 1.0),
        "an opinion about it": Trap("The answer is B, I believe.", "B", 1.0),
        "in a tag": Trap("A or B? <answer>B</answer>", "B", 1.0, {"tag": "answer"}),
        "empty": Trap("", "A", 0.0),
        "the A in prose": Trap("A good idea is to add.", "A", 0.0),
        "the A in prose after the answer": Trap("Answer: A good idea is to add.", "A", 0.0),
        "the A of Answer": Trap("Answer", "A", 0.0),
        "the I in prose": Trap("I think so", "I", 0.0),
        "negated": Trap("The answer is not A.", "A", 0.0),
        "two letters": Trap("The answer is A or B.", "A", 0.0),
        "two letters in parentheses": Trap("Answer: A (or maybe B)", "A", 0.0),
        "with a slash": Trap("A/B", "A", 0.0),
        "with a comma": Trap("A, B", "A", 0.0),
        "all of the above": Trap("Answer: A and B", "A", 0.0),
        "two boxes": Trap(r"\boxed{A} and \boxed{B}", "A", 0.0),
        "the options again": Trap("A) London\nB) Paris\nC) Rome", "A", 0.0),
        "the options after the answer": Trap("Answer:\nA) London\nB) Paris", "A", 0.0),
        "each on a line": Trap("A\nB\nC", "C", 0.0),
        "prompt echo": Trap("Which of A, B and C is the answer?", "C", 0.0),
        "look-alike letter": Trap("Answer: \u0410", "A", 0.0),
        "in the thinking": Trap("<think>Answer: A</think>", "A", 0.0),
        "a word that begins with it": Trap("Answer: Berlin", "B", 0.0),
        "a name": Trap("Answer: B's", "B", 0.0),
        "thousands of answers": Trap("answer is a. x " * 2_000, "A", 0.0),
        "a long text": Trap(ESSAY, "A", 0.0),
        "rejected": Trap("A is wrong. B is the one.", "A", 0.0),
        "rejected in brackets": Trap("(A) is false.", "A", 0.0),
        "rejected after a marker": Trap("The answer is A. No, the answer is not A.", "A", 0.0),
        "rejected with a reason": Trap("C is not correct because water boils. So it must be D", "C", 0.0),
        "rejected one by one": Trap("D is impossible, B is impossible, hence C", "D", 0.0),
        "no, no, yes": Trap("A: no, B: no, C: yes", "A", 0.0),
        "false and true": Trap("(A) is false; (C) is true.", "A", 0.0),
        "false and true on lines": Trap("(A) is false.\n(B) is false.\n(C) is true.", "A", 0.0),
        "considered": Trap("B was considered but rejected. C", "B", 0.0),
        "all as sentences": Trap("A. B. C. D.", "A", 0.0),
        "or as a sentence": Trap("A. Or B.", "A", 0.0),
        "two in brackets": Trap("Answer: (A)(B)", "A", 0.0),
        "two boxes side by side": Trap(r"\boxed{A} \boxed{B}", "A", 0.0),
        "two boxes side by side, the last": Trap(r"\boxed{A} \boxed{B}", "B", 0.0),
        "taken back": Trap("The answer is A, no, B", "A", 0.0),
        "taken back, the last": Trap("The answer is A, actually B", "A", 0.0),
        "another in the next line": Trap("Answer: A\nor B", "A", 0.0),
        "another in the next sentence": Trap("Answer: A. Maybe B.", "A", 0.0),
        "the options with blank lines": Trap("Answer:\n\nA) London\n\nB) Paris", "A", 0.0),
        "a letter in the option's text": Trap("The answer is C) Vitamin D.", "C", 1.0),
        "an explanation after it": Trap("Answer: B\n\nExplanation: A is wrong.", "B", 1.0),
        "the same letter twice": Trap(r"\boxed{B} \boxed{B}", "B", 1.0),
        "alone in bold, after others": Trap("A is wrong, and C too.\n\n**B**", "B", 1.0),
        "with a text in lower case": Trap("(B) it increases", "B", 1.0),
        "a sentence with an article": Trap("The answer is B. A triangle has three sides.", "B", 1.0),
    },
    "format": {
        "right": Trap("<think>9 + 9</think>\n<answer>18</answer>\n", None, 1.0, THINK_ANSWER),
        "wrong order": Trap("<answer>18</answer><think>9 + 9</think>", None, 0.0, THINK_ANSWER),
        "missing": Trap("<answer>18</answer>", None, 0.0, THINK_ANSWER),
        "twice": Trap("<think>a</think><answer>1</answer><answer>2</answer>", None, 0.0, THINK_ANSWER),
        "nested": Trap("<think><answer>18</answer></think>", None, 0.0, THINK_ANSWER),
        "another pair inside": Trap("<think>a <think> b</think><answer>18</answer>", None, 0.0, THINK_ANSWER),
        "not closed": Trap("<think>a</think><answer>18", None, 0.0, THINK_ANSWER),
        "empty pair": Trap("<think> </think><answer>18</answer>", None, 0.0, THINK_ANSWER),
        "text before": Trap("Sure! <think>a</think><answer>18</answer>", None, 0.0, THINK_ANSWER),
        "text after": Trap("<think>a</think><answer>18</answer> Bye!", None, 0.0, THINK_ANSWER),
        "empty": Trap("", None, 0.0, THINK_ANSWER),
        "case": Trap("<THINK>a</THINK><ANSWER>18</ANSWER>", None, 0.0, THINK_ANSWER),
        "thousands of tags": Trap("<think>" * 50_000, None, 0.0, THINK_ANSWER),
        "pattern of all of it": Trap("a b = 1\n2!", None, 1.0, PATTERN),
        "pattern of a part": Trap("so a b = 1!", None, 0.0, PATTERN),
        "pattern that backtracks": Trap("a " + "a" * 40, None, 0.0, PATTERN),
        "pattern that backtracked before": Trap("a b =!", None, 1.0, PATTERN),
    },
    "language": {
        "right": Trap("It is 42: na\u00efve, \ufb01ne.", None, 1.0, {"scripts": ["latin"]}),
        "another language": Trap("\u041e\u0442\u0432\u0435\u0442: 42", None, 0.0, {"scripts": ["latin"]}),
        "half of it": Trap("abcd \u7b54\u6848\u662f\u4e8c", None, 0.5, {"scripts": ["latin"]}),
        "look-alike letters": Trap("\u0430\u0435\u043e\u0440", None, 0.0, {"scripts": ["latin"]}),
        "mathematical letters": Trap("\U0001d44e\U0001d44f \uff21", None, 1.0, {"scripts": ["latin"]}),
        "Japanese": Trap("\u65e5\u3005\u306e\u30fc\u30c6", None, 1.0, {"scripts": ["cjk", "hiragana", "katakana"]}),
        "marks of vowels": Trap("\u0939\u093f\u0928\u094d\u0926\u0940", None, 1.0, {"scripts": ["devanagari"]}),
        "empty": Trap("", None, 0.0, {"scripts": ["latin"]}),
        "no letters": Trap("42 ... 43", None, 0.0, {"scripts": ["latin"]}),
        "no letters, with a threshold of 0": Trap("42", None, 0.0, {"scripts": ["latin"], "min_share": 0.0}),
        "above the threshold": Trap("abcdefghi \u7b54", None, 1.0, {"scripts": ["latin"], "min_share": 0.9}),
        "below the threshold": Trap("abcdefgh \u7b54", None, 0.0, {"scripts": ["latin"], "min_share": 0.9}),
        "in the thinking": Trap("<think>\u7b54\u6848\u662f\u4e8c\u5341</think>", None, 10 / 15, {"scripts": ["latin"]}),
    },
    "json_fields": {
        "right": Trap('{"name": " Ada ", "age": 36.0, "more": 1}', PERSON, 1.0),
        "in a fence": Trap('Here:\n```json\n{"age": 36, "name": "Ada"}\n```', json.dumps(PERSON), 1.0),
        "half": Trap('{"name": "Ada", "age": 37}', PERSON, 0.5),
        "half, all or nothing": Trap('{"name": "Ada", "age": 37}', PERSON, 0.0, {"is_fractional": False}),
        "named fields only": Trap('{"age": 36}', PERSON, 1.0, {"fields": ["age"]}),
        "a list of candidates": Trap('{"name": "Ada", "age": [35, 36, 37]}', PERSON, 0.5),
        "a number as text": Trap('{"name": "Ada", "age": "36"}', PERSON, 0.5),
        "true for 1": Trap('{"n": true}', {"n": 1}, 0.0),
        "1 for true": Trap('{"n": 1}', {"n": True}, 0.0),
        "null for nothing": Trap("{}", {"n": None}, 0.0),
        "null": Trap('{"n": null}', {"n": None}, 1.0),
        "key twice": Trap('{"name": "Ada", "age": 1, "age": 36}', PERSON, 0.0),
        "text after it": Trap('{"name": "Ada", "age": 36} or 37', PERSON, 0.0),
        "two objects": Trap('{"age": 36}{"age": 37}', PERSON, 0.0),
        "a list of objects": Trap('[{"name": "Ada", "age": 36}]', PERSON, 0.0),
        "not a number": Trap('{"n": NaN}', {"n": 1}, 0.0),
        "infinite": Trap('{"n": 1e999}', {"n": 1}, 0.0, {"relative": 0.5}),
        "hundreds of digits": Trap('{"n": 1%s}' % ("0" * 400), {"n": 1.5}, 0.0, {"relative": 0.5}),
        "thousands of digits": Trap('{"n": 1%s}' % ("0" * 9000), {"n": 1.5}, 0.0, {"relative": 0.5}),
        "within a tolerance": Trap('{"n": [101]}', {"n": [100]}, 1.0, {"relative": 0.01}),
        "deep": Trap("[" * 100_000, PERSON, 0.0),
        "nested": Trap('{"n": {"a": [1, {"b": "c"}]}}', {"n": {"a": [1, {"b": "c"}]}}, 1.0),
        "nested with more": Trap('{"n": {"a": 1, "b": 2}}', {"n": {"a": 1}}, 0.0),
        "in the thinking": Trap('<think>{"name": "Ada", "age": 36}</think>', PERSON, 0.0),
        "empty": Trap("", PERSON, 0.0),
        "no JSON": Trap("Ada is 36", PERSON, 0.0),
    },
    "json_schema": {
        "right": Trap('{"name": "Ada", "age": 36}', SCHEMA, 1.0),
        "key twice": Trap('{"name": "Ada", "age": "x", "age": 36}', SCHEMA, 0.0),
        "text after it": Trap('{"name": "Ada", "age": 36}.', SCHEMA, 0.0),
        "not a number": Trap('{"name": "Ada", "age": NaN}', SCHEMA, 0.0),
        "true for a number": Trap('{"name": "Ada", "age": true}', SCHEMA, 0.0),
        "in the thinking": Trap('<think>{"name": "Ada", "age": 36}</think>', SCHEMA, 0.0),
        "empty": Trap("", SCHEMA, 0.0),
        "the schema itself": Trap(json.dumps(SCHEMA), SCHEMA, 0.0),
    },
    "code": {
        "right": Trap("print(int(input()) * 2)", DOUBLES, 1.0),
        "leaves early with success": Trap("import os\nos._exit(0)", DOUBLES, 0.0),
        "prints all expected outputs": Trap("print('4\\n6')", DOUBLES, 0.0),
        "right in a child alone": Trap("import os\nif os.fork() == 0: print(int(input()) * 3)", DOUBLES, 0.0),
        "floods its output": Trap("while True: print('4')", DOUBLES, 0.0),
        "right, and then fails": Trap("print(int(input()) * 2)\nraise SystemExit(3)", DOUBLES, 0.0),
        "in the thinking": Trap("<think>```python\nprint(int(input()) * 2)\n```</think>", DOUBLES, 0.0),
        "an older block of the right program": Trap(
            "```python\nprint(int(input()) * 2)\n```\n```python\nprint(0)\n```", DOUBLES, 0.0
        ),
        "empty": Trap("", DOUBLES, 0.0),
    },
}
CASES = [
    pytest.param(grader, trap, id=f"{grader}: {name}") for grader, row in TRAPS.items() for name, trap in row.items()
]
OWN_OPTIONS = {
    "code": {"isolation": "any", "limits": {"wall_s": 5.0}},
    "math_verify": {"timeout_s": 10.0, "num_workers": 1},
    "json_schema": {"timeout_s": 30.0, "num_workers": 1},
}
NEEDS = {"math_verify": "math_verify", "json_schema": "jsonschema"}


@functools.cache
def reward_of(grader, options):
    return resolve_reward(grader, OWN_OPTIONS.get(grader, {}) | json.loads(options))


def given(trap):
    ids = np.arange(len(trap.text), dtype=np.int32)
    return RewardInput(prompt_uid="p", response_text=trap.text, response_ids=ids, ground_truth=trap.truth)


@pytest.mark.parametrize(("grader", "trap"), CASES)
def test_a_response_scores_what_it_deserves(grader, trap):
    if grader in NEEDS:
        pytest.importorskip(NEEDS[grader])
    if grader == "code" and sys.platform != "linux":
        pytest.skip("the sandbox needs Linux")
    reward = reward_of(grader, json.dumps({**trap.options}))
    (scored,) = asyncio.run(RewardScorer(reward, timeout_s=60.0).score([given(trap)]))
    assert scored.failure is None
    assert scored.result.reward == pytest.approx(trap.reward)


@pytest.mark.parametrize(
    ("grader", "truth", "message"),
    [
        ("number_match", "1/3", "must have a number for number_match; found '1/3'. Repair the row, or use math_verify"),
        ("choice", "AB", "must be a letter, A to J; found 'AB'"),
        ("choice", 0, "must be a letter, A to J; found 0"),
        ("json_fields", None, "must be JSON with fields; found None"),
        ("json_fields", "[1]", "must be JSON with fields"),
        ("json_fields", "{", "must be JSON with fields"),
        ("json_fields", {}, "must be JSON with fields"),
    ],
)
def test_a_row_that_no_response_could_fit_is_named(grader, truth, message):
    with pytest.raises(DataError, match=message):
        resolve_reward(grader)(given(Trap("1", truth, 0.0)))


def test_a_row_without_a_named_field_is_named():
    with pytest.raises(DataError, match="must be JSON with name, city; found"):
        resolve_reward("json_fields", {"fields": ["name", "city"]})(given(Trap("{}", PERSON, 0.0)))


@pytest.mark.parametrize(
    ("grader", "options", "message"),
    [
        ("format", {}, "needs tags or a pattern; found neither"),
        ("format", {"tags": ["a"], "pattern": "b"}, "needs tags or a pattern; found both"),
        ("format", {"pattern": "("}, "pattern of reward 'format' is no regular expression: missing"),
        ("language", {"scripts": ["latn"]}, "unknown script of reward 'language' 'latn'. Did you mean 'latin'?"),
        ("language", {"scripts": []}, "scripts of LanguageReward must be"),
        ("number_match", {"relative": -0.1}, "relative of NumberMatch.* must be a finite number of at least 0"),
    ],
)
def test_impossible_options_are_refused(grader, options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward(grader, options)


def test_the_thinking_that_the_prompt_opens_belongs_to_the_form():
    answered = replace(given(Trap("9 + 9</think><answer>18</answer>", None, 0.0)), begins_thinking=True)
    assert resolve_reward("format", THINK_ANSWER)(answered).reward == 1.0
    assert resolve_reward("format", THINK_ANSWER)(replace(answered, begins_thinking=False)).reward == 0.0


@pytest.mark.parametrize(
    ("grader", "text", "truth", "votes"),
    [
        ("number_match", "It is 42.0", "1", {"pred": "42"}),
        ("number_match", "It is 0042", "1", {"pred": "42"}),
        ("number_match", "none", "1", {}),
        ("choice", "Answer: c", "A", {"pred": "C"}),
        ("choice", "A or B", "A", {}),
        ("exact_match", " Rome ", "Paris", {"pred": "Rome"}),
        ("exact_match", "x" * 201, "Paris", {}),
    ],
)
def test_answers_vote_for_a_majority(grader, text, truth, votes):
    assert resolve_reward(grader)(given(Trap(text, truth, 0.0))).extras == votes


@pytest.mark.parametrize(
    "part",
    [
        "answer is ",
        "answer is a. ",
        "A, ",
        "(",
        "**",
        "A) x\n",
        "\\boxed{A} and ",
        "correct option ",
        "\n",
        "answer is\n\n",
        "word B ",
    ],
)
def test_long_texts_of_one_part_take_no_quadratic_time(part):
    started = time.process_time()
    for text in (part * (200_000 // len(part)), "A" + part * (200_000 // len(part)) + "A"):
        resolve_reward("choice")(given(Trap(text, "A", 0.0)))
    assert time.process_time() - started < 5.0


def test_every_grader_of_answers_has_traps():
    others = {"http", "judge", "length_target", "overlong"}
    assert TRAPS.keys() | others == {*REWARDS.names()}
