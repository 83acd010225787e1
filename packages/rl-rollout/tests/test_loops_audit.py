import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from rl_core.data.records import Prompt, Trajectory
from rl_core.errors import DataError, SettingsError
from rl_rollout import (
    AuditOptions,
    GenerateRequest,
    RewardScorer,
    Rollout,
    RolloutOptions,
    SamplingParams,
    SessionResult,
    SingleTurnLoop,
    quick,
)
from rl_rollout.audit import RecordingEngine, SampledSpan, _check_once, audit_experts, audit_session, audit_trajectory
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops.outcomes import join_experts


def ids(*values):
    return np.array(values, dtype=np.int32)


def span(input_ids, token_ids, logprobs, version):
    return SampledSpan(
        input_ids=ids(*input_ids),
        token_ids=ids(*token_ids),
        logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.full(len(token_ids), version, dtype=np.int32),
    )


SPANS = [span([8, 9], [5, 6], [-0.1, -0.2], 3), span([8, 9, 5, 6, 2, 2], [7, 1], [-0.3, -0.4], 4)]
TRAJECTORY = Trajectory(  # prompt 8 9, turn 5 6, tool output 2 2, turn 7 1
    prompt_uid="p",
    session_index=0,
    input_ids=ids(8, 9, 5, 6, 2, 2, 7, 1),
    loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=np.bool_),
    rollout_logprobs=np.array([0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4], dtype=np.float32),
    policy_versions=ids(-1, -1, 3, 3, -1, -1, 4, 4),
)


def changed(name, position, value, trajectory=TRAJECTORY):
    array = getattr(trajectory, name).copy()
    array[position] = value
    return replace(trajectory, **{name: array})


@pytest.mark.parametrize("session_index", [0, 1, 5])
def test_what_was_sampled_passes_whatever_the_order_of_the_requests(session_index):
    trajectory = replace(TRAJECTORY, session_index=session_index)
    other = span([8, 9], [5, 5], [-0.1, -0.9], 3)
    assert refusal(audit_trajectory, trajectory, SPANS) is None
    assert refusal(audit_trajectory, trajectory, [other, *SPANS[::-1], other]) is None


def test_masking_sampled_tokens_passes():
    mask = np.array([0, 0, 0, 0, 0, 0, 1, 1], dtype=np.bool_)
    masked = replace(
        TRAJECTORY,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, TRAJECTORY.rollout_logprobs, 0).astype(np.float32),
        policy_versions=np.where(mask, TRAJECTORY.policy_versions, -1).astype(np.int32),
    )
    assert refusal(audit_trajectory, masked, SPANS) is None


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("input_ids", 3, 4, r"p/0/0: token 3 \(4\) is trained, but no request sampled it.* matches .* up to token 3"),
        ("input_ids", 0, 4, r"token 2 \(5\) is trained, but no request sampled it"),
        (
            "input_ids",
            4,
            3,
            r"token 6 \(7\) is trained, but no request sampled it: the closest one, with 6 input tokens",
        ),
        ("rollout_logprobs", 7, -0.5, r"token 7 \(1\) .* another logprob or policy version"),
        ("rollout_logprobs", 7, np.nan, r"token 7 \(1\) .* another logprob or policy version"),
        ("rollout_logprobs", 7, np.nextafter(np.float32(-0.4), np.float32(0)), "token 7 .* another logprob"),
        ("policy_versions", 2, 4, r"token 2 \(5\) .* another logprob or policy version"),
        ("loss_mask", 4, True, r"token 4 \(2\) .* part of the input of the request"),
        ("loss_mask", 1, True, r"token 1 \(9\) .* part of the input of the request"),
        ("loss_mask", 2, False, r"token 2 is masked, so its logprob must be 0"),
        ("rollout_logprobs", 0, -1.0, r"token 0 is masked"),
        ("policy_versions", 5, 3, r"token 5 is masked"),
    ],
)
def test_any_change_is_found(name, position, value, message):
    with pytest.raises(DataError, match=message):
        audit_trajectory(changed(name, position, value), SPANS)


def test_a_turn_that_was_tokenized_again_is_found():
    drifted = replace(  # the sampled 5 6 was encoded again as 11, the same text
        TRAJECTORY,
        **{
            name: np.delete(getattr(TRAJECTORY, name), 3)
            for name in ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
        },
    )
    drifted.input_ids[2] = 11
    with pytest.raises(DataError, match=r"token 2 \(11\)"):
        audit_trajectory(drifted, SPANS)
    with pytest.raises(DataError, match="token 6"):  # only the engine's context has the drifted turn
        audit_trajectory(TRAJECTORY, [SPANS[0], span([8, 9, 11, 2, 2], [7, 1], [-0.3, -0.4], 4)])


def test_turns_used_twice_are_found():
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    twice = replace(TRAJECTORY, **{name: np.tile(getattr(TRAJECTORY, name)[:6], 2) for name in names})
    with pytest.raises(DataError, match=r"token 8"):
        audit_trajectory(twice, SPANS)


def cut_at(trajectory, stop, **changes):
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    return replace(trajectory, **{name: getattr(trajectory, name)[:stop] for name in names}, **changes)


def masked_before(trajectory, start, **changes):
    """Return the trajectory with training masked before `start`."""
    is_kept = np.arange(len(trajectory.input_ids)) >= start
    return replace(
        trajectory,
        loss_mask=trajectory.loss_mask & is_kept,
        rollout_logprobs=np.where(is_kept, trajectory.rollout_logprobs, 0).astype(np.float32),
        policy_versions=np.where(is_kept, trajectory.policy_versions, -1).astype(np.int32),
        **changes,
    )


def test_a_session_that_goes_on_in_a_trajectory_where_earlier_turns_are_masked_passes():
    session = [cut_at(TRAJECTORY, 5), masked_before(TRAJECTORY, 6, output_index=1)]
    assert refusal(audit_session, session, SPANS) is None
    assert refusal(audit_session, session[::-1], SPANS, group=session) is None
    assert refusal(audit_session, [masked_before(TRAJECTORY, 6), cut_at(TRAJECTORY, 4, output_index=1)], SPANS) is None


@pytest.mark.parametrize(
    ("session", "position"),
    [
        ([TRAJECTORY, replace(TRAJECTORY, output_index=1)], 2),
        ([cut_at(TRAJECTORY, 4), replace(TRAJECTORY, output_index=1)], 2),
        ([TRAJECTORY, masked_before(TRAJECTORY, 7, output_index=1)], 7),
        ([masked_before(TRAJECTORY, 6), cut_at(TRAJECTORY, 3), masked_before(TRAJECTORY, 7, output_index=2)], 7),
    ],
)
def test_a_token_that_a_session_trains_twice_is_found(session, position):
    message = rf"token {position} \(\d\) is also trained by output 0 of its session, but was sampled only once"
    with pytest.raises(DataError, match=message):
        audit_session(session, SPANS)
    with pytest.raises(DataError, match=message):  # the later turn was resampled with another logprob
        audit_session(session, [*SPANS, span([8, 9, 5, 6, 2, 2], [7, 1], [-0.3, -0.9], 4), span([8], [9], [-1], 3)])


def test_equal_tokens_that_were_sampled_twice_may_train_twice():
    session = [TRAJECTORY, replace(TRAJECTORY, output_index=1)]
    audit_session(session, [*SPANS, *SPANS])
    with pytest.raises(DataError, match="token 6"):  # its first turn was sampled twice, its second once
        audit_session(session, [*SPANS, SPANS[0]])
    other = replace(TRAJECTORY, session_index=1)
    with pytest.raises(DataError, match="token 2"):  # the second sample belongs to the other session
        audit_session(session, [*SPANS, *SPANS], group=[*session, other])


def test_sessions_may_share_what_was_sampled_once():
    other = replace(TRAJECTORY, session_index=1)
    assert refusal(audit_session, [TRAJECTORY], SPANS, group=[TRAJECTORY, other]) is None
    assert refusal(audit_session, [other], SPANS, group=[TRAJECTORY, other]) is None
    turns = [cut_at(TRAJECTORY, 5), masked_before(TRAJECTORY, 6, output_index=1)]
    assert refusal(audit_session, turns, SPANS, group=[*turns, other]) is None


def test_nothing_trained_passes_without_requests():
    nothing = Trajectory(
        prompt_uid="p",
        session_index=0,
        input_ids=ids(8),
        loss_mask=np.zeros(1, dtype=np.bool_),
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=ids(-1),
    )
    audit_trajectory(nothing, [])
    with pytest.raises(DataError, match="no request was sent to the engine"):
        audit_trajectory(TRAJECTORY, [])


@st.composite
def sessions(draw):
    """Draw a session of several turns: its trajectory and its sampled spans."""
    tokens = st.integers(0, 3)
    context = draw(st.lists(tokens, min_size=1, max_size=3))
    rows = [(token, False, 0.0, -1) for token in context]
    spans = []
    for turn in range(draw(st.integers(1, 4))):
        sampled = draw(st.lists(tokens, min_size=1, max_size=4))
        logprobs = [-0.5 - 0.125 * draw(st.integers(0, 3)) for _ in sampled]
        spans.append(span([row[0] for row in rows], sampled, logprobs, turn))
        rows += [(token, True, logprob, turn) for token, logprob in zip(sampled, logprobs, strict=True)]
        rows += [(token, False, 0.0, -1) for token in draw(st.lists(tokens, max_size=3))]
    columns = list(zip(*rows, strict=True))
    trajectory = Trajectory(
        prompt_uid="p",
        session_index=draw(st.integers(0, 5)),
        input_ids=ids(*columns[0]),
        loss_mask=np.array(columns[1], dtype=np.bool_),
        rollout_logprobs=np.array(columns[2], dtype=np.float32),
        policy_versions=ids(*columns[3]),
    )
    return trajectory, spans


@given(sessions())
def test_every_sampled_session_passes(session):
    assert refusal(audit_trajectory, *session) is None


@given(sessions(), st.data())
def test_any_tampering_is_found(session, data):
    trajectory, spans = session
    name = data.draw(st.sampled_from(["input_ids", "loss_mask", "rollout_logprobs", "policy_versions"]))
    last_trained = int(np.flatnonzero(trajectory.loss_mask)[-1])
    stop = last_trained + 1 if name == "input_ids" else len(trajectory.input_ids)  # later inputs have no effect
    position = data.draw(st.integers(0, stop - 1))
    value = getattr(trajectory, name)[position]
    other = {
        "input_ids": 9,
        "loss_mask": not value,
        "rollout_logprobs": data.draw(st.sampled_from([-0.25, -2.0, 1.0])),
        "policy_versions": data.draw(st.sampled_from([-2, 7, 100])),
    }[name]
    with pytest.raises(DataError, match="token"):
        audit_trajectory(changed(name, position, other, trajectory), spans)


@given(sessions(), st.data())
def test_an_inserted_token_is_found(session, data):
    trajectory, spans = session
    position = data.draw(st.integers(0, int(np.flatnonzero(trajectory.loss_mask)[-1])))
    inserted = {"input_ids": 9, "loss_mask": False, "rollout_logprobs": 0.0, "policy_versions": -1}
    longer = {name: np.insert(getattr(trajectory, name), position, value) for name, value in inserted.items()}
    with pytest.raises(DataError, match="token"):
        audit_trajectory(replace(trajectory, **longer), spans)


@given(sessions(), st.data())
def test_each_token_trains_in_one_trajectory_of_its_session(session, data):
    trajectory, spans = session
    trained = np.flatnonzero(trajectory.loss_mask)
    turns = [data.draw(st.integers(0, 2)) for _ in trained]

    def training(positions, output_index):
        is_kept = np.isin(np.arange(len(trajectory.input_ids)), positions)
        return replace(
            trajectory,
            output_index=output_index,
            loss_mask=is_kept,
            rollout_logprobs=np.where(is_kept, trajectory.rollout_logprobs, 0).astype(np.float32),
            policy_versions=np.where(is_kept, trajectory.policy_versions, -1).astype(np.int32),
        )

    parts = [[p for p, turn in zip(trained, turns, strict=True) if turn == index] for index in range(3)]
    audit_session([training(part, index) for index, part in enumerate(parts)], spans)
    doubled = data.draw(st.sampled_from([int(p) for p in trained]))
    parts[(turns[trained.tolist().index(doubled)] + data.draw(st.integers(1, 2))) % 3].append(doubled)
    with pytest.raises(DataError, match=rf"token {doubled} .* of its session, but was sampled only once"):
        audit_session([training(part, index) for index, part in enumerate(parts)], spans)


def test_tokens_of_another_nucleus_are_found() -> None:
    nuclei = np.array([[5, 2], [6, -1]], np.int32)
    drawn = replace(span([8], [5, 6], [-0.5, -0.25], 3), nucleus_ids=nuclei)
    row = Trajectory(
        prompt_uid="p0",
        session_index=0,
        input_ids=np.array([8, 5, 6], np.int32),
        loss_mask=np.array([0, 1, 1], np.bool_),
        rollout_logprobs=np.array([0, -0.5, -0.25], np.float32),
        policy_versions=np.array([-1, 3, 3], np.int32),
        nucleus_ids=np.concatenate([[[-1, -1]], nuclei]).astype(np.int32),
    )
    audit_trajectory(row, [drawn])
    other = np.array(row.nucleus_ids)
    other[2, 1] = 4
    for changed_row, spans in (
        (replace(row, nucleus_ids=other), [drawn]),
        (replace(row, nucleus_ids=None), [drawn]),
        (row, [replace(drawn, nucleus_ids=None)]),
    ):
        with pytest.raises(DataError, match="or from another nucleus"):
            audit_trajectory(changed_row, spans)


NUM_LAYERS, TOP_K = 3, 2


def with_experts(given, seed):
    """Add experts as an engine reports them: a distinct row per token except the last; layer 1 is dense."""
    num_tokens = len(given.input_ids) + len(given.token_ids)
    rows = 1000 * seed + np.arange(num_tokens * NUM_LAYERS * TOP_K).reshape(num_tokens, NUM_LAYERS, TOP_K)
    rows[:, 1] = rows[-1] = -1
    return replace(given, routed_experts=rows.astype(np.int16))


@st.composite
def routed_sessions(draw):
    """Draw a session as `sessions` does, with experts, and add spans of other sessions with the same beginning."""
    trajectory, spans = draw(sessions())
    spans = [with_experts(one, seed) for seed, one in enumerate(spans)]
    told = join_experts([one.routed_experts for one in spans], len(trajectory.input_ids))
    first, *_ = spans
    others = [
        with_experts(span(first.input_ids.tolist(), [*first.token_ids[:kept].tolist(), 9], [-1.0] * (kept + 1), 3), 9)
        for kept in range(draw(st.integers(0, len(first.token_ids))))
    ]
    return replace(trajectory, routed_experts=told), draw(st.permutations([*spans, *others]))


@given(routed_sessions())
def test_the_experts_of_every_sampled_session_pass(session):
    assert refusal(audit_session, [session[0]], session[1]) is None


def other_rows(data, trajectory):
    """Return the trajectory's experts, changed before its last trained token."""
    experts, num_rows = trajectory.routed_experts.copy(), int(np.flatnonzero(trajectory.loss_mask)[-1])
    row, layer = data.draw(st.integers(0, num_rows - 1)), data.draw(st.sampled_from([0, 2]))
    kind = data.draw(st.sampled_from(["one", "order", "dropped", "swapped", "shifted", "dense"]))
    if kind == "one":
        experts[row, layer, data.draw(st.integers(0, TOP_K - 1))] += data.draw(st.sampled_from([-1, 1, 5]))
    elif kind == "order":
        experts[row, layer] = experts[row, layer, ::-1]
    elif kind == "dropped":
        experts[row] = -1
    elif kind == "swapped":
        other = data.draw(st.integers(0, num_rows).filter(lambda index: index != row))
        experts[[row, other]] = experts[[other, row]]
    elif kind == "shifted":
        experts[row + 1 :] = experts[row:-1]
        experts[row] = -1
    else:
        experts[row, 1] = 0
    return experts, row if kind not in ("swapped",) else None


@given(routed_sessions(), st.data())
def test_experts_that_are_not_those_of_the_engine_are_found(session, data):
    trajectory, spans = session
    experts, row = other_rows(data, trajectory)
    with pytest.raises(
        DataError, match=rf"p/\d/0: token {'' if row is None else row}.* in layer [012], but the engine"
    ):
        audit_session([replace(trajectory, routed_experts=experts)], spans)


def test_the_row_of_a_sampled_token_is_that_of_its_request():
    first, second = (with_experts(one, seed) for seed, one in enumerate(SPANS))
    told = join_experts([first.routed_experts, second.routed_experts], 8)
    audit_experts(replace(TRAJECTORY, routed_experts=told), [second, first])
    again = told.copy()
    again[2] = second.routed_experts[2]  # recomputed for the second turn
    with pytest.raises(
        DataError, match=r"p/0/0: token 2 \(5\) has experts \[1012, 1013\] in layer 0.* used \[12, 13\]"
    ):
        audit_experts(replace(TRAJECTORY, routed_experts=again), [first, second])
    first.routed_experts[2] = 0
    with pytest.raises(DataError, match=r"token 2 \(5\) has experts \[1012, 1013\] in layer 0.* used \[0, 0\]"):
        audit_experts(replace(TRAJECTORY, routed_experts=again), [first, second])
    told[2] = 0
    unread = told.copy()
    unread[7] = 5
    audit_experts(replace(TRAJECTORY, routed_experts=unread), [first, second])
    masked = masked_before(TRAJECTORY, 6)  # trains only the second turn
    for experts in (told, again):
        audit_experts(replace(masked, routed_experts=experts), [first, second])


def test_experts_that_nobody_told_are_found():
    routed = [with_experts(one, seed) for seed, one in enumerate(SPANS)]
    made_up = np.zeros((8, NUM_LAYERS, TOP_K), np.int16)
    audit_experts(replace(TRAJECTORY, routed_experts=made_up - 1), SPANS)
    for experts, spans, message in (
        (made_up, SPANS, r"token 0 .* has experts \[0, 0\] in layer 0, .* used \[-1, -1\]"),
        (None, routed, r"token 0 .* has experts \[-1, -1\] in layer 0, .* used \[0, 1\]"),
        (made_up[:, :2], routed, r"has \[2, 2\] \(layers, top_k\) per token; the engine reported \[3, 2\]"),
    ):
        with pytest.raises(DataError, match=message):
            audit_experts(replace(TRAJECTORY, routed_experts=experts), spans)


# -- random sessions of few tokens, judged by the definitions


def begins(span, trajectory, stop):
    """Whether the trajectory's tokens before `stop` are those of the request and its response."""
    said = [*span.input_ids, *span.token_ids]
    return stop <= len(said) and said[:stop] == trajectory.input_ids[:stop].tolist()


def sampled(span, trajectory, position):
    """Whether the span proves a trained token."""
    index = position - len(span.input_ids)
    return (
        index >= 0
        and begins(span, trajectory, position + 1)
        and span.logprobs[index] == trajectory.rollout_logprobs[position]
        and span.policy_versions[index] == trajectory.policy_versions[position]
    )


def wrong_rows(trajectory, spans):
    """Return the rows of experts that no request reported where it decides."""
    last = int(np.flatnonzero(trajectory.loss_mask).max(initial=0))
    wrong = []
    for row in range(last):
        telling = [one for one in spans if row < len(one.routed_experts) and one.routed_experts[row].max() >= 0]
        deciding = [one for one in telling if trajectory.loss_mask[row + 1] and sampled(one, trajectory, row + 1)]
        inputs = [one for one in telling if begins(one, trajectory, max(row + 1, len(one.input_ids)))]
        inputs = [one for one in inputs if len(one.token_ids) and len(one.input_ids) < len(trajectory.input_ids)]
        told = [one.routed_experts[row].tolist() for one in deciding or inputs] or [[[-1], [-1]]]
        if trajectory.routed_experts[row].tolist() not in told:
            wrong.append(row)
    return wrong


def draw_trajectory(draw, tokens, **changes):
    """Draw which of the tokens train, with one of two logprobs and versions each."""
    mask = np.array([draw.random() < 0.5 for _ in tokens])
    return Trajectory(
        prompt_uid="p",
        session_index=draw.randint(0, 3),
        input_ids=ids(*tokens),
        loss_mask=mask,
        rollout_logprobs=np.array([-draw.choice([1.0, 1.0, 2.0]) * one for one in mask], np.float32),
        policy_versions=np.array([draw.choice([3, 3, 4]) if one else -1 for one in mask], np.int32),
        **changes,
    )


def draw_span(draw, tokens, experts):
    """Draw a request whose tokens are often those of the trajectory, and what it reported, sometimes nothing."""
    said = list(tokens) if draw.random() < 0.6 else [draw.choice([token, token, token, 5]) for token in tokens]
    said = said[: draw.randint(1, len(said))] + [1] * (draw.random() < 0.3)
    cut = draw.randint(1, len(said))
    given = span(said[:cut], said[cut:], [-draw.choice([1.0, 1.0, 2.0]) for _ in said[cut:]], draw.choice([3, 3, 4]))
    rows = [draw.choice([*row, *row, [[7], [7]], [[-1], [-1]]]) for row in experts[: len(said)]]
    rows += [[[-1], [-1]]] * (len(said) - len(rows))
    return replace(given, routed_experts=np.array(rows, np.int16))


def draw_case(seed):
    """Draw the tokens of a session, its requests, and the experts of each token, of which one is usual."""
    draw = random.Random(seed)
    tokens = [draw.randint(1, 3) for _ in range(draw.randint(2, 6))]
    experts = [[[[draw.randint(0, 1)], [2]]] for _ in tokens]
    return draw, tokens, experts, [draw_span(draw, tokens, experts) for _ in range(draw.randint(1, 6))]


def found_position(audit):
    try:
        audit()
    except DataError as error:
        return int(re.search(r"token (\d+)", str(error)).group(1))
    return None


def test_a_session_passes_if_and_only_if_each_trained_token_was_sampled_there():
    found = Counter()
    for seed in range(600):
        draw, tokens, _, spans = draw_case(seed)
        row = draw_trajectory(draw, tokens)
        trained = np.flatnonzero(row.loss_mask).tolist()
        unproven = [position for position in trained if not any(sampled(one, row, position) for one in spans)]
        position = found_position(lambda row=row, spans=spans: audit_trajectory(row, spans))
        assert position == next(iter(unproven), None), seed
        found[position is None] += 1
    assert min(found.values()) > 50


def test_experts_pass_if_and_only_if_the_request_that_decides_reported_them():
    found = Counter()
    for seed in range(600):
        draw, tokens, experts, spans = draw_case(seed)
        rows = [draw.choice([*row] * 6 + [[[-1], [-1]], [[7], [7]]]) for row in experts]
        row = draw_trajectory(draw, tokens, routed_experts=np.array(rows, np.int16))
        position = found_position(lambda row=row, spans=spans: audit_experts(row, spans))
        assert position == next(iter(wrong_rows(row, spans)), None), seed
        found[position is None] += 1
    assert min(found.values()) > 50


def test_a_token_of_several_trajectories_passes_if_and_only_if_it_was_sampled_as_often():
    found = Counter()
    for seed in range(600):
        draw, tokens, _, _ = draw_case(seed)
        rows = [draw_trajectory(draw, tokens[: draw.randint(2, 9)], output_index=index) for index in range(4)]
        session, group = rows[:3], rows[: draw.choice([3, 4])]
        later = tokens[1:]
        spans = [span(tokens[:1], later, [-1.0] * len(later), 3) for _ in range(draw.randint(0, 4))]

        def trains(one, other, position):
            names = ("loss_mask", "rollout_logprobs", "policy_versions")
            return position < len(other.input_ids) and all(
                getattr(one, name)[position] == getattr(other, name)[position] for name in names
            )

        expected = None
        for index, one in enumerate(session):
            for position in np.flatnonzero(one.loss_mask).tolist():
                num_trained = sum(trains(one, other, position) for other in group)
                num_sampled = sum(sampled(given, one, position) for given in spans)
                is_again = any(trains(one, other, position) for other in session[:index])
                if expected is None and is_again and num_trained > num_sampled:
                    expected = position

        def audit(session=session, group=group, spans=spans):
            for index in range(1, 3):
                _check_once(session[index], earlier=session[:index], spans=spans, group=group)

        position = found_position(audit)
        assert position == expected, seed
        found[position is None] += 1
    assert min(found.values()) > 50


class Tampering(SingleTurnLoop):
    """Changes a logprob of session 1 after sampling."""

    async def run_group(self, prompt, *, num_sessions, context):
        results = await super().run_group(prompt, num_sessions=num_sessions, context=context)
        (trajectory,) = results[1].trajectories
        trajectory.rollout_logprobs[-1] -= 0.5
        return results


def run(loop, *, says=((3, 4), (5, 6), (7, 8)), **options):
    engine = ScriptedEngine({(1, 2): [list(said) for said in says]})
    scorer = RewardScorer(quick(lambda _given: 1.0))
    rollout = Rollout(
        engine,
        loop,
        scorer=scorer,
        decode=lambda rows: ["" for _ in rows],
        options=RolloutOptions(audit=AuditOptions(**options)),
    )

    async def everything():
        await engine.start()
        return await rollout.run(
            [Prompt(uid=f"u{i}", input_ids=ids(1, 2)) for i in range(20)],
            num_sessions=3,
            sampling=SamplingParams(max_tokens=4),
        )

    return asyncio.run(everything())


def test_a_session_that_fails_the_audit_never_trains_and_is_counted():
    for group in run(Tampering()):
        assert [session.failure is None for session in group.sessions] == [True, False, True]
        assert group.failures[0].startswith("audit: trajectory u")
        assert "token 3 (6) is trained, but the engine sampled it with another logprob" in group.failures[0]
        assert (group.num_audited, group.num_audit_failures) == (3, 1)
        assert [trajectory.session_index for trajectory in group.trajectories] == [0, 2]
        assert group.sessions[1].trajectories[0].reward is None


def test_the_share_decides_how_many_are_audited_and_the_seed_which():
    assert sum(group.num_audited for group in run(SingleTurnLoop(), share=0.0)) == 0
    assert sum(group.num_audited for group in run(SingleTurnLoop())) == 60
    half = [[g.num_audited for g in run(SingleTurnLoop(), share=0.5, seed=seed)] for seed in (1, 1, 2)]
    assert 15 < sum(half[0]) < 45
    assert half[0] == half[1] != half[2]
    usual = AuditOptions()
    assert (usual.share, usual.rescored_share, usual.rescored_tolerance, usual.seed) == (1.0, 0.02, 0.3, 0)
    with pytest.raises(SettingsError, match=r"share of AuditOptions .* at most 1; found 1\.5"):
        AuditOptions(share=1.5)


def test_trajectories_under_anothers_name_are_found():
    class Misnaming(SingleTurnLoop):
        async def run_group(self, prompt, *, num_sessions, context):
            results = await super().run_group(prompt, num_sessions=num_sessions, context=context)
            return [SessionResult(trajectories=results[0].trajectories), *results[1:]][::-1]

    first, *_ = run(Misnaming())
    assert [session.failure is None for session in first.sessions] == [False, True, False]
    assert first.failures[0] == (
        "agent loop Misnaming returned a trajectory named ('u0', 2, 0) (prompt, session, output); "
        "expected ('u0', 0, 0)."
    )


def test_a_loop_that_trains_a_response_twice_fails_these_sessions():
    class Doubling(SingleTurnLoop):
        """Session 1 returns its response twice; session 2 samples the same response, and trains it too."""

        async def run_group(self, prompt, *, num_sessions, context):
            results = await super().run_group(prompt, num_sessions=num_sessions, context=context)
            (trajectory,) = results[1].trajectories
            results[1] = SessionResult(trajectories=(trajectory, replace(trajectory, output_index=1)))
            return results

    for group in run(Doubling(), says=[[3, 4], [5, 6], [5, 6]]):
        assert [session.failure is None for session in group.sessions] == [True, False, True]
        assert (group.num_audited, group.num_audit_failures) == (3, 1)
        assert "token 2 (5) is also trained by output 0 of its session" in group.failures[0]


def test_the_record_is_a_copy():
    engine = RecordingEngine(ScriptedEngine({(1,): [[3, 4]]}))

    async def ask():
        await engine.start()
        request = GenerateRequest(input_ids=ids(1), sampling=SamplingParams(max_tokens=4))
        (generation,) = await engine.generate(request)
        generation.logprobs[:] = 9
        request.input_ids[:] = 9

    asyncio.run(ask())
    assert engine.traits.name == "scripted"
    assert engine.spans[0].logprobs.tolist() == [-1, -1]
    assert engine.spans[0].input_ids.tolist() == [1]


def test_requests_that_continue_one_another_share_one_copy_of_their_context():
    asked = [[1], [1, 2], [1, 2, 3, 4], [1, 9], [1, 2], [1, 9, 5], [1, 2, 3, 4, 6], [1, 9], [1, 2]]
    engine = RecordingEngine(ScriptedEngine(lambda *_: [7]))

    async def ask():
        await engine.start()
        for input_ids in asked:
            await engine.generate(GenerateRequest(input_ids=ids(*input_ids), sampling=SamplingParams(max_tokens=4)))

    asyncio.run(ask())
    kept = [span.input_ids for span in engine.spans]
    assert [input_ids.tolist() for input_ids in kept] == asked
    whole = {id(input_ids.base): input_ids.base.tolist() for input_ids in kept}
    assert list(whole.values()) == [[1, 2, 3, 4, 6], [1, 9, 5]]
