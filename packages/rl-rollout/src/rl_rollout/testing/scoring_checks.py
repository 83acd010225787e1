# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of scores of given tokens, with the most probable tokens next to them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_core.data import FloatArray, IntArray
from rl_core.weights import TokenScores
from rl_rollout.engines.protocol import EngineTraits, Generation, RolloutEngine
from rl_rollout.testing.engine_calls import begin, long_request, refuses, short_request
from rl_rollout.testing.reference_model import reference_logprobs

TOLERANCE = 1e-4
"""Maximum difference of a logprob in float32, in nats."""


def check_token_scores(scores: TokenScores, sequence: IntArray, *, top_k: int, reference: FloatArray) -> None:
    """Compare an engine's scores with a model's logprobs.

    Tokens with the same probability as the last of the top_k may replace it.

    Args:
        scores: Scores of the sequence.
        sequence: [T] token ids.
        top_k: Number of most probable tokens requested.
        reference: [T, V] logprobs after each token.
    """
    ids, logprobs = scores.token_ids, scores.logprobs
    assert ids.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert ids.shape == logprobs.shape == (len(sequence), top_k + 1)
    assert set(ids[0].tolist()) == {-1}
    assert set(logprobs[0].tolist()) == {0.0}
    assert ids[1:, 0].tolist() == sequence[1:].tolist()
    rows = reference[:-1]
    np.testing.assert_allclose(logprobs[1:], np.take_along_axis(rows, ids[1:], axis=-1), atol=TOLERANCE)
    likeliest = -np.sort(-rows, axis=-1)[:, :top_k]
    np.testing.assert_allclose(logprobs[1:, 1:], likeliest, atol=TOLERANCE)
    assert (np.diff(logprobs[1:, 1:], axis=-1) <= 0).all()
    assert all(len(set(row)) == top_k for row in ids[1:, 1:].tolist())
    assert (np.exp(logprobs[1:, 1:]).sum(-1) <= 1 + 1e-4).all()


class ScoringChecks:
    """Checks of scoring. A subclass provides `model_dir` and `engine`, started and serving it in float32."""

    def test_the_likeliest_tokens_are_the_reference_models(self, engine: RolloutEngine, model_dir: Path) -> None:
        sequences = _sequences(engine.traits, lengths=(7, 1, 2, 33, engine.traits.max_model_len))
        for top_k in (1, _some(engine.traits)):
            for sequence, scores in zip(sequences, _ask(engine, sequences, top_k=top_k), strict=True):
                check_token_scores(scores, sequence, top_k=top_k, reference=reference_logprobs(model_dir, sequence))

    def test_a_token_has_the_same_logprob_beside_the_likeliest(self, engine: RolloutEngine) -> None:
        sequences = _sequences(engine.traits, lengths=(7, 1, 33))
        top_k = _some(engine.traits)
        alone, beside = (_ask(engine, sequences, top_k=number) for number in (0, top_k))
        for expected, scores in zip(alone, beside, strict=True):
            assert (expected.logprobs.shape[1], scores.logprobs.shape[1]) == (1, top_k + 1)
            np.testing.assert_allclose(scores.token_logprobs, expected.token_logprobs, atol=1e-5)

    def test_the_whole_vocabulary_sums_to_one(self, engine: RolloutEngine) -> None:
        vocab_size = engine.traits.vocab_size
        if engine.traits.max_top_k < vocab_size:
            with refuses("max_top_k"):
                _ask(engine, _sequences(engine.traits, lengths=(3,)), top_k=vocab_size)
            return
        (scores,) = _ask(engine, _sequences(engine.traits, lengths=(9,)), top_k=vocab_size)
        assert np.sort(scores.token_ids[1:, 1:], axis=-1).tolist() == [list(range(vocab_size))] * 8
        np.testing.assert_allclose(np.exp(scores.logprobs[1:, 1:]).sum(-1), 1.0, atol=1e-5)

    def test_a_sequence_that_was_scored_before_has_all_its_rows_again(self, engine: RolloutEngine) -> None:
        sequences = _sequences(engine.traits, lengths=(50, 50))
        sequences[1][:40] = sequences[0][:40]  # a prefix cache shares these
        first, again = (_ask(engine, sequences * 2, top_k=_some(engine.traits)) for _ in range(2))
        for expected, scores in zip(first, again, strict=True):
            np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=TOLERANCE)
            assert (scores.logprobs[1:] < 0).all()

    def test_scoring_and_generating_do_not_disturb_each_other(self, engine: RolloutEngine, model_dir: Path) -> None:
        request = long_request(engine)
        alone = asyncio.run(engine.generate(request))[0].token_ids.tolist()
        sequences = _sequences(engine.traits, lengths=(engine.traits.max_model_len, 20, 20, 20))
        top_k = _some(engine.traits)

        async def both() -> tuple[list[TokenScores], list[Generation]]:
            running = await begin(engine, request)
            hot = asyncio.ensure_future(engine.generate(short_request(seed=3, prompt=sequences[1][:5])))
            scores = await engine.score(sequences, top_k=top_k)
            await hot
            return scores, await running

        scored, (sample,) = asyncio.run(both())
        assert sample.token_ids.tolist() == alone
        for sequence, scores in zip(sequences, scored, strict=True):
            check_token_scores(scores, sequence, top_k=top_k, reference=reference_logprobs(model_dir, sequence))

    def test_scoring_that_cannot_be_is_refused(self, engine: RolloutEngine) -> None:
        traits = engine.traits
        (sequence,) = _sequences(traits, lengths=(4,))
        for top_k, words in ((-1, "at least 0"), (traits.vocab_size + 1, f"vocabulary of {traits.vocab_size}")):
            with refuses(words):
                _ask(engine, [sequence], top_k=top_k)
        if traits.max_top_k < traits.vocab_size:
            with refuses(f"max_top_k = {traits.max_top_k}; found {traits.max_top_k + 1}"):
                _ask(engine, [sequence], top_k=traits.max_top_k + 1)
        with refuses(f"max_model_len = {traits.max_model_len}"):
            _ask(engine, [sequence, np.ones(traits.max_model_len + 1, np.int32)], top_k=1)
        with refuses("token ids"):
            _ask(engine, [sequence, np.array([1, traits.vocab_size], np.int32)], top_k=1)
        assert _ask(engine, [], top_k=1) == []
        assert len(_ask(engine, [sequence], top_k=1)) == 1


def _ask(engine: RolloutEngine, sequences: Sequence[IntArray], *, top_k: int) -> list[TokenScores]:
    return asyncio.run(engine.score(sequences, top_k=top_k))


def _some(traits: EngineTraits) -> int:
    """Return a top_k that engines usually support."""
    return min(traits.max_top_k, 12)


def _sequences(traits: EngineTraits, *, lengths: Sequence[int]) -> list[IntArray]:
    """Return random sequences from a fixed seed."""
    drawn = np.random.default_rng(1)
    return [drawn.integers(0, traits.vocab_size, size=length).astype(np.int32) for length in lengths]
