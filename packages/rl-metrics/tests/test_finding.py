import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_metrics.health.finding import Check, Evidence, Finding, Verdict

FINDING = Finding(
    rule="kl_high",
    side="convergence",
    severity="critical",
    what="The policy moves too far in a step.",
    since_step=12,
    evidence=(Evidence(metric="actor/ppo_kl", text="0.08 nats, at most 0.03 is healthy", value=0.08),),
    causes=("learning rate too high",),
    advice=("halve actor.lr", "clip gradients"),
)
VERDICT = Verdict(
    status="critical",
    step=20,
    checks=(
        Check(rule="kl_high", side="convergence", title="KL", status="critical", reading="0.08"),
        Check(rule="memory", side="efficiency", title="Memory", status="unknown", reading="no metric"),
    ),
    findings=(FINDING,),
)


def test_a_verdict_comes_back_from_its_json():
    row = json.loads(json.dumps(VERDICT.to_json()))
    assert Verdict.from_json(row) == VERDICT
    assert row["status"] == "critical"
    assert [check["rule"] for check in row["checks"]] == ["kl_high", "memory"]
    assert row["findings"][0]["evidence"] == [
        {"metric": "actor/ppo_kl", "text": "0.08 nats, at most 0.03 is healthy", "value": 0.08}
    ]


def test_a_value_that_is_not_finite_is_null():
    evidence = tuple(Evidence(metric="m", text="t", value=value) for value in (math.nan, math.inf))
    finding = replace(FINDING, evidence=evidence)
    row = replace(VERDICT, findings=(finding,)).to_json()
    assert [one["value"] for one in row["findings"][0]["evidence"]] == [None, None]


@pytest.mark.parametrize(
    ("path", "junk"),
    [
        (("status",), "fine"),
        (("status",), ["ok"]),
        (("step",), "20"),
        (("step",), True),
        (("checks",), {}),
        (("findings", 0), None),
        (("findings", 0, "since_step"), 1.5),
        (("findings", 0, "severity"), "ok"),
        (("findings", 0, "side"), 3),
        (("findings", 0, "causes"), [1]),
        (("findings", 0, "advice"), "try harder"),
        (("findings", 0, "evidence", 0, "value"), "0.08"),
        (("findings", 0, "evidence", 0, "value"), 10**400),
        (("findings", 0, "evidence", 0, "metric"), None),
        (("checks", 0, "rule"), 1),
    ],
)
def test_junk_is_refused(path, junk):
    row = copy.deepcopy(VERDICT.to_json())
    place = row
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = junk
    with pytest.raises(DataError, match=r"a verdict must be an object of Verdict\.to_json"):
        Verdict.from_json(row)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["status", "step", "checks", "findings", "rule"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(JSON)
def test_anything_else_is_refused(row):
    with pytest.raises(DataError, match=r"a verdict must be an object of Verdict\.to_json"):
        Verdict.from_json(row)
