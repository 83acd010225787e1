"""`rl-rollout cache show`: prompts and responses."""

import re
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from skip_command import THIRD, as_json, break_chunk, fill, run
from skip_groups import make_groups

from rl_core.errors import MissingExtraError
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.prompts import PromptTokenizer


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path) -> str:
    return str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid4().hex}/cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def test_show_says_which_entry_it_is_of(capsys, directory):
    fill(directory, (5,))
    assert f"entry train-00000005-0000 in {directory} (the only one)\n" in run(capsys, "show", directory)[1]
    fill(directory, (3,))
    _, out, _ = run(capsys, "show", directory)
    assert out.startswith(f"entry {THIRD} in {directory} (the newest of 2; pass another name or step)\n")
    for name in ("5", "0005", "train-00000005-0000", f"{directory}/train-00000005-0000/"):
        assert run(capsys, "show", directory, name)[1].startswith(f"entry train-00000005-0000 in {directory}\n")


def test_show_prints_prompts_and_responses(capsys, directory):
    (group,) = make_groups(1, 2)
    ids = np.array([5, 6, 7, 8, 9], dtype=np.int32)
    mask = np.array([False, False, True, False, True])
    row = replace(
        group.sessions[0].trajectories[0],
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.zeros(5, dtype=np.float32),
        policy_versions=np.array([-1, -1, 3, -1, 4], dtype=np.int32),
        reward=0.5,
        reward_components={"exact": 0.5, "length": 0.0},
        finish_reason="length",
    )
    sessions = (
        SessionResult(trajectories=(row, replace(row, output_index=1, reward=None))),
        SessionResult(failure="the tool was gone"),
        SessionResult(),
    )
    messages = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Add\n1 + 2", "name": "me"})
    prompt = replace(group.prompt, messages=messages, ground_truth={"answer": 3}, columns={"level": 1})
    fill(directory, (1,), groups=[replace(group, prompt=prompt, sessions=sessions)])
    status, out, _ = run(capsys, "show", directory, "--sessions", 3)
    facts = "length, 2 prompt + 3 response tokens (1 not sampled), policy version 3 to 4"
    assert status == 0
    assert out.partition("prompt 0:")[2].splitlines() == [
        " p0, of sums, 4 tokens",
        "  system",
        "    | Be short.",
        "  user",
        "    | Add",
        "    | 1 + 2",
        '    {"name": "me"}',
        '  ground truth: {"answer": 3}',
        '  columns: {"level": 1}',
        f"  session 0 trajectory 0: reward 0.5 (exact 0.5, length 0), {facts}",
        "    | tokens 7 8 9",
        '    extras: {"num_turns": 1}',
        f"  session 0 trajectory 1: reward none (exact 0.5, length 0), {facts}",
        "    | tokens 7 8 9",
        '    extras: {"num_turns": 1}',
        "  session 1: FAILED: the tool was gone",
        "  session 2: no trajectory",
    ]
    assert "tokenizer    none: tokens are shown as numbers; give --tokenizer FOLDER for text" in out
    assert re.search(r"content +1 group, 3 sessions \(1 failed\), 2 trajectories, 10 tokens", out)
    assert re.search(r"sampling.temperature +0\.5\n", out)


def test_show_says_which_numbers_are_none(capsys, directory):
    (group,) = make_groups(1, 1)
    nan, inf = float("nan"), float("inf")
    row = replace(
        group.sessions[0].trajectories[0], reward=nan, reward_components={"low": -inf, "high": inf}, extras={"gap": nan}
    )
    prompt = replace(group.prompt, ground_truth={"answer": nan}, columns={"levels": [inf, 1.5]})
    fill(directory, (1,), groups=[replace(group, prompt=prompt, sessions=(SessionResult(trajectories=(row,)),))])
    _, out, _ = run(capsys, "show", directory)
    assert "session 0: reward NaN (low -Infinity, high Infinity), " in out
    assert '  ground truth: {"answer": NaN}\n' in out
    assert '  columns: {"levels": [Infinity, 1.5]}\n' in out
    assert '    extras: {"gap": NaN}\n' in out
    _, shown = as_json(capsys, "show", directory)  # JSON has no such numbers
    assert shown["groups"][0]["ground_truth"] == {"answer": None}


def test_show_is_limited_and_says_what_is_left_out(capsys, folder):
    groups = make_groups(4, 3, min_tokens=60, max_tokens=60)
    long = replace(groups[0].prompt, messages=({"role": "user", "content": "x" * 2500},))
    fill(folder, (1,), groups=[replace(groups[0], prompt=long), *groups[1:]])
    _, out, _ = run(capsys, "show", folder, "--groups", 1, "--sessions", 1)
    assert out.count("\nprompt ") == out.count("\n  session ") == 1
    assert "  and 2 more sessions; --sessions N shows more\n" in out
    assert out.endswith("\nand 3 more prompts; --groups N shows more\n")
    assert "... and 12 more; --full shows all" in out
    assert f"    | {'x' * 2000}\n    | ... and 500 more characters; --full shows all\n" in out
    _, out, _ = run(capsys, "show", folder, "--groups", 9, "--sessions", 9, "--full")
    assert (out.count("\nprompt "), out.count("\n  session ")) == (4, 12)
    assert "more" not in out
    assert run(capsys, "show", folder, "--groups", 0)[1].endswith("\nand 4 more prompts; --groups N shows more\n")
    _, shown = as_json(capsys, "show", folder, "--groups", 1, "--sessions", 2)
    (group,) = shown["groups"]
    assert (group["uid"], group["num_sessions"], len(group["sessions"])) == ("p0", 3, 2)
    rows = groups[0].sessions[1].trajectories
    assert group["sessions"][1]["trajectories"][0]["response_ids"] == rows[0].input_ids[4:].tolist()


class Letters:
    """A tokenizer that decodes token 0 as A, 1 as B, and so on."""

    fingerprint = {"vocabulary": "v"}  # noqa: RUF012

    def decode(self, sequences, *, skip_special_tokens):
        assert not skip_special_tokens
        return ["".join(chr(65 + int(token)) for token in ids) for ids in sequences]


def letters(monkeypatch, **fields):
    tokenizer = type("Other", (Letters,), fields)()
    monkeypatch.setattr(PromptTokenizer, "load", lambda folder: tokenizer)


def lettered(value: int = 7, **changes):
    (group,) = make_groups(1, 1)
    row = group.sessions[0].trajectories[0]
    ids = np.where(row.loss_mask, value, 1).astype(np.int32)
    sessions = (SessionResult(trajectories=(replace(row, input_ids=ids),)),)
    prompt = replace(group.prompt, input_ids=np.array([0, 1, 2], dtype=np.int32), **changes)
    return [replace(group, prompt=prompt, sessions=sessions)], int(row.loss_mask.sum())


def test_show_decodes_with_the_tokenizer_that_is_given(capsys, monkeypatch, tmp_path, folder):
    groups, num_tokens = lettered(messages=())
    fill(folder, groups=groups)
    letters(monkeypatch)
    _, out, _ = run(capsys, "show", folder, "--tokenizer", tmp_path)
    assert f"tokenizer    from {tmp_path}\n" in out
    assert f"    | {'H' * num_tokens}\n" in out
    assert "    | ABC\n" in out
    letters(monkeypatch, fingerprint={"vocabulary": "w"})
    _, out, _ = run(capsys, "show", folder, "--tokenizer", tmp_path)
    assert "NOT the entry's own tokenizer: the vocabularies differ" in out


def test_show_takes_the_tokenizer_of_the_policy_that_the_entry_names(capsys, monkeypatch, tmp_path, folder):
    groups, num_tokens = lettered()
    fill(folder, groups=groups, policy={"origin": str(tmp_path), "version": 4})
    assert "tokens are shown as numbers" in run(capsys, "show", folder)[1]  # the folder has no tokenizer
    letters(monkeypatch)
    _, out, _ = run(capsys, "show", folder)
    assert f"from {tmp_path}, the entry's policy\n" in out
    assert f"    | {'H' * num_tokens}\n" in out

    def missing(path):
        raise MissingExtraError("transformers")

    monkeypatch.setattr(PromptTokenizer, "load", missing)
    status, out, _ = run(capsys, "show", folder)
    assert (status, f"(the one of {tmp_path} needs transformers)" in out) == (0, True)
    status, _, err = run(capsys, "show", folder, "--tokenizer", tmp_path)
    assert (status, err) == (2, "rl-rollout: transformers\n")


def test_tokens_that_the_tokenizer_does_not_know_stay_numbers(capsys, monkeypatch, tmp_path, folder):
    groups, num_tokens = lettered(value=-100)
    fill(folder, groups=groups)
    letters(monkeypatch)
    status, out, _ = run(capsys, "show", folder, "--tokenizer", tmp_path)
    assert (status, f"    | tokens {' '.join(['-100'] * num_tokens)}\n" in out) == (0, True)


def test_a_folder_without_a_tokenizer_is_refused(capsys, tmp_path, folder):
    fill(folder)
    status, _, err = run(capsys, "show", folder, "--tokenizer", tmp_path / "none")
    assert (status, f"{tmp_path / 'none'} is not a folder" in err) == (2, True)


def test_show_of_a_broken_entry_says_what_is_broken(capsys, folder):
    fill(folder)
    chunk = break_chunk(folder, THIRD)
    status, out, err = run(capsys, "show", folder)
    assert (status, out) == (1, "")
    assert err.startswith("rl-rollout: BROKEN ")
    assert str(chunk.parents[1]) in err
