# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of generation, aborts and scoring."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.data import FloatArray, IntArray
from rl_core.errors import EngineError
from rl_core.weights import TokenScores
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.testing.reference_model import (
    PROMPT,
    begin,
    generate,
    joined,
    long_request,
    long_request_of,
    processed,
    reference_logprobs,
    refuses,
    short_request,
    token_logprobs,
)

TOLERANCE = 1e-4
"""Maximum difference of a logprob in float32, in nats."""
ATTEMPTS = 5
"""Number of attempts. A response may end before its abort, if the caller is slow and the engine fast."""


class GenerationChecks:
    """Checks of requests. A subclass provides `model_dir` and `engine`, started and serving it in float32."""

    def test_greedy_responses_are_the_reference_models_likeliest_tokens(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        first, second = (generate(engine, temperature=0.0, max_tokens=12)[0] for _ in range(2))
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tolist() == [0.0] * len(first.token_ids)
        sequence = joined(PROMPT, first)
        likeliest = reference_logprobs(model_dir, sequence).argmax(-1)
        assert first.token_ids.tolist() == likeliest[len(PROMPT) - 1 : -1].tolist()

    def test_samples_of_a_request_differ(self, engine: RolloutEngine) -> None:
        responses = {tuple(sample.token_ids.tolist()) for sample in generate(engine, num_samples=8, seed=0)}
        assert len(responses) > 1

    def test_seeds_repeat_and_count_up_with_the_samples(self, engine: RolloutEngine) -> None:
        three = [sample.token_ids.tolist() for sample in generate(engine, num_samples=3, seed=5)]
        again = [sample.token_ids.tolist() for sample in generate(engine, num_samples=3, seed=5)]
        last = generate(engine, seed=7)[0].token_ids.tolist()
        assert three == again
        assert three[2] == last

    def test_draws_follow_the_distribution(self, engine: RolloutEngine) -> None:
        samples = generate(engine, num_samples=2000, max_tokens=2, seed=0)
        first = np.array([int(sample.token_ids[0]) for sample in samples])
        probabilities = {int(sample.token_ids[0]): float(np.exp(sample.logprobs[0])) for sample in samples}
        for token, probability in probabilities.items():
            share = float(np.mean(first == token))
            assert abs(share - probability) < 5 * np.sqrt(probability / len(samples))
        assert sum(probabilities.values()) > 0.95

    def test_the_draws_of_neighbouring_seeds_and_positions_are_independent(self, engine: RolloutEngine) -> None:
        samples = generate(engine, num_samples=2000, max_tokens=2, seed=0)
        uniform = [float(sample.logprobs[0]) for sample in samples]
        assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.1

    def test_responses_end_at_max_tokens(self, engine: RolloutEngine) -> None:
        for sample in generate(engine, num_samples=4, max_tokens=3, seed=1):
            assert (len(sample.token_ids) == 3) or sample.finish_reason == "stop"
            assert len(sample.token_ids) == len(sample.logprobs) == len(sample.policy_versions)
            assert sample.token_ids.dtype == sample.policy_versions.dtype == np.int32
            assert sample.logprobs.dtype == np.float32

    def test_a_stop_token_ends_a_response_and_stays_in_it(self, engine: RolloutEngine) -> None:
        tokens = generate(engine, temperature=0.0, max_tokens=12)[0].token_ids.tolist()
        stop = tokens[len(tokens) // 2]
        stopped = generate(engine, temperature=0.0, max_tokens=12, stop_token_ids=(stop,))[0]
        assert stopped.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert stopped.finish_reason == "stop"

    def test_logprobs_are_what_score_says(self, engine: RolloutEngine) -> None:
        for sample in generate(engine, num_samples=4, seed=2):
            (scores,) = asyncio.run(engine.score([joined(PROMPT, sample)]))
            np.testing.assert_allclose(sample.logprobs, scores.token_logprobs[len(PROMPT) :], atol=TOLERANCE)

    def test_logprobs_are_of_the_distribution_drawn_from(self, engine: RolloutEngine, model_dir: Path) -> None:
        cases: list[dict[str, Any]] = [{"temperature": 0.5}, {"temperature": 1.5, "top_k": 3}, {"top_p": 0.6}]
        for sampling in cases:
            for sample in generate(engine, num_samples=4, seed=3, max_nucleus=engine.traits.vocab_size, **sampling):
                rows = reference_logprobs(model_dir, joined(PROMPT, sample))[len(PROMPT) - 1 : -1]
                nuclei = [processed(row, **sampling) for row in rows]
                expected = [nucleus[token] for nucleus, token in zip(nuclei, sample.token_ids.tolist(), strict=True)]
                np.testing.assert_allclose(sample.logprobs, expected, atol=TOLERANCE)
                assert sample.nucleus_ids is not None
                kept = [set(ids[ids >= 0].tolist()) for ids in sample.nucleus_ids]
                assert [ids ^ nucleus.keys() for ids, nucleus in zip(kept, nuclei, strict=True)] == [set()] * len(kept)
        assert generate(engine)[0].nucleus_ids is None
        with refuses("kept more than max_nucleus = 2"):
            generate(engine, max_nucleus=2)

    def test_scores_are_the_reference_models(self, engine: RolloutEngine, model_dir: Path) -> None:
        ids = np.random.default_rng(0).integers(0, engine.traits.vocab_size, size=engine.traits.max_model_len)
        sequences = [ids[:length].astype(np.int32) for length in (7, 1, 2, 33, len(ids))]
        for sequence, scores in zip(sequences, asyncio.run(engine.score(sequences)), strict=True):
            found = scores.token_logprobs
            assert found.dtype == np.float32
            assert found[0] == 0
            expected = token_logprobs(reference_logprobs(model_dir, sequence), sequence)
            np.testing.assert_allclose(found[1:], expected, atol=TOLERANCE)
            (routed,) = asyncio.run(engine.score([sequence], with_experts=True))
            np.testing.assert_allclose(routed.token_logprobs, found, atol=TOLERANCE)

    def test_abort_returns_what_there_is(self, engine: RolloutEngine) -> None:
        request = long_request(engine)

        async def abort_midway() -> Generation:
            running = await begin(engine, request)
            await engine.abort(None)
            return (await running)[0]

        for _ in range(ATTEMPTS):
            sample = asyncio.run(abort_midway())
            if sample.finish_reason == "abort":
                break
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.token_ids) < request.samplings[0].max_tokens
        assert len(sample.logprobs) == len(sample.policy_versions) == len(sample.token_ids)
        assert len(generate(engine)[0].token_ids) > 0

    def test_abort_ends_the_requests_that_are_named(self, engine: RolloutEngine) -> None:
        request = long_request(engine)

        async def abort_one() -> tuple[list[Generation], list[Generation]]:
            named, other = (
                asyncio.ensure_future(engine.generate(replace(request, request_id=name))) for name in ("a", "b")
            )
            await begin(engine, request)
            await engine.abort(["a", "unknown"])
            return await named, await other

        for _ in range(ATTEMPTS):
            aborted, finished = asyncio.run(abort_one())
            if aborted[0].finish_reason == "abort":
                break
        assert [sample.finish_reason for sample in aborted] == ["abort"]
        assert "abort" not in [sample.finish_reason for sample in finished]

    def test_each_sample_can_have_its_own_parameters(self, engine: RolloutEngine) -> None:
        each = (
            SamplingParams(max_tokens=2, seed=3),
            SamplingParams(max_tokens=8, temperature=0.0),
            SamplingParams(max_tokens=8, temperature=0.5, top_k=4, seed=9),
        )
        request = GenerateRequest(input_ids=PROMPT, sampling=each, num_samples=3)
        together = asyncio.run(engine.generate(request))
        for sampling, sample in zip(each, together, strict=True):
            (alone,) = asyncio.run(engine.generate(GenerateRequest(input_ids=PROMPT, sampling=sampling)))
            assert sample.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(sample.logprobs, alone.logprobs, atol=TOLERANCE)
        with refuses("one for each of the 2 samples; found 3"):
            asyncio.run(engine.generate(replace(request, num_samples=2)))

    def test_an_engine_that_cannot_sleep_says_so(self, engine: RolloutEngine) -> None:
        if engine.traits.can_sleep:
            before = generate(engine, seed=4)[0]
            asyncio.run(engine.sleep())
            with refuses("is asleep"):
                generate(engine)
            asyncio.run(engine.wake())
            assert generate(engine, seed=4)[0].token_ids.tolist() == before.token_ids.tolist()
        else:
            with refuses("cannot free memory"):
                asyncio.run(engine.sleep())
            asyncio.run(engine.wake())
            assert len(generate(engine)[0].token_ids) > 0

    def test_a_cancelled_caller_does_not_disturb_the_others(self, engine: RolloutEngine) -> None:
        alone = generate(engine, seed=6)[0].token_ids.tolist()

        async def cancel_one() -> list[int]:
            running = await begin(engine, long_request_of(engine, seed=0))
            other = asyncio.ensure_future(engine.generate(short_request(seed=6)))
            await asyncio.sleep(0)
            running.cancel()
            tokens: list[int] = (await other)[0].token_ids.tolist()
            return tokens

        assert asyncio.run(cancel_one()) == alone

    def test_bad_input_is_refused_and_leaves_the_others_alone(self, engine: RolloutEngine) -> None:
        traits = engine.traits
        good = short_request(seed=6)
        bad = [
            GenerateRequest(input_ids=np.zeros(0, np.int32), sampling=good.sampling),
            GenerateRequest(input_ids=np.array([traits.vocab_size], np.int32), sampling=good.sampling),
            GenerateRequest(input_ids=np.array([-1], np.int32), sampling=good.sampling),
            GenerateRequest(input_ids=np.ones(traits.max_model_len, np.int32), sampling=good.sampling),
            GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=0)),
            GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=4, temperature=-1.0)),
            GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=4, temperature=2.1)),
            GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=4, top_p=0.0)),
            GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=4, top_k=0)),
            GenerateRequest(input_ids=PROMPT, sampling=good.sampling, num_samples=0),
        ]

        async def send_all() -> list[Any]:
            requests = [good, *bad, good]
            return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

        first, *refused, last = asyncio.run(send_all())
        alone = generate(engine, seed=6)[0].token_ids.tolist()
        assert [type(error) for error in refused] == [EngineError] * len(bad)
        assert first[0].token_ids.tolist() == last[0].token_ids.tolist() == alone
        with refuses("token ids"):
            asyncio.run(engine.score([PROMPT, np.array([traits.vocab_size], np.int32)]))

    def test_many_requests_at_once_each_get_their_own(self, engine: RolloutEngine) -> None:
        requests = [short_request(seed=index, prompt=PROMPT[: 1 + index % 5]) for index in range(40)]

        async def send_all() -> list[list[Generation]]:
            return list(await asyncio.gather(*map(engine.generate, requests)))

        together = [samples[0] for samples in asyncio.run(send_all())]
        for request, sample in list(zip(requests, together, strict=True))[::9]:
            alone = asyncio.run(engine.generate(request))[0]
            assert sample.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(sample.logprobs, alone.logprobs, atol=TOLERANCE)

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


def _ask(engine: RolloutEngine, sequences: Sequence[IntArray], *, top_k: int) -> list[TokenScores]:
    return asyncio.run(engine.score(sequences, top_k=top_k))


def _some(traits: EngineTraits) -> int:
    """Return a top_k that engines usually support."""
    return min(traits.max_top_k, 12)


def _sequences(traits: EngineTraits, *, lengths: Sequence[int]) -> list[IntArray]:
    """Return random sequences from a fixed seed."""
    drawn = np.random.default_rng(1)
    return [drawn.integers(0, traits.vocab_size, size=length).astype(np.int32) for length in lengths]
