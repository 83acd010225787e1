"""A vLLM teacher and a Megatron teacher of the same model, in separate processes, agree in float32."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tiny_run import make_tiny_run

from rl_core import RowKey
from rl_distill.teacher.engine_teacher import EngineReplica
from rl_distill.teacher.megatron_teacher import MegatronPlace, MegatronReplica
from rl_distill.teacher.protocol import TeacherReplica
from rl_distill.teacher.scores import TeacherRow, TeacherScores
from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.process import ProcessEngine

pytest.importorskip("vllm")

TOP_K = 8
LENGTHS = (2, 30, 7, 64, 1)


def rows(vocab_size: int) -> list[TeacherRow]:
    random = np.random.default_rng(0)
    return [
        TeacherRow(
            key=RowKey(f"p{index}", 0, 0),
            input_ids=random.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
        )
        for index, length in enumerate(LENGTHS)
    ]


async def scores_of(replica: TeacherReplica, sequences: list[TeacherRow]) -> list[TeacherScores]:
    try:
        await replica.start()
        first = await replica.score(sequences, top_k=TOP_K, with_hidden=False)
        if replica.can_sleep:
            await replica.sleep()
            await replica.wake()
            again = await replica.score(sequences, top_k=TOP_K, with_hidden=False)
            for one, other in zip(first, again, strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)
        return first
    finally:
        await replica.close()


def test_vllm_and_megatron_teachers_agree(tmp_path: Path) -> None:
    policy = make_tiny_run(tmp_path).folder / "policy"
    options = VLLMOptions(max_model_len=64, kv_cache_gib=0.25, num_threads=1, max_top_k=TOP_K)
    sequences = rows(20)
    engine = asyncio.run(scores_of(EngineReplica(ProcessEngine("vllm", policy, options)), sequences))
    megatron = asyncio.run(scores_of(MegatronReplica(policy, MegatronPlace(num_threads=1)), sequences))
    for row, one, other in zip(sequences, engine, megatron, strict=True):
        for found in (one, other):
            assert found.token_ids.shape == found.logprobs.shape == (len(row.input_ids), TOP_K + 1)
            np.testing.assert_array_equal(found.token_ids[1:, 0], row.input_ids[1:])
        np.testing.assert_allclose(one.logprobs[1:], other.logprobs[1:], rtol=0, atol=1e-4)
        gaps = np.abs(np.diff(other.logprobs[1:, 1:], axis=1))
        is_clear = np.ones_like(other.token_ids[1:, 1:], dtype=bool)  # ties and the last of the top k may differ
        is_clear[:, :-1] &= gaps > 2e-4
        is_clear[:, 1:] &= gaps > 2e-4
        is_clear[:, -1] = False
        np.testing.assert_array_equal(one.token_ids[1:, 1:][is_clear], other.token_ids[1:, 1:][is_clear])
        assert len(row.input_ids) == 1 or is_clear[:, :-1].mean() > 0.5
