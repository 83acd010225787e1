import pytest

from rl_core.errors import SettingsError
from rl_rollout.rewards import RewardScorer, resolve_reward
from rl_rollout.rewards.registry import check_callable
from rl_rollout.rewards.rules import ExactMatch


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "LIMIT = 3\n"
        "@dataclass\n"
        "class Judge:\n"
        "    strict: bool = True\n"
        "    def __call__(self, given): return 1.0\n"
        "def length_reward(given): return len(given.response_text)\n"
        "def two(a, b): return 0.0\n"
        "def none(): return 0.0\n"
        "def trl(completions, **kwargs): return [1.0 for _ in completions]\n"
        "def trl_prompts(prompts, completions): return [1.0 for _ in completions]\n"
        "class Trl:\n"
        "    def __call__(self, completions): return [1.0 for _ in completions]\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
        "judge = Judge()\n"
    )
    return path


def test_a_function_of_a_file_is_found(reward_file):
    assert resolve_reward(f"{reward_file}:length_reward").__name__ == "length_reward"
    assert resolve_reward(f"{reward_file}:judge")(None) == 1.0


def test_relative_paths_start_at_the_working_directory(reward_file, monkeypatch):
    monkeypatch.chdir(reward_file.parent)
    assert callable(resolve_reward("reward.py:length_reward"))


def test_files_of_one_name_do_not_mix(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "reward.py").write_text(f"def reward(given): return {number}")
    functions = [resolve_reward(f"{tmp_path}/{number}/reward.py:reward") for number in (1, 2)]
    assert [function(None) for function in functions] == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenght_reward", r"has no 'lenght_reward'; it has .*verl\. Did you mean 'length_reward'\?"),
        ("LIMIT", "must be callable; found int"),
        ("two", r"needs the option 'b'\. A reward takes one RewardInput, `def reward\(given\)"),
        ("trl", r"found the parameters completions, kwargs. It is written for TRL, .* return theirs\(completions=\["),
        ("trl_prompts", r"found the parameters prompts, completions. It is written for TRL"),
        ("Trl", r"found the parameters completions. It is written for TRL"),
        ("verl", r"found the parameters data_source, solution_str, ground_truth, extra_info. It is written for verl"),
        ("none", r"must take one argument, a RewardInput; found \(\)"),
    ],
)
def test_what_is_not_a_reward_function_is_refused(reward_file, name, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward(f"{reward_file}:{name}")


def test_a_function_that_python_gives_is_checked_like_one_that_settings_name():
    with pytest.raises(SettingsError, match="It is written for verl"):
        RewardScorer(lambda data_source, solution_str, ground_truth: 1.0)


def test_missing_files_and_malformed_references(tmp_path):
    with pytest.raises(SettingsError, match=r"the file .*/none\.py does not exist"):
        resolve_reward(f"{tmp_path}/none.py:reward")
    for reference in ("reward.py", "reward.py:", ":reward"):
        with pytest.raises(SettingsError, match=r"must be given as path\.py:name"):
            resolve_reward(reference)
    (tmp_path / "reward.txt").write_text("")
    with pytest.raises(SettingsError, match="is not a Python file"):
        resolve_reward(f"{tmp_path}/reward.txt:reward")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_a_library_at_all\n", r"importing .*reward\.py raised:(.|\n)*line 1(.|\n)*not_a_library_at_all"),
        ("def reward(given:\n", r"raised:(.|\n)*SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_an_import_that_raises_shows_its_traceback(tmp_path, body, message):
    (tmp_path / "reward.py").write_text(body)
    with pytest.raises(SettingsError, match=message):
        resolve_reward(f"{tmp_path}/reward.py:reward")


def test_names_of_the_registry_are_found():
    assert isinstance(resolve_reward("exact_match"), ExactMatch)
    with pytest.raises(SettingsError, match=r"unknown reward function 'exact_mach'\. Did you mean 'exact_match'\?"):
        resolve_reward("exact_mach")


def test_compiled_callables_without_a_signature_pass():
    assert check_callable(max, name="max") is max


def test_a_file_is_imported_anew_for_each_run(tmp_path):
    (tmp_path / "counting.py").write_text(
        "calls = 0\ndef reward(given):\n    global calls\n    calls += 1\n    return calls\n"
    )
    first, second = (resolve_reward(f"{tmp_path}/counting.py:reward") for _ in range(2))
    assert (first(None), first(None), second(None)) == (1, 2, 1)
