"""Teachers on an engine, and on Megatron's ranks in separate processes."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.cluster import ClusterOptions
from rl_core.data.row_keys import RowKey
from rl_core.errors import EngineDiedError, NotReadyError, TeacherError
from rl_distill.teacher.engine_teacher import EngineReplica
from rl_distill.teacher.protocol import TeacherTraits
from rl_distill.teacher.scores import ScoreShape, TeacherRow, check_scores


@dataclass
class Traits:
    max_model_len: int = 32
    vocab_size: int = 16
    can_sleep: bool = True
    max_top_k: int = 20


@dataclass
class Scores:
    token_ids: Any
    logprobs: Any


@dataclass
class FakeEngine:
    """An engine that records its calls."""

    traits: Traits = field(default_factory=Traits)
    calls: list[str] = field(default_factory=list)

    async def start(self) -> None:
        self.calls.append("start")

    async def score(self, sequences: Sequence[Any], *, top_k: int) -> list[Scores]:
        self.calls.append(f"score {len(sequences)} by {top_k}")
        return [
            Scores(
                np.concatenate([ids[:, None], np.zeros((len(ids), top_k), np.int32)], axis=1),
                np.full((len(ids), top_k + 1), -1, np.float32),
            )
            for ids in sequences
        ]

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def close(self) -> None:
        self.calls.append("close")


def row(*ids: int) -> TeacherRow:
    mask: Any = np.arange(len(ids)) > 0
    return TeacherRow(key=RowKey("p", 0, 0), input_ids=np.asarray(ids, np.int32), loss_mask=mask)


def test_an_engine_scores_sleeps_and_wakes_only_when_it_slept() -> None:
    engine = FakeEngine()
    replica = EngineReplica(engine)

    async def use() -> None:
        await replica.start()
        await replica.wake()
        (first, second) = await replica.score([row(1, 2, 3), row(4, 5)], top_k=2, with_hidden=False)
        assert (first.logprobs.shape, second.token_ids.tolist()) == ((3, 3), [[4, 0, 0], [5, 0, 0]])
        await replica.sleep()
        await replica.wake()
        await replica.wake()
        await replica.close()

    asyncio.run(use())
    assert engine.calls == ["start", "score 2 by 2", "sleep", "wake", "close"]
    assert (replica.traits, replica.most_top_k) == (TeacherTraits(vocab_size=16, hidden_size=None, max_tokens=32), 16)


def test_an_engine_gives_no_hidden_states() -> None:
    with pytest.raises(TeacherError, match="returns no hidden states"):
        asyncio.run(EngineReplica(FakeEngine()).score([row(1, 2)], top_k=0, with_hidden=True))


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def test_ranks_score_and_a_killed_one_is_a_death(tmp_path: Path) -> None:
    pytest.importorskip("megatron")
    transformers = pytest.importorskip("transformers")
    import torch

    from rl_distill.teacher.megatron_teacher import MegatronPlace, MegatronReplica

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).float()
    model.save_pretrained(tmp_path / "model")
    place = MegatronPlace(cluster=ClusterOptions(log_directory=tmp_path / "logs"), num_threads=1, max_tokens=32)
    replica = MegatronReplica(tmp_path / "model", place)

    async def use() -> None:
        with pytest.raises(NotReadyError, match="not loaded"):
            _ = replica.traits
        await replica.start()
        assert (replica.traits, replica.most_top_k) == (TeacherTraits(vocab_size=16, hidden_size=16, max_tokens=32), 16)
        rows = [row(1, 2, 3, 4), row(5, 6)]
        scores = await replica.score(rows, top_k=3, with_hidden=True)
        for one, asked in zip(scores, rows, strict=True):
            shape = ScoreShape(top_k=3, vocab_size=16, hidden_size=16)
            checked = check_scores(one, asked, teacher="ranks", shape=shape)
            with torch.no_grad():
                logits = model(torch.from_numpy(asked.input_ids.astype(np.int64))[None]).logits[0]
            expected = torch.log_softmax(logits, dim=-1).numpy()[
                np.arange(len(asked.input_ids) - 1), asked.input_ids[1:]
            ]
            np.testing.assert_allclose(checked.logprobs[1:, 0], expected, atol=1e-5)
        await replica.sleep()
        await replica.wake()
        (again,) = await replica.score(rows[:1], top_k=3, with_hidden=False)
        np.testing.assert_allclose(again.logprobs, scores[0].logprobs, atol=1e-6)
        (log,) = (tmp_path / "logs").glob("*.log")
        os.kill(int(log.read_text().partition("pid")[2].strip(" =:").split()[0].rstrip(",;)")), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"the teacher's ranks ended: .*SIGKILL"):
            await replica.score(rows, top_k=3, with_hidden=False)

    async def use_and_close() -> None:
        try:
            await use()
        finally:
            await replica.close()

    asyncio.run(use_and_close())
