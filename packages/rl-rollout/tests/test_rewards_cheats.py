"""Programs that try to pass the tests without a right answer; a sample in every run, and all under `soak`."""

import asyncio
import sys
import textwrap

import numpy as np
import pytest

from rl_rollout.rewards import RewardInput
from rl_rollout.rewards.code_reward import CodeReward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

CHEATS = {
    "leaves with success": "os._exit(0)",
    "leaves with success when called": "def f(x): os._exit(0)",
    "leaves with success at the end": "import atexit\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "prints verdicts": """
        for number in range(9): print(f'\\n[{number}, "passed", ""]')
        def f(x): return 0
        """,
    "writes verdicts to every descriptor": """
        for fd in range(64):
            for number in range(9):
                try: os.write(fd, f'\\n[{number}, "passed", ""]\\n'.encode())
                except OSError: pass
        def f(x): return 0
        """,
    "writes what is no verdict": r"""
        words = {str(frame.f_locals.get("word", "")) for frame in frames()} | {""}
        for text in ("5", "[]", "[[1],2]", "[" * 200_000, '{}', '[0,0,0]', '\xff'):
            for fd in range(64):
                for word in words:
                    try: os.write(fd, f"\n{word}{text}\n".encode("latin-1"))
                    except OSError: pass
        def f(x): return 0
        """,
    "answers with what is no answer": r"""
        TEXTS = ['5', '[]', '[[1],2]', '[' * 200_000, '["value",1e999999,[]]', '["value",["int","zz"],[]]',
                 '["value",5]', '["value",["bytes",["zz"]],[]]', '["value",null,[[99,null]]]', '["value",null,5]',
                 '["value",["builtins.eval",["0"]],[]]', '["value",["os.system",["true"]],[]]', '["value",[[],[]],[]]',
                 '["value",["fractions.Fraction",["1e999999999"]],[]]', '["value",["complex",["x"]],[]]',
                 '["raised",[],""]', '["raised",5,5]', '["raised",["NotPlain"],""]', '["call","f",[]]',
                 '{"value":1}', '\xff']
        def f(x):
            for channel in (value for frame in frames() for value in frame.f_locals.values()):
                if hasattr(channel, "_writes"):
                    for text in TEXTS: os.write(channel._writes, text.encode("latin-1") + b"\n")
            return 0
        """,
    "answers without end": r"""
        def f(x):
            for channel in (value for frame in frames() for value in frame.f_locals.values()):
                while hasattr(channel, "_writes"): os.write(channel._writes, b"[" * 65536)
        """,
    "answers with an object": """
        class Four(object):
            def __eq__(self, other): return True
        def f(x): return [Four(), iter([Four()])]
        """,
    "equals everything": """
        class All:
            def __eq__(self, other): return True
            def __sub__(self, other): return self
            __rsub__ = __abs__ = lambda self: self
            __lt__ = __gt__ = __le__ = __ge__ = __eq__
            def __float__(self): return 0.0
            def __bool__(self): return True
        def f(x): return All()
        """,
    "is an integer that equals everything": """
        class Any(int):
            def __eq__(self, other): return True
            def __sub__(self, other): return 0
        def f(x): return Any(9)
        """,
    "lies about its class": """
        class Liar:
            __class__ = property(lambda self: int)
            def __eq__(self, other): return True
            def __format__(self, spec): return "4"
        def f(x): return Liar()
        """,
    "replaces builtins": """
        import builtins
        for name in ("abs", "eval", "exec", "compile", "isinstance", "repr", "AssertionError", "__import__"):
            setattr(builtins, name, lambda *given, **named: 0)
        def f(x): return 9
        """,
    "has names that tests use": """
        def abs(x): return 0
        def check(candidate): return None
        def isinstance(*given): return True
        def f(x): return 9
        """,
    "replaces what sends": """
        import json
        json.dumps = lambda *given, **named: '["value", null, []]'
        os.write = lambda fd, data: len(data)
        def f(x): return 9
        """,
    "replaces the runner": """
        for module in list(sys.modules.values()):
            for name in ("explained", "encode", "decode", "describe", "run", "main"):
                if hasattr(module, name): setattr(module, name, lambda *given, **named: None)
        def f(x): return 9
        """,
    "looks for the tests in the stack": """
        found = search([value for frame in frames() for value in frame.f_locals.values()])
        def f(x): return found.get(x, 9)
        """,
    "looks for the tests in all objects": """
        import gc
        objects = gc.get_objects()
        found = search(objects + [value for one in objects if type(one) is dict for value in one.values()])
        def f(x): return found.get(x, 9)
        """,
    "looks for the tests in files": """
        found = {}
        for folder in (".", "/proc/self/fd", f"/proc/{os.getppid()}", f"/proc/{os.getppid()}/fd"):
            try: names = os.listdir(folder)
            except OSError: continue
            for name in names:
                if name != "kmsg" and not name.startswith("pagemap"):
                    try:
                        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                        found |= search([os.read(fd, 1 << 20)])
                    except OSError: pass
        def f(x): return found.get(x, 9)
        """,
    "looks for the tests in the other process's memory": """
        found = {}
        try:
            for line in open(f"/proc/{os.getppid()}/maps"):
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                fd = os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)
                found |= search([os.pread(fd, end - start, start)])
        except OSError: pass
        def f(x): return found.get(x, 9)
        """,
    "reads the input that is left": """
        found = {}
        try: found = search([os.read(0, 1 << 20)])
        except OSError: pass
        def f(x): return found.get(x, 9)
        """,
    "takes the results from the other process": """
        for fd in range(64):
            for mode in (os.O_WRONLY, os.O_RDWR):
                try: os.write(os.open(f"/proc/{os.getppid()}/fd/{fd}", mode), b'\\n[0, "passed", ""]\\n')
                except OSError: pass
        def f(x): return 9
        """,
    "ends the process of the tests": "def f(x): os.kill(os.getppid(), 9)",
    "ends the process of the tests gently": "def f(x): os.kill(os.getppid(), 2); os.kill(os.getppid(), 15)",
    "has modules for the tests to import": """
        for name in ("math.py", "code_runner.py", "ast.py", "fractions.py", "sitecustomize.py"):
            open(name, "w").write("import os; os._exit(0)")
        def f(x): return 9
        """,
    "answers twice": """
        if os.fork() == 0: pass
        def f(x): return 9
        """,
    "raises what tests expect": """
        class AssertionPassed(BaseException): pass
        def f(x): raise AssertionPassed("passed")
        """,
    "raises text that no file takes": "raise ValueError('\\ud800')",
    "is no program": "def f(:",
    "is a program that no parser takes": "f = " + "(" * 100_000,
    "fills the memory": "def f(x): return [0] * (1 << 40)",
    "never answers": "def f(x):\n    while True: pass",
}
CHEAT_HEAD = """
import os, re, sys
def frames():
    frame = sys._getframe()
    while frame: yield frame; frame = frame.f_back
def search(values):
    "Answers in whatever has a test: `f(2) == 4`."
    found = {}
    for value in values:
        text = value if type(value) is str else value.decode("latin-1") if type(value) is bytes else repr(value)
        for given, wanted in re.findall(r"(?:f|candidate)\\((\\d+)\\) == (\\d+)", text): found[int(given)] = int(wanted)
    return found
"""
TESTS = [
    "def check(candidate):\n    assert candidate(31) == 62\n    assert candidate(41) == 82\ncheck(f)",
    "assert f(21) == 42\nassert abs(f(1.5) - 3) < 1e-9",
    "import math\nassert math.isclose(f(2.5), 5.0)",
]
IN_EVERY_RUN = {
    *("writes what is no verdict", "answers with what is no answer", "equals everything", "has names that tests use"),
    *("looks for the tests in all objects", "looks for the tests in the other process's memory"),
    *("takes the results from the other process", "raises text that no file takes"),
}


def table(programs):
    """Return the programs as parameters; those outside the sample are marked `soak`."""
    return [
        pytest.param(program, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.soak)
        for name, program in programs.items()
    ]


@pytest.fixture(scope="module")
def reward():
    return CodeReward(mode="share", isolation="any", limits={"wall_s": 5.0, "memory_bytes": 256 << 20})


@pytest.mark.parametrize("program", table(CHEATS))
def test_no_program_scores_without_a_right_answer(reward, program):
    text = "```python\n" + CHEAT_HEAD + textwrap.dedent(program) + "\n```"
    given = RewardInput(prompt_uid="p", response_text=text, response_ids=np.array([1]), ground_truth=TESTS)
    result = asyncio.run(reward(given))
    assert (result.reward, result.components["has_code"]) == (0.0, 1.0)


def test_a_right_program_scores(reward):
    given = RewardInput(
        prompt_uid="p", response_text="def f(x): return x * 2", response_ids=np.array([1]), ground_truth=TESTS
    )
    assert asyncio.run(reward(given)).reward == 1.0


def test_the_sample_is_of_the_table_and_the_search_finds_what_it_can_see():
    assert CHEATS.keys() >= IN_EVERY_RUN
    scope = {}
    exec(CHEAT_HEAD, scope)
    assert scope["search"](TESTS) == {31: 62, 41: 82, 21: 42}
