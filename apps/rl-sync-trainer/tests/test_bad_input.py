"""Users' mistakes: a clear message and status 2 before any model loads, and no run folder."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run
from train_process import drive

from rl_trainer_parts.run.folder import FORMAT

DRIVER = Path(__file__).resolve().parents[3] / "tests" / "support" / "command_driver.py"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A command with a mistake.

    Attributes:
        says: Texts in the error message.
        settings: Settings on the command line.
        environment: Environment variables.
        words: Further arguments.
        spoil: Damages the run's inputs.
    """

    says: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    spoil: Callable[[TinyRun], object] = lambda run: None


def in_file(before: str, after: str) -> Callable[[TinyRun], None]:
    return lambda run: run.replace_in_settings({before: after})


def jsonl(*rows: object) -> Callable[[TinyRun], None]:
    def spoil(run: TinyRun) -> None:
        (run.folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.replace_in_settings({"train.parquet": "bad.jsonl"})

    return spoil


def parquet(rows: list[dict[str, Any]]) -> Callable[[TinyRun], None]:
    return lambda run: pq.write_table(pa.Table.from_pylist(rows), run.folder / "train.parquet")


def reward(source: str) -> Callable[[TinyRun], object]:
    return lambda run: (run.folder / "reward.py").write_text(source)


def without(name: str) -> Callable[[TinyRun], None]:
    return lambda run: (run.folder / name).unlink()


def replaced(name: str, content: str) -> Callable[[TinyRun], object]:
    return lambda run: (run.folder / name).write_text(content)


def config(**changes: Any) -> Callable[[TinyRun], None]:
    def spoil(run: TinyRun) -> None:
        file = run.folder / "policy" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


GOOD_ROW = {"prompt": "01+02", "answer": "3"}

NAMES = {
    "misspelt in the file": Mistake(
        spoil=in_file("steps = 4", "stepps = 4"),
        says=("unknown setting 'trainer.stepps'", "settings.toml)", "Did you mean 'trainer.steps'?"),
    ),
    "misspelt on the command line": Mistake(
        settings={"rollout__group_sise": 4},
        says=("unknown setting 'rollout.group_sise' (command line)", "Did you mean 'rollout.group_size'?"),
    ),
    "misspelt in the environment": Mistake(
        environment={"RL__TRAINER__STEP": "4"},
        says=("unknown setting 'trainer.step'", "environment variable RL__TRAINER__STEP", "'trainer.steps'?"),
    ),
    "without its section": Mistake(
        settings={"clip_grad": 0.1},
        says=("unknown setting 'clip_grad'", "mean 'optimizer.clip_grad' or 'critic.clip_grad'?"),
    ),
    "misspelt section": Mistake(
        spoil=in_file("[trainer]", "[trainr]"), says=("unknown setting 'trainr.steps'", "Did you mean 'trainer.steps'?")
    ),
    "outside of sections": Mistake(spoil=in_file("[run]", "steps = 3\n[run]"), says=("unknown setting 'steps'",)),
    "nothing near": Mistake(settings={"zzz__qqq": 1}, says=("unknown setting 'zzz.qqq'", "`train --help` lists all")),
    "wrong type": Mistake(
        settings={"trainer__steps": "many"},
        says=("trainer.steps: must be integer; found 'many' (command line). Training steps",),
    ),
    "wrong type in the file": Mistake(
        spoil=in_file("group_size = 4", 'group_size = "four"'), says=("rollout.group_size", "'four'", "settings.toml)")
    ),
    "true for a number": Mistake(
        settings={"trainer__steps": "true"},
        says=("trainer.steps: must be integer; found true (command line). Training steps",),
    ),
    "true for a number in the file": Mistake(
        spoil=in_file("max_tokens = 8", "max_tokens = 8\nvalidation_limit = false"),
        says=("prompts.validation_limit: must be integer | none; found false",),
    ),
    "wrong choice": Mistake(
        settings={"run__if_exists": "overwrite"},
        says=("run.if_exists: must be refuse | resume | archive; found 'overwrite'",),
    ),
    "two at once": Mistake(
        settings={"trainer__steps": "many", "rollout__temperature": "hot"},
        says=("trainer.steps: ", "rollout.temperature: "),
    ),
    "required and not set": Mistake(
        spoil=in_file("[policy]\npath", "[policy]\n#"),
        says=("policy.path: required, and not set. ",),
    ),
    "as Hydra writes it": Mistake(words=("trainer.steps=5",), says=("'trainer.steps=5'; write --trainer.steps=5.",)),
    "a flag with an underscore": Mistake(words=("--dry_run",), says=("Did you mean --dry-run?",)),
    "one for a list": Mistake(
        settings={"metrics__trackers": "wandb"},
        says=("metrics.trackers: must be [tensorboard | wandb | mlflow, ...]; found 'wandb'",),
    ),
    "JSON for a table": Mistake(
        settings={"prompts__template_options": '{"enable_thinking": false}'},
        says=("text of 26 characters that is not TOML (TOML uses = where JSON uses a colon)",),
    ),
    "a path for a table": Mistake(
        settings={"distillation__teachers__big": "models/x"},
        says=("distillation.teachers.big: must be {name = value}; found 'models/x' (command line). An entry of",),
    ),
    "misspelt within a list": Mistake(
        settings={"reward__parts": "[{function='exact_match', wieght=2}]"},
        says=("reward.parts: must be [{name = value}, ...]; item 0, wieght: unknown name",),
    ),
    "the folder of a settings file": Mistake(
        spoil=lambda run: (
            run.settings_file.rename(run.folder / "x.toml"),
            run.settings_file.mkdir(),
            (run.folder / "x.toml").rename(run.settings_file / "settings.toml"),
        ),
        says=("must be a file; found a folder. Did you mean ", "settings.toml/settings.toml?"),
    ),
    "no value": Mistake(words=("--trainer.steps",), says=("--trainer.steps needs a value: --trainer.steps=VALUE",)),
    "stray word": Mistake(words=("--resume", "again"), says=("unexpected argument 'again'",)),
    "not TOML": Mistake(spoil=in_file("[run]", "[run"), says=("settings.toml is not TOML", "line 1")),
    "no settings file": Mistake(spoil=without("settings.toml"), says=("settings.toml does not exist",)),
    "a folder as settings file": Mistake(
        spoil=lambda run: (run.settings_file.unlink(), run.settings_file.mkdir()),
        says=("must be a regular file; it is a folder",),
    ),
}

ARITHMETIC = {
    "no reward": Mistake(
        spoil=in_file("[reward]\nfunction", "[reward]\n#"),
        says=("reward.function must name a reward, or parts must list several; found neither",),
    ),
    "a run's name that leaves the folder of runs": Mistake(
        settings={"run__name": "../elsewhere"}, says=("run.name must be the name of one folder", "'../elsewhere'")
    ),
    "a run named by what a terminal obeys": Mistake(
        settings={"run__name": "\x1b]0;owned\x07"},
        says=("run.name must be text without control characters", r"found '\x1b]0;owned\x07'"),
    ),
    "a run without a name": Mistake(settings={"run__name": ""}, says=("run.name must be the name of one folder",)),
    "groups do not divide into minibatches": Mistake(
        settings={"trainer__minibatches": 3},
        says=("rollout.prompts_per_step = 4 must be a multiple of trainer.minibatches = 3",),
    ),
    "groups of one": Mistake(settings={"rollout__group_size": 1}, says=("rollout.group_size must be at least 2",)),
    "more prompts in a step than there are": Mistake(
        settings={"rollout__prompts_per_step": 33}, says=("rollout.prompts_per_step = 33", "has 32 prompts")
    ),
    "several at once": Mistake(
        settings={"trainer__steps": 0, "run__seed": -1, "rollout__deadline_s": "nan"},
        says=(
            "trainer.steps must be at least 1; found 0 (command line).",
            "run.seed must be at least 0; found -1",
            "rollout.deadline_s must be above 0 and finite; found nan",
        ),
    ),
    "several options of packages at once": Mistake(
        settings={"optimizer__learning_rate": "nan", "reward__timeout_s": 0},
        says=(
            "optimizer.learning_rate must be above 0 and finite; found nan",
            "reward.timeout_s must be above 0, or none; found 0",
        ),
    ),
    "a nucleus in training": Mistake(
        settings={"rollout__top_p": 0.9}, says=("rollout.top_p = 0.9 needs rollout.top_k",)
    ),
    "correction without recomputed logprobs": Mistake(
        settings={"correction__weights": "token"}, says=('needs algorithm.old_logprobs = "recompute"',)
    ),
    "longer than the model's positions": Mistake(
        settings={"rollout__max_response_tokens": 57},
        says=("add up to 65 tokens, more than the model's positions = 64",),
    ),
    "longer than the engine's context": Mistake(
        settings={"vllm__max_model_len": 15}, says=("add up to 16 tokens, more than vllm.max_model_len = 15",)
    ),
    "unknown advantage": Mistake(
        settings={"algorithm__advantage": "gropo"},
        says=("algorithm.advantage = 'gropo' is not known", "Did you mean 'grpo'?"),
    ),
    "unknown aggregation": Mistake(
        settings={"algorithm__aggregation": "token_mean"}, says=("'token_mean' is not known", "'token-mean'?")
    ),
    "unknown engine": Mistake(settings={"rollout__engine": "vlm"}, says=("rollout.engine = 'vlm'", "'vllm'?")),
    "an engine for tests": Mistake(
        settings={"rollout__engine": "scripted"},
        says=("rollout.engine = 'scripted' is not known", "known: auto, transformers"),
    ),
    "unknown option of a loop": Mistake(
        settings={"rollout__loop_options": "{a = 1}"}, says=("agent loop 'single_turn' has no options; found a.",)
    ),
    "unknown loop": Mistake(settings={"rollout__loop": "single"}, says=("rollout.loop = 'single'", "'single_turn'?")),
}

PROMPTS = {
    "missing training file": Mistake(
        spoil=without("train.parquet"), says=("prompts.train: ", "train.parquet does not exist (looked in ")
    ),
    "missing validation and test file": Mistake(
        spoil=lambda run: [(run.folder / f"{name}.parquet").unlink() for name in ("validation", "test")],
        says=("prompts.validation: ", "prompts.test: "),
    ),
    "torn file": Mistake(
        spoil=lambda run: os.truncate(run.folder / "test.parquet", 100),
        says=("test.parquet cannot be used: Parquet magic bytes not found",),
    ),
    "empty file": Mistake(spoil=jsonl(), says=("bad.jsonl", "no rows")),
    "an id of the hub": Mistake(
        settings={"prompts__train": "openai/gsm8k"},
        says=("`hf download openai/gsm8k --repo-type dataset --local-dir datasets/gsm8k`",),
    ),
    "line that is no JSON": Mistake(
        spoil=lambda run: (jsonl(GOOD_ROW)(run), (run.folder / "bad.jsonl").write_text(json.dumps(GOOD_ROW) + "\n{")),
        says=("bad.jsonl, line 2, column 2: not JSON (Expecting property name",),
    ),
    "row without answer": Mistake(
        spoil=jsonl(*[GOOD_ROW] * 4, {"prompt": "05+05"}), says=("bad.jsonl, line 5, field `answer`: missing",)
    ),
    "row with a bad prompt": Mistake(
        spoil=parquet([{"prompt": [{"role": "user", "content": c}], "answer": "1"} for c in ["01+00", "00+01", None]]),
        says=("train.parquet, row 3, field `prompt[0].content`: expected a string, found nothing",),
    ),
    "prompt too long": Mistake(
        settings={"prompts__max_tokens": 5},
        says=("train.parquet, row 1, field `prompt`: 6 tokens, more than ", "tokens = 5. Raise", '"drop"'),
    ),
    "all prompts too long": Mistake(
        settings={"prompts__max_tokens": 5, "prompts__overlong": "drop"}, says=("all 32 rows", "are longer than")
    ),
    "messages without a chat template": Mistake(
        spoil=without("policy/chat_template.jinja"), says=("row 1, field `prompt`", "no chat template")
    ),
}

MODELS = {
    "no such folder": Mistake(settings={"policy__path": "nowhere"}, says=("policy.path: nowhere does not exist",)),
    "an id of the hub": Mistake(
        settings={"policy__path": "Qwen/Qwen3-0.6B"},
        says=(
            "Qwen/Qwen3-0.6B does not exist",
            "Download it with `hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`",
        ),
    ),
    "a critic that is nowhere": Mistake(
        settings={"critic__path": "nowhere"}, says=("critic.path: nowhere does not exist",)
    ),
    "a home that no shell expands": Mistake(settings={"policy__path": "~/policy"}, says=("~ is not expanded here",)),
    "a file for a folder": Mistake(
        spoil=lambda run: run.replace_in_settings({'/policy"': '/policy/config.json"'}),
        says=("config.json is not a folder. Use the folder with",),
    ),
    "no tokenizer": Mistake(
        spoil=lambda run: [file.unlink() for file in (run.folder / "policy").glob("tokenizer*")],
        says=("policy.path: ", "has no tokenizer (tokenizer.json)"),
    ),
    "damaged tokenizer": Mistake(
        spoil=replaced("policy/tokenizer.json", "{"), says=("transformers cannot load the tokenizer",)
    ),
    "no config.json": Mistake(spoil=without("policy/config.json"), says=("has no config.json",)),
    "config.json is no JSON": Mistake(spoil=replaced("policy/config.json", "{"), says=("config.json must be JSON",)),
    "no weights": Mistake(spoil=without("policy/model.safetensors"), says=("has no *.safetensors weights",)),
    "another architecture": Mistake(
        spoil=config(architectures=["GPT2LMHeadModel"]),
        says=("architecture GPT2LMHeadModel is not supported", "is Qwen3ForCausalLM"),
    ),
}

REWARDS = {
    "no such file": Mistake(spoil=without("reward.py"), says=("reward.py:reward'", "does not exist")),
    "no such function": Mistake(
        spoil=reward("def rewards(sample): return 1.0"), says=("has no 'reward'", "it has rewards", "'rewards'?")
    ),
    "no such built-in": Mistake(settings={"reward__function": "exact_mach"}, says=("exact_mach", "'exact_match'?")),
    "raises when imported": Mistake(
        spoil=reward("import no_such_module_anywhere"),
        says=("importing ", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    ),
    "raises when called": Mistake(
        spoil=reward("def reward(sample):\n    return float(sample.response_text)"),
        says=("fails on an empty response", "raised ValueError", "reward.py, line 2"),
    ),
    "gives no number": Mistake(
        spoil=reward("def reward(sample):\n    return 'good'"), says=("expected a finite number", "'good'")
    ),
    "takes other arguments": Mistake(
        spoil=reward("def reward(text, truth):\n    return 1.0"), says=("reward.py:reward' needs the option 'truth'",)
    ),
}

RUN_SETTINGS = """[trainer]
steps = 4
[optimizer]
learning_rate = 0.1
"""


def with_run(run: TinyRun) -> None:
    run.run_folder.mkdir(parents=True)
    (run.run_folder / "settings.toml").write_text(RUN_SETTINGS)
    (run.run_folder / "format").write_text(f"{FORMAT}\n")


FOLDERS = {
    "a run is there already": Mistake(
        spoil=with_run, says=("runs/tiny already holds a run", "--resume", "--run.if_exists=archive", "--run.name=NAME")
    ),
    "a run is there already, in a rehearsal": Mistake(
        spoil=with_run, words=("--dry-run",), says=("runs/tiny already holds a run",)
    ),
    "resumed with other settings": Mistake(
        spoil=with_run,
        words=("--resume",),
        says=(
            "cannot be resumed with other settings",
            "optimizer.learning_rate: the run has 0.1, now 0.003",
            "`train --help` marks the settings that may differ on resume.",
        ),
    ),
    "resumed from settings that are not readable": Mistake(
        spoil=lambda run: (with_run(run), (run.run_folder / "settings.toml").write_text("[")),
        words=("--resume",),
        says=("runs/tiny/settings.toml, written when the run started, is not readable",),
    ),
    "nothing to resume": Mistake(words=("--resume",), says=("--resume: ", "has no run to resume")),
    "run folder under a file": Mistake(
        spoil=lambda run: (run.folder / "runs").write_text(""), says=("runs/tiny cannot be created", "--run.directory")
    ),
}

MISTAKES = {
    f"{kind}: {name}": mistake
    for kind, mistakes in {
        "setting": NAMES,
        "arithmetic": ARITHMETIC,
        "prompts": PROMPTS,
        "model": MODELS,
        "reward": REWARDS,
        "folder": FOLDERS,
    }.items()
    for name, mistake in mistakes.items()
}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def places(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TinyRun]]:
    """Return the damaged inputs of each mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    runs = {}
    for index, (name, mistake) in enumerate(MISTAKES.items()):
        runs[name] = copy_tiny_run(tiny_run, folder / str(index))
        mistake.spoil(runs[name])
    return runs


@pytest.fixture(scope="module")
def refusals(places: dict[str, TinyRun], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the result of each mistake; all run one after the other in a fresh interpreter."""
    cases = {
        name: {
            "words": places[name].train_words(*mistake.words, **mistake.settings),
            "environment": dict(mistake.environment),
        }
        for name, mistake in MISTAKES.items()
    }
    return drive(cases, tmp_path_factory.mktemp("driven"))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name: str, refusals: dict[str, dict[str, Any]], places: dict[str, TinyRun]) -> None:
    refusal = refusals[name]
    assert refusal["status"] == 2, refusal["errors"]
    assert refusal["errors"].startswith("error: ")
    for words in MISTAKES[name].says:
        assert words in refusal["errors"]
    assert refusal["heavy"] == []
    if name not in ("folder: " + existing for existing in FOLDERS):
        assert not places[name].run_folder.exists()


@pytest.mark.parametrize("name", ["a run is there already", "resumed with other settings"])
def test_a_refused_command_leaves_the_earlier_run_as_it_was(
    name: str, refusals: dict[str, dict[str, Any]], places: dict[str, TinyRun]
) -> None:
    folder = places[f"folder: {name}"].run_folder
    assert refusals[f"folder: {name}"]["status"] == 2
    assert (folder / "settings.toml").read_text() == RUN_SETTINGS
    assert {path.name for path in folder.iterdir()} - {".lock"} == {"format", "settings.toml"}


@pytest.mark.parametrize("name", [f"setting: {name}" for name in NAMES])
def test_mistakes_in_settings_are_found_without_torch(name: str, refusals: dict[str, dict[str, Any]]) -> None:
    assert not refusals[name]["has_torch"]
