"""vLLM's scores of a sequence and of many alternatives, computed in pieces of prompts and rows."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rl_core.errors import EngineError
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.testing import generate, make_tiny_model, reference_logprobs, refuses
from rl_rollout.testing.generation_checks import check_token_scores
from rl_rollout.testing.reference_model import PROMPT

VOCAB_SIZE = 1100


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("wide"), is_tied=True, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def wide_engine(wide_model_dir: Path, learner_process_group: None) -> Iterator[VLLMEngine]:
    """Start an engine with steps of 64 tokens, which computes a prompt of 200 tokens in four pieces."""
    options = VLLMOptions(
        max_model_len=200, max_num_seqs=16, max_num_batched_tokens=64, kv_cache_gib=0.01, max_top_k=1000
    )
    engine = VLLMEngine(wide_model_dir, options)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


def drawn(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


@pytest.mark.parametrize("top_k", [64, 1000])
@pytest.mark.parametrize("max_rows", [512, 7])
def test_a_long_sequence_in_pieces_keeps_every_row(
    wide_engine: VLLMEngine, wide_model_dir: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, max_rows: int
) -> None:
    from rl_rollout.engines.vllm import (
        prompt_scores as vllm_prompt_scores,  # imports vLLM, after the engine has set it up
    )

    monkeypatch.setattr(vllm_prompt_scores, "MAX_ROWS", max_rows)
    sequences = [drawn(0, 200), drawn(1, 65), drawn(2, 64), drawn(3, 63), drawn(4, 128), drawn(5, 129)]
    scored = asyncio.run(wide_engine.score(sequences, top_k=top_k))
    for sequence, scores in zip(sequences, scored, strict=True):
        check_token_scores(scores, sequence, top_k=top_k, reference=reference_logprobs(wide_model_dir, sequence))


def test_sequences_with_different_numbers_of_likeliest_tokens_share_a_step(
    wide_engine: VLLMEngine, wide_model_dir: Path
) -> None:
    async def ask() -> list:
        return await asyncio.gather(*(wide_engine.score([drawn(seed, 20)], top_k=seed * 5) for seed in range(12)))

    for seed, (scores,) in enumerate(asyncio.run(ask())):
        reference = reference_logprobs(wide_model_dir, drawn(seed, 20))
        check_token_scores(scores, drawn(seed, 20), top_k=seed * 5, reference=reference)


def test_scores_are_at_temperature_one_whatever_is_drawn_beside_them(
    wide_engine: VLLMEngine, wide_model_dir: Path
) -> None:
    hot = SamplingParams(max_tokens=60, temperature=2.0, top_k=5, top_p=0.5, seed=1)
    request = GenerateRequest(input_ids=PROMPT, sampling=hot, num_samples=4)

    async def both() -> list:
        running = asyncio.ensure_future(wide_engine.generate(request))
        scored = await wide_engine.score([drawn(9, 100)], top_k=64)
        await running
        return scored

    (scores,) = asyncio.run(both())
    check_token_scores(scores, drawn(9, 100), top_k=64, reference=reference_logprobs(wide_model_dir, drawn(9, 100)))


def test_a_request_does_not_wait_behind_all_that_is_to_be_scored(wide_engine: VLLMEngine) -> None:
    num_scored = []

    async def both() -> int:
        scoring = [asyncio.ensure_future(wide_engine.score([drawn(i, 150)], top_k=8)) for i in range(60)]
        for future in scoring:
            future.add_done_callback(num_scored.append)
        await asyncio.sleep(0)  # so that the scores are requested first
        await wide_engine.generate(GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=4, seed=0)))
        num_before = len(num_scored)
        await asyncio.gather(*scoring)
        return num_before

    assert asyncio.run(both()) < 20
    assert len(num_scored) == 60


def test_what_waits_to_be_scored_can_be_aborted_and_leaves_no_trace(wide_engine: VLLMEngine) -> None:
    async def abort() -> BaseException | list:
        scoring = asyncio.ensure_future(wide_engine.score([drawn(i, 150) for i in range(40)], top_k=8))
        await asyncio.sleep(0)
        await wide_engine.abort(None)
        return (await asyncio.gather(scoring, return_exceptions=True))[0]

    error = asyncio.run(abort())
    assert isinstance(error, EngineError)
    assert "of 40 sequences were aborted unscored" in str(error)
    assert wide_engine._stepper._num_scoring_tokens == 0
    assert not wide_engine._stepper._to_score
    assert len(generate(wide_engine)) == 1


def test_more_than_the_engine_was_started_for_is_refused_with_what_to_set(wide_engine: VLLMEngine) -> None:
    assert wide_engine.traits.max_top_k == 1000
    with refuses("with max_top_k = 1001 (VLLMOptions.max_top_k)"):
        asyncio.run(wide_engine.score([PROMPT], top_k=1001))
