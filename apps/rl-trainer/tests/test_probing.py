"""What the policy thinks at chosen tokens."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rl_core import Prompt, Trajectory
from rl_core.errors import EngineError
from rl_rollout.engines.protocol import TokenScores
from rl_rollout.rollout import GroupResult, SessionResult
from rl_trainer.probing import MAX_TOKENS, Probes

PROMPT = (7, 8)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        assert not skip_special_tokens
        return ["".join(chr(96 + int(token)) for token in sequence) for sequence in sequences]


class Engine:
    """Thinks of each token as it is told; the likeliest is the token after it in the alphabet."""

    def __init__(self) -> None:
        self.sure: dict[int, float] = {}
        self.asked: list[list[list[int]]] = []
        self.error: Exception | None = None

    async def score(self, sequences: Any, top_k: int) -> list[TokenScores]:
        if self.error is not None:
            raise self.error
        self.asked.append([sequence.tolist() for sequence in sequences])
        return [self._scores(sequence, top_k) for sequence in sequences]

    def _scores(self, sequence: Any, top_k: int) -> TokenScores:
        ids = np.stack([sequence, *[sequence + 1 + rank for rank in range(top_k)]], axis=1)
        likeliest = np.asarray([self.sure.get(int(token), -0.01) for token in sequence], dtype=np.float32)
        logprobs = np.stack([np.full(len(sequence), -2.0), *[likeliest - rank for rank in range(top_k)]], axis=1)
        return TokenScores(token_ids=ids.astype(np.int32), logprobs=logprobs.astype(np.float32))


def group(uid: str, *response: int) -> GroupResult:
    ids = np.asarray([*PROMPT, *response], dtype=np.int32)
    row = Trajectory(
        prompt_uid=uid,
        session_index=0,
        input_ids=ids,
        loss_mask=np.arange(len(ids)) >= len(PROMPT),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        policy_versions=np.zeros(len(ids), dtype=np.int32),
    )
    prompt = Prompt(uid=uid, input_ids=ids[:2])
    return GroupResult(prompt=prompt, sessions=(SessionResult(trajectories=(row,)),))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "probes.jsonl"


def ask(probes: Probes, engine: Engine, *groups: GroupResult, step: int = 0, **options: Any) -> None:
    asyncio.run(probes.ask(engine.score, groups, step=step, version=step, **options))


def lines(path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_least_sure_tokens_are_asked_about_at_each_validation(path):
    engine = Engine()
    engine.sure = {2: -1.5, 5: -0.7}
    probes = Probes(path, Letters(), count=2)  # type: ignore[arg-type]
    groups = (group("p", 1, 2, 3), group("q", 4, 5))
    ask(probes, engine, *groups, step=0)
    engine.sure[2] = -0.25
    ask(probes, engine, step=5, top_k=2)
    found = lines(path)
    assert [(row["step"], row["probe"], row["position"], row["token"]) for row in found] == [
        (0, "p/1", 1, "b"),
        (0, "q/1", 1, "e"),
        (5, "p/1", 1, "b"),
        (5, "q/1", 1, "e"),
    ]
    assert (found[2]["prompt"], found[2]["response"], found[2]["policy_version"]) == ("gh", "ab", 5)
    assert found[2]["logprob"] == -2.0
    assert found[2]["candidates"] == [["c", -0.25], ["d", -1.25]]
    assert engine.asked[-1] == [[7, 8, 1, 2], [7, 8, 4, 5]]


def test_a_resumed_run_goes_on_with_the_same_tokens(path):
    engine = Engine()
    ask(Probes(path, Letters(), count=1), engine, group("p", 1, 2))  # type: ignore[arg-type]
    with path.open("a") as file:
        file.write(
            '{"probe":"x","ids":[1,2],"num_prompt_tokens":9}\n{"probe":"y","ids":[1,null],"num_prompt_tokens":1}\n{"to'
        )
    engine.asked.clear()
    ask(Probes(path, Letters(), count=1), engine, group("other", 3, 4), step=5)  # type: ignore[arg-type]
    assert engine.asked == [[[7, 8, 1]]]


def test_what_cannot_be_probed_is_left_out(path):
    engine = Engine()
    failed = GroupResult(prompt=Prompt(uid="f", input_ids=np.asarray(PROMPT, dtype=np.int32)), sessions=())
    probes = Probes(path, Letters(), count=3)  # type: ignore[arg-type]
    ask(probes, engine, failed, group("long", *([1] * MAX_TOKENS)))
    assert not path.exists()
    ask(probes, engine, failed, group("p", 1))
    assert [row["probe"] for row in lines(path)] == ["p/0"]


@pytest.mark.parametrize(("count", "top_k"), [(0, 5), (2, 0)])
def test_none_are_asked_where_none_are_wanted_or_can_be(path, count, top_k):
    engine = Engine()
    ask(Probes(path, Letters(), count=count), engine, group("p", 1), top_k=top_k)  # type: ignore[arg-type]
    assert engine.asked == []
    assert not path.exists()


def test_an_engine_that_cannot_score_stops_nothing(path):
    engine = Engine()
    engine.error = EngineError("no prompt logprobs here")
    probes = Probes(path, Letters(), count=2)  # type: ignore[arg-type]
    with capture_logs() as logs:
        ask(probes, engine, group("p", 1))
        engine.error = None
        ask(probes, engine, group("p", 1))
    assert [(one["event"], one["error"]) for one in logs] == [("probes_failed", "EngineError: no prompt logprobs here")]
    assert engine.asked == []
