"""`rl-rollout cache diff`: every difference is found and named, and what is the same is said to be."""

from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from skip_command import FIRST, SECOND, THIRD, as_json, break_chunk, fill, run
from skip_groups import make_groups

from rl_core.records import Timings
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.skip import EntryKey, EntryStore


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def store_pair(folder: Path | str, a: list[GroupResult], b: list[GroupResult], **fingerprints) -> None:
    store = EntryStore(str(folder))
    for step, groups in ((1, a), (2, b)):
        fingerprint = fingerprints.get(f"fingerprint_{step}", {"seed": 1})
        store.write(EntryKey(step=step), groups, fingerprint=fingerprint, generate_s=float(step))


def with_row(groups: list[GroupResult], **changes) -> list[GroupResult]:
    """The first trajectory of the first session of the second prompt, changed."""
    session = groups[1].sessions[0]
    changed = SessionResult(trajectories=(replace(session.trajectories[0], **changes),))
    return [groups[0], replace(groups[1], sessions=(changed, *groups[1].sessions[1:]))]


def renamed(group: GroupResult, uid: str) -> GroupResult:
    sessions = (
        replace(session, trajectories=tuple(replace(row, prompt_uid=uid) for row in session.trajectories))
        for session in group.sessions
    )
    return replace(group, prompt=replace(group.prompt, uid=uid), sessions=tuple(sessions))


def changed_row(groups: list[GroupResult]):
    return groups[1].sessions[0].trajectories[0]


@pytest.mark.parametrize("url", ["local", "memory"])
def test_entries_of_the_same_rollouts_are_the_same(capsys, folder, url):
    directory = str(folder) if url == "local" else f"memory://{uuid4().hex}"
    groups = make_groups()
    timed = with_row(groups, timings=Timings(generate_s=99.0))
    store_pair(directory, groups, [renamed(group, f"{group.prompt.uid}-r9") for group in timed])
    assert run(capsys, "diff", directory, 1, SECOND) == (
        0,
        f"A  {directory}/{FIRST}\nB  {directory}/{SECOND}\nmade of: the same\n"
        "prompts: 2 in both, 0 only in A, 0 only in B\nrollouts: 4 trajectories compared, all the same\nthe same\n",
        "",
    )
    status, found = as_json(capsys, "diff", directory, 1, 2)
    assert (status, found["is_same"], found["rows"]) == (0, True, [])


def test_fingerprints_are_compared_part_by_part(capsys, folder):
    groups = make_groups()
    one = {"seed": 1, "sampling": {"temperature": 1.0, "top_p": 0.9}, "loop": "a"}
    other = {"seed": 1, "sampling": {"temperature": 0.5, "top_p": 0.9}, "tools": [1]}
    store_pair(folder, groups, groups, fingerprint_1=one, fingerprint_2=other)
    status, out, _ = run(capsys, "diff", folder, 1, 2)
    assert status == 1
    assert "made of: 3 differences\n" in out
    for line in ("sampling.temperature: A 1.0 | B 0.5", "tools: A none | B [1]", 'loop: A "a" | B none'):
        assert f"  {line}\n" in out
    assert out.endswith("all the same\ndifferent\n")


def test_tokens_that_differ_are_shown_from_the_first(capsys, folder):
    groups = make_groups()
    row = changed_row(groups)
    ids = row.input_ids.copy()
    ids[6] += 1
    store_pair(folder, groups, with_row(groups, input_ids=ids))
    status, found = as_json(capsys, "diff", folder, 1, 2)
    (difference,) = found["rows"]
    shown = [f"{len(ids)} from 6: {', '.join(map(str, each[6:10]))}" for each in (row.input_ids, ids)]
    assert status == 1
    assert difference["fields"] == [{"name": "tokens", "a": shown[0], "b": shown[1]}]
    assert (difference["prompt"], difference["session"], difference["trajectory"]) == ("p1", 0, 0)
    assert found["num_different"] == {"tokens": 1}
    assert difference["logprob_gap"] is None


def test_a_longer_response_is_a_difference_of_tokens_alone(capsys, folder):
    groups = make_groups()
    row = changed_row(groups)
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    store_pair(folder, groups, with_row(groups, **{name: getattr(row, name)[:-2] for name in names}))
    status, found = as_json(capsys, "diff", folder, 1, 2)
    length = len(row.input_ids)
    last = ", ".join(map(str, row.input_ids[-2:]))
    expected = {"name": "tokens", "a": f"{length} from {length - 2}: {last}", "b": f"{length - 2}, which end there"}
    assert (status, found["rows"][0]["fields"]) == (1, [expected])


def test_the_largest_difference_of_logprobs_is_given(capsys, folder):
    groups = make_groups()
    logprobs = changed_row(groups).rollout_logprobs.copy()
    logprobs[5] += 0.25
    logprobs[7] -= 0.5
    store_pair(folder, groups, with_row(groups, rollout_logprobs=logprobs))
    status, found = as_json(capsys, "diff", folder, 1, 2)
    assert (status, found["num_different"]) == (1, {"logprobs": 1})
    assert found["max_logprob_gap"] == pytest.approx(0.5, abs=1e-6)
    assert "different: logprobs in 1; logprobs by at most 0.5\n" in run(capsys, "diff", folder, 1, 2)[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": 0.125}, ("reward", None, "0.125")),
        ({"reward": None}, ("reward", None, "null")),
        ({"reward_components": {"exact": 2.5}}, ("reward_components", None, '{"exact": 2.5}')),
        ({"finish_reason": "abort"}, ("finish_reason", '"stop"', '"abort"')),
        ({"extras": {"num_turns": 2}}, ("extras", '{"num_turns": 1}', '{"num_turns": 2}')),
    ],
)
def test_what_is_no_token_is_compared(capsys, folder, changes, field):
    groups = make_groups()
    store_pair(folder, groups, with_row(groups, **changes))
    status, found = as_json(capsys, "diff", folder, 1, 2)
    ((difference,),) = (row["fields"] for row in found["rows"])
    assert (status, difference["name"], difference["b"]) == (1, field[0], field[2])
    assert field[1] is None or difference["a"] == field[1]


def test_masks_and_versions_are_compared(capsys, folder):
    groups = make_groups()
    row = changed_row(groups)
    mask, versions = row.loss_mask.copy(), row.policy_versions.copy()
    mask[-1], versions[-1] = False, -1
    logprobs = np.where(mask, row.rollout_logprobs, 0)
    store_pair(folder, groups, with_row(groups, loss_mask=mask, policy_versions=versions, rollout_logprobs=logprobs))
    _, found = as_json(capsys, "diff", folder, 1, 2)
    assert found["num_different"] == {"logprobs": 1, "loss_mask": 1, "policy_versions": 1}


def test_sessions_are_compared_by_index(capsys, folder):
    groups = make_groups(1, 3)
    one, two, three = groups[0].sessions
    failed = SessionResult(failure="the tool was gone")
    store_pair(folder, groups, [replace(groups[0], sessions=(failed, two))])
    status, found = as_json(capsys, "diff", folder, 1, 2)
    assert status == 1
    assert [(row["session"], row["trajectory"], [f["name"] for f in row["fields"]]) for row in found["rows"]] == [
        (0, None, ["failure", "trajectories"]),
        (2, None, ["sessions"]),
    ]
    assert found["rows"][0]["fields"][0] == {"name": "failure", "a": "none", "b": "the tool was gone"}
    assert found["num_trajectories"] == 1
    assert len(one.trajectories) == len(three.trajectories) == 1


def test_prompts_are_matched_by_what_they_are(capsys, folder):
    groups, others = make_groups(3), make_groups(1, seed=9)
    store_pair(folder, groups, [groups[2], renamed(others[0], "new"), groups[0]])
    status, out, _ = run(capsys, "diff", folder, 1, 2)
    assert status == 1
    assert "prompts: 2 in both, in another order, 1 only in A, 1 only in B\n" in out
    assert "  only in A: p1\n  only in B: new\n" in out
    assert "rollouts: 4 trajectories compared, all the same\n" in out


def test_prompts_in_another_order_are_a_difference(capsys, folder):
    groups = make_groups(3)
    store_pair(folder, groups, groups[::-1])
    assert run(capsys, "diff", folder, 1, 2)[0] == 1


def test_the_same_prompt_twice_is_matched_in_order(capsys, folder):
    (group,) = make_groups(1)
    store_pair(folder, [group, group], [group, group, group])
    _, found = as_json(capsys, "diff", folder, 1, 2)
    assert (found["num_prompts"], found["only_a"], found["only_b"]) == (2, [], ["p0"])


def test_many_differences_are_cut_in_the_text_alone(capsys, folder):
    groups = make_groups(4, 8)
    other = [
        replace(
            group,
            sessions=tuple(
                SessionResult(trajectories=(replace(s.trajectories[0], reward=7.0),)) for s in group.sessions
            ),
        )
        for group in groups
    ]
    store_pair(folder, groups, other)
    _, out, _ = run(capsys, "diff", folder, 1, 2)
    assert (out.count("    reward: A "), "  and 12 more; --json lists all\n" in out) == (20, True)
    assert len(as_json(capsys, "diff", folder, 1, 2)[1]["rows"]) == 32


def test_directories_are_compared_entry_by_entry(capsys, folder, tmp_path):
    other = f"memory://{uuid4().hex}/cache"
    fill(folder, (1, 2))
    fill(other, (2, 3))
    status, out, _ = run(capsys, "diff", folder, other)
    assert (status, out.splitlines()) == (
        1,
        [
            f"A  {folder}",
            f"B  {other}",
            f"only in A: {FIRST}",
            f"only in B: {THIRD}",
            f"{SECOND}: the same",
            "different",
        ],
    )
    status, found = as_json(capsys, "diff", folder, other)
    assert (status, found["is_same"], found["only_a"], found["only_b"]) == (1, False, [FIRST], [THIRD])
    fill(tmp_path / "equal", (1, 2))
    assert run(capsys, "diff", folder, tmp_path / "equal")[0] == 0


def test_an_entry_of_two_directories_that_differs_is_shown(capsys, folder, tmp_path):
    groups = make_groups()
    fill(folder, (1, 2))
    fill(tmp_path / "other", (1,))
    fill(tmp_path / "other", (2,), groups=groups)
    status, out, _ = run(capsys, "diff", folder, tmp_path / "other")
    assert status == 1
    assert f"{FIRST}: the same\n{SECOND}: different\n  made of: " in out


def test_a_broken_entry_is_not_compared(capsys, folder):
    fill(folder)
    break_chunk(folder, SECOND)
    status, out, _ = run(capsys, "diff", folder, 1, 2)
    assert (status, out.endswith("; nothing was compared\ndifferent\n")) == (1, True)
    status, found = as_json(capsys, "diff", folder, 1, 2)
    assert (status, found["is_same"]) == (1, False)
    assert found["fault"]["path"].startswith(f"{folder / SECOND}/")


def test_a_single_entry_is_refused_as_one_of_two(capsys, folder, monkeypatch):
    fill(folder)
    monkeypatch.chdir(folder.parent)
    for text in ("1", SECOND, f"{folder / SECOND}/"):
        status, _, err = run(capsys, "diff", folder, text)
        assert status == 2
        assert f"one entry was given, {text}; two are needed to compare: diff DIR A B, or two directories" in err
    fill(folder.parent / "1")  # a directory may be named so
    assert run(capsys, "diff", folder, "1")[0] == 0
    status, _, err = run(capsys, "diff", folder, "other")
    assert (status, "other must be a folder of a skip cache" in err) == (2, True)


def test_no_reward_and_one_that_is_no_number_differ(capsys, folder):
    groups = make_groups()
    nan = with_row(groups, reward=float("nan"), extras={"gap": float("inf")})
    store_pair(folder, nan, nan)
    assert run(capsys, "diff", folder, 1, 2)[0] == 0
    store_pair(folder.parent / "b", nan, with_row(groups, reward=None, extras={"gap": None}))
    status, out, _ = run(capsys, "diff", folder.parent / "b", 1, 2)
    assert (status, "    reward: A NaN | B null\n" in out) == (1, True)
    assert '    extras: A {"gap": Infinity} | B {"gap": null}\n' in out
