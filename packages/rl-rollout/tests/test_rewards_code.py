import asyncio
import json
import sys
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rl_core.data.records import Prompt
from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards import RewardInput, RewardScorer, resolve_reward
from rl_rollout.rewards.code_reward import CodeReward, CodeStep, program_of, read_tests, same_output
from rl_rollout.rewards.code_runner import NotPlain, decode, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

DOUBLES = [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10\n"}]
ASSERTS = "assert f(2) == 4\nassert f([1]) == [1, 1]\nassert abs(f(1.5) - 3) < 1e-9"


@pytest.fixture(scope="module")
def share():
    return CodeReward(mode="share", isolation="any", limits={"wall_s": 10.0})


def response(program, ground_truth, *, fence=True):
    text = f"Here it is:\n```python\n{program}\n```\nDone." if fence else program
    return RewardInput(prompt_uid="p", response_text=text, response_ids=np.array([1]), ground_truth=ground_truth)


def score(reward, program, ground_truth, **options):
    return asyncio.run(reward(response(program, ground_truth, **options)))


def test_a_program_that_prints_is_compared_case_by_case(share):
    right = score(share, "print(int(input()) * 2)", DOUBLES)
    assert (right.reward, right.components) == (1.0, {"passed": 1.0, "timed_out": 0.0, "has_code": 1.0})
    half = score(share, "print(4)", DOUBLES)
    assert half.reward == 0.5
    assert half.extras == {"code_failure": "printed '4\\n'"}


def test_a_program_with_asserts(share):
    assert score(share, "def f(x): return x * 2", ASSERTS).reward == 1.0
    third = score(share, "def f(x): return x + x if isinstance(x, list) else 0", ASSERTS)
    assert third.reward == pytest.approx(1 / 3)
    assert third.extras["code_failure"] == "assert f(2) == 4: AssertionError: 0"


def test_mode_all_wants_every_test():
    reward = CodeReward(mode="all", isolation="any")
    assert score(reward, "print(int(input()) * 2)", DOUBLES).reward == 1.0
    wrong = score(reward, "print(4)", DOUBLES)
    assert (wrong.reward, wrong.components["passed"]) == (0.0, 0.5)
    assert score(reward, "def f(x): return 4", ASSERTS).reward == 0.0


HACKS = {
    "prints a verdict": "print('PASSED')\nprint('[0, \"passed\", null]')\ndef f(x): return 0",
    "leaves early with success": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "leaves in the test": "import os\ndef f(x): os._exit(0)",
    "equals everything": """
class All:
    def __eq__(self, other): return True
    def __sub__(self, other): return other
def f(x): return All()
""",
    "an integer that equals everything": """
class Any(int):
    def __eq__(self, other): return True
def f(x): return Any(9)
""",
    "writes to every descriptor": """
import os
for fd in range(64):
    for number in range(5):
        try: os.write(fd, f'[{number}, "passed", null]'.encode())
        except OSError: pass
def f(x): return 0
""",
    "replaces builtins": """
import builtins
builtins.abs = lambda x: 0
builtins.eval = lambda *given: 4
def f(x): return 1
""",
    "prints in the child": "import os\nif os.fork() == 0:\n    print('PASSED')\n    os._exit(0)\ndef f(x): return 0",
}


@pytest.mark.parametrize("program", HACKS.values(), ids=HACKS)
def test_what_a_program_prints_or_pretends_is_no_verdict(share, program):
    assert score(share, program, ASSERTS).reward == 0.0


def test_a_case_is_failed_by_an_exit_code_even_when_the_output_is_right(share):
    failed = score(share, "print(int(input()) * 2); raise ValueError('late')", DOUBLES)
    assert failed.reward == 0.0
    assert failed.extras["code_failure"] == "the program ended with exit code 1: ValueError: late"


@pytest.mark.parametrize("ground_truth", [DOUBLES, ASSERTS])
def test_a_program_that_hangs_counts_as_timed_out(ground_truth):
    reward = CodeReward(mode="share", isolation="any", limits={"wall_s": 0.5}, total_s=0.5)
    hung = score(reward, "while True: pass", ground_truth)
    assert (hung.reward, hung.components["timed_out"]) == (0.0, 1.0)


def test_a_program_without_processor_time_left_counts_as_timed_out():
    reward = CodeReward(mode="share", isolation="any", limits={"wall_s": 60.0, "cpu_s": 1.0})
    busy = score(reward, "def f(x):\n    while x != 2: pass\n    return 4", "assert f(2) == 4\nassert f(3) == 6")
    assert (busy.reward, busy.components["timed_out"]) == (0.5, 0.5)


def test_tests_before_a_hang_count(share):
    reward = CodeReward(mode="share", isolation="any", limits={"wall_s": 2.0})
    program = "def f(x):\n    while x != 2: pass\n    return 4"
    assert score(reward, program, "assert f(2) == 4\nassert f(3) == 6").reward == 0.5


def test_no_program_is_worth_nothing():
    reward = CodeReward(isolation="any", needs_fence=True)
    nothing = score(reward, "just words", DOUBLES, fence=False)
    assert (nothing.reward, nothing.components["has_code"]) == (0.0, 0.0)
    assert (
        score(reward, "def f(:", ASSERTS)
        .extras["code_failure"]
        .endswith("SyntaxError: invalid syntax (answer.py, line 1)")
    )


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\nnot closed", "not closed"),
        ("a = 1", "a = 1"),
        ("   ", None),
        ("```python\n```", None),
    ],
)
def test_which_text_is_the_program(text, program):
    assert program_of(text, needs_fence=False) == program


def test_prose_is_no_program_where_a_fence_is_needed():
    assert program_of("a = 1", needs_fence=True) is None


def test_ground_truths_are_read_as_tests():
    assert read_tests(DOUBLES) == read_tests(json.dumps(DOUBLES))
    assert read_tests({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}) == read_tests(DOUBLES)
    assert read_tests({"tests": ["assert f(1) == 1"], "setup": "import math"}) == (
        [],
        [CodeStep(kind="setup", source="import math"), CodeStep(kind="check", source="assert f(1) == 1")],
    )
    assert read_tests(["x = 3\nassert f(x) == -x", "assert {1: (2,)} == f(1)", "assert f(1) is None"])[1] == [
        CodeStep(kind="between", source="x = 3"),
        CodeStep(kind="check", source="assert f(x) == -x"),
        CodeStep(kind="check", source="assert {1: (2,)} == f(1)"),
        CodeStep(kind="check", source="assert f(1) is None"),
    ]
    human_eval = "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"
    assert read_tests(human_eval) == ([], [CodeStep(kind="check", source=human_eval)])
    assert len(read_tests(ASSERTS)[1]) == 3


@pytest.mark.parametrize(
    "test",
    [
        "for x in range(3):\n    assert f(x) == 2 * x\nassert f(5) == 10",
        "assert f(5) == 10\nif f(1) != 2:\n    raise ValueError",
        "def check(candidate):\n    assert candidate(1) == 2\nassert f(5) == 10\ncheck(f)",
    ],
)
def test_what_stands_between_assertions_is_no_set_up_that_may_fail(share, test):
    assert score(share, "def f(x): return 10", [test]).components["passed"] == 0.5
    assert score(share, "def f(x): return 2 * x", ["import nowhere", test]).reward == 1.0


@pytest.mark.parametrize(
    "ground_truth",
    [
        None,
        18,
        "def test_that_nothing_calls():\n    assert f(1) == 2",
        ["import math"],
        [],
        {},
        [1],
        [{"input": "1"}],
        "",
        {"tests": []},
        {"inputs": ["1"], "outputs": []},
        "import math\nx = 1\nassert",
        {"tests": ["assert f(1) == 1"], "setup": "import"},
        "def f(:",
    ],
)
def test_rows_without_tests_are_the_rows_fault(ground_truth):
    with pytest.raises(DataError, match="the ground truth"):
        read_tests(ground_truth)


def test_how_output_is_compared():
    assert same_output("1 2 \n3\n\n", "1 2\n3", compare="lines")
    assert not same_output("1  2\n3", "1 2\n3", compare="lines")
    assert same_output("1  2\n3", "1 2 3\n", compare="tokens")
    assert not same_output("\n1", "1", compare="lines")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(st.integers() | st.text(max_size=3), children, max_size=3)
        | st.frozensets(st.integers(), max_size=4)
    ),
)


def through_a_pipe(value):
    return decode(json.loads(json.dumps(encode(value))))


@hypothesis_given(plain)
def test_plain_data_passes_through_the_pipe_as_it_is(value):
    assert through_a_pipe(value) == value


def test_what_is_plain_data():
    made = [Fraction(1, 3), Decimal("1.50"), date(2026, 1, 2), timedelta(seconds=3), range(1, 9, 2), float("inf")]
    assert through_a_pipe(made) == made
    assert through_a_pipe([np.array([1, 2]), np.float64(0.5), np.bool_(True)]) == [[1, 2], 0.5, True]
    assert through_a_pipe([True, 1, 1.0]) == [True, 1, 1.0]
    assert [type(value) for value in through_a_pipe([True, 1, 1.0])] == [bool, int, float]
    assert next(through_a_pipe(iter([3, 4]))) == 3
    with pytest.raises(NotPlain, match="a Liar, which is not plain data"):
        encode([Liar()])
    cycle = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested too deeply"):
        encode(cycle)


class Liar:
    """An object that claims to be a number."""

    __class__ = property(lambda _: int)


ASKED_AND_RIGHT = {
    "def f(x): return x * 2": "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    "def sum(a, b): return a + b": "assert sum(1, 2) == 3",
    "def f(x): return x * 2.0": "import math\nassert math.isclose(f(2), 4)\nassert re.match('4', str(f(2)))",
    "def g(n):\n    for i in range(n): yield i": "assert list(g(3)) == [0, 1, 2]\nassert next(g(3)) == 0",
    "LIMIT = {1: 'one'}\ndef big(n): return n ** 5000": "assert LIMIT.get(1) == 'one'\nassert big(10) == 10 ** 5000",
    "def f(a, *, operation, self=0): return a + operation + self": "assert f(1, operation=2, self=3) == 6",
    "def name(name): return name": "assert name(name='x') == 'x'",
    "def order(x, y): x.sort(); y.clear()": "x, y = [3, 1], {1: 2}\norder(x, y)\nassert (x, y) == ([1, 3], {})",
    "def f(x): raise ValueError(x)": "try:\n    f(-1)\nexcept ValueError as e:\n    said = str(e)\nassert said == '-1'",
    "from fractions import Fraction as half\ndef f(): return half(1, 2)": "assert f() * 2 == 1",
    "def is_none(x): return x is None": "assert is_none(None) is True\nassert is_none(1) is False",
}


@pytest.mark.parametrize(("program", "tests"), ASKED_AND_RIGHT.items())
def test_right_programs_pass_outside_too(share, program, tests):
    result = score(share, program, tests)
    assert result.reward == 1.0, result.extras


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("def f(node): return node.value", "class Node: value = 3\nassert f(Node()) == 3", "a Node"),
        ("def memo(f): return f", "@memo\ndef square(x): return x * x\nassert square(3) == 9", "a function"),
        ("def twice(f, x): return f(f(x))\ndef g(x): return x + 1", "assert twice(g, 1) == 3", "a function"),
    ],
)
def test_what_cannot_leave_the_tests_is_the_rows_fault_unless_they_run_inside(share, program, tests, passed):
    with pytest.raises(
        DataError, match=rf'passes the program {passed}, which is not plain data(.|\n)*checks = "inside"'
    ):
        score(share, program, tests)
    inside = CodeReward(isolation="any", checks="inside")
    assert score(inside, program, tests).reward == 1.0


def test_a_wrong_program_fails_inside():
    inside = CodeReward(isolation="any", checks="inside")
    assert score(inside, "def f(node): return 4", "class Node: value = 3\nassert f(Node()) == 3").reward == 0.0


QUEUE = "class Queue:\n    def __init__(self, *given): self.given = given\n    def first(self): return self.given[0]"


@pytest.mark.parametrize(
    "tests",
    [
        "assert Queue(1, 2).first() == 1",
        {"tests": ["assert check(Queue.first) == 1"], "setup": "def check(first): return first(Queue(1))"},
        "try:\n    queue = 1\nexcept Queue:\n    queue = 2\nassert queue == 1",
    ],
)
def test_rows_that_need_objects_of_the_program_are_refused_by_the_classs_name(share, tests):
    with pytest.raises(DataError, match=r'class Queue, but its objects(.|\n)*Repair the row, or set checks = "inside"'):
        score(share, QUEUE, tests)
    prompt = Prompt(uid="p0", input_ids=np.array([1], dtype=np.int32), ground_truth=tests)
    with pytest.raises(DataError, match="class Queue"):
        asyncio.run(share.rehearse(prompt))
    assert score(CodeReward(isolation="any", checks="inside"), QUEUE, tests).reward == 1.0


def test_a_program_that_returns_an_object_fails_the_test_and_the_row_is_not_refused(share):
    failed = score(
        share, f"{QUEUE}\ndef f(x): return Queue(x)", "try:\n    f(1)\nexcept Exception: pass\nassert f(2) == 4"
    )
    assert failed.reward == 0.0
    assert "a Queue, which is not plain data" in failed.extras["code_failure"]


def test_tests_inside_are_announced_as_what_can_be_gamed():
    reward = CodeReward(isolation="any", checks="inside")
    prompt = Prompt(uid="p0", input_ids=np.array([1], dtype=np.int32), ground_truth=ASSERTS)
    with capture_logs() as logs:
        asyncio.run(reward.rehearse(prompt))
    assert "reward_can_be_gamed" in [entry["event"] for entry in logs]


def test_all_cases_together_have_total_s():
    reward = CodeReward(mode="share", isolation="any", total_s=2.0, limits={"wall_s": 60.0})
    run = asyncio.run(reward.sandbox.run("import time; time.sleep(60)", wall_s=0.2))
    assert run.ended == "wall_time"
    slow = score(reward, "import time; time.sleep(60)", DOUBLES)
    assert (slow.reward, slow.components["timed_out"]) == (0.0, 1.0)


def test_a_fence_with_many_spaces_takes_linear_time():
    assert program_of("```" + " \t" * 100_000 + "x", needs_fence=True) is None


def test_by_name_with_options_through_the_scorer():
    reward = resolve_reward("code", {"mode": "share", "isolation": "any", "max_concurrency": 1})
    scorer = RewardScorer(reward)
    good, bad_row = asyncio.run(scorer.score([response("print(4)", DOUBLES), response("print(4)", "no tests here")]))
    assert good.result.reward == 0.5
    assert "raised DataError: the ground truth's test is not Python" in bad_row.failure
    prompt = Prompt(uid="p0", input_ids=np.array([1], dtype=np.int32), ground_truth=DOUBLES)
    asyncio.run(scorer.rehearse(prompt))
    assert reward.sandbox.level is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "some"}, "mode of CodeReward must be one of"),
        ({"compare": "bytes"}, "compare of CodeReward.* must be one of"),
        ({"checks": "none"}, "checks of CodeReward.* must be one of"),
        ({"limits": {"processes": 1}}, "limits.processes of reward 'code' must be at least 2"),
        ({"total_s": 0}, "total_s of CodeReward.* must be a number above 0; found 0"),
        ({"limits": {"wall": 3}}, "unknown limit of reward 'code' 'wall'. Did you mean 'wall_s'"),
        ({"limits": {"wall_s": -3}}, "wall_s of SandboxLimits must be a number above 0; found -3.0"),
        ({"tests": 3}, "has no option 'tests'"),
        ({"sandbox": 3}, "has no option 'sandbox'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward("code", options)
