# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""The suite of all checks of engines, with those of streaming, stop strings and structures."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from rl_rollout.engines.protocol import (
    GenerateRequest,
    Generation,
    NewTokens,
    RolloutEngine,
    SamplingParams,
    Structure,
)
from rl_rollout.engines.response_text import UNKNOWN
from rl_rollout.engines.streaming import stream
from rl_rollout.testing.generation_checks import TOLERANCE, GenerationChecks
from rl_rollout.testing.reference_model import (
    EMOJI,
    END,
    PROMPT,
    generate,
    joined,
    long_request,
    reference_logprobs,
    refuses,
    short_request,
)
from rl_rollout.testing.update_checks import UpdateChecks

DEADLINE_S = 60.0
STRUCTURES = (
    (Structure(json_schema='{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'), None),
    (Structure(regex="[ab]{2}"), "[ab]{2}"),
    (Structure(choices=("ab", "b1")), "ab|b1"),
    (Structure(grammar='start: "1" start | "a"'), "1*a?"),
)
"""Each structure with a pattern of its text. The last one may not end before max_tokens."""


class EngineConformance(GenerationChecks, UpdateChecks):
    """All checks of engines. A subclass provides `model_dir`, with a tokenizer, and `engine`, serving it in float32."""

    def test_what_is_streamed_is_what_is_generated(self, engine: RolloutEngine) -> None:
        request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=12, seed=5), num_samples=4)
        alone = asyncio.run(engine.generate(request))
        streamed, noted = asyncio.run(_streamed(engine, request)), list[NewTokens]()
        told = asyncio.run(engine.generate(replace(request, on_tokens=noted.append)))
        for found in (_samples(streamed), _samples(noted)):
            assert [sample.token_ids.tolist() for sample in found] == [sample.token_ids.tolist() for sample in alone]
        for sample, other in zip(_samples(noted), told, strict=True):
            assert sample.logprobs.tolist() == other.logprobs.tolist()
        assert len(noted) > 4

    def test_what_nobody_reads_holds_nothing_up_and_is_read_later(self, engine: RolloutEngine) -> None:
        request = replace(long_request(engine), num_samples=2)

        async def read_late() -> list[NewTokens]:
            async with asyncio.timeout(DEADLINE_S), aclosing(stream(engine, request)) as pieces:
                found = [await anext(pieces)]
                alone = await engine.generate(request)
                await engine.generate(short_request(seed=1))
                found += [piece async for piece in pieces]
                assert _samples(found)[0].token_ids.tolist() == alone[0].token_ids.tolist()
            return found

        found = asyncio.run(read_late())
        num_tokens = sum(len(sample.token_ids) for sample in _samples(found))
        assert (
            len(found) <= num_tokens / 4
        )  # one replica may still be at its last tokens when another has finished the rest

    def test_an_abort_ends_a_stream_with_what_it_has(self, engine: RolloutEngine) -> None:
        request = replace(long_request(engine), request_id="streamed")

        async def abort_midway() -> list[NewTokens]:
            async with asyncio.timeout(DEADLINE_S), aclosing(stream(engine, request)) as pieces:
                found = [await anext(pieces)]
                await engine.abort(["streamed"])
                return [*found, *[piece async for piece in pieces]]

        (sample,) = _samples(asyncio.run(abort_midway()))
        assert len(sample.token_ids) > 0

    def test_a_stream_that_is_left_leaves_the_others_alone(self, engine: RolloutEngine) -> None:
        alone = generate(engine, seed=6)[0].token_ids.tolist()

        request = replace(long_request(engine), num_samples=8)

        async def leave() -> list[int]:
            async with asyncio.timeout(DEADLINE_S):
                async with aclosing(stream(engine, request)) as pieces:
                    await anext(pieces)
                tokens: list[int] = (await engine.generate(short_request(seed=6)))[0].token_ids.tolist()
                return tokens

        assert asyncio.run(leave()) == alone

    def test_a_consumer_that_fails_fails_its_request_alone(self, engine: RolloutEngine) -> None:
        alone = generate(engine, seed=6)[0].token_ids.tolist()

        def fail(_: NewTokens) -> None:
            raise ValueError("the consumer's own")

        async def both() -> list[list[Generation] | BaseException]:
            requests = [replace(short_request(seed=2), on_tokens=fail), short_request(seed=6)]
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

        failed, other = asyncio.run(both())
        assert isinstance(failed, ValueError)
        assert isinstance(other, list)
        assert other[0].token_ids.tolist() == alone

    def test_a_refused_request_is_refused_to_its_stream(self, engine: RolloutEngine) -> None:
        with refuses("max_tokens"):
            asyncio.run(_streamed(engine, GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=0))))

    def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        decode = _decoder(model_dir)
        request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=16, seed=3), num_samples=4)
        free = [sample.token_ids.tolist() for sample in asyncio.run(engine.generate(request))]
        texts = [decode(tokens) for tokens in free]
        spans = [text[at : at + 3] for text in texts for at in range(1, len(text) - 2)]
        spans = [span for span in spans if UNKNOWN not in span]  # partial characters are not text yet
        across = decode(PROMPT.tolist())[-1] + next(text[0] for text in texts if text[0] != UNKNOWN)
        stops = (spans[0], spans[-1], across, "~" * 10_000)
        sampling = request.samplings[0]
        stopped = asyncio.run(engine.generate(replace(request, sampling=replace(sampling, stop=stops))))
        for tokens, sample in zip(free, stopped, strict=True):
            num_tokens, matched = _first_stop(tokens, stops, decode)
            assert sample.token_ids.tolist() == tokens[:num_tokens]
            assert sample.matched_stop == matched
            assert len(sample.logprobs) == len(sample.policy_versions) == num_tokens
            assert sample.finish_reason == "stop" or matched is None
        assert any(sample.matched_stop is not None for sample in stopped)

    def test_the_end_token_is_text_to_a_stop_string(self, engine: RolloutEngine) -> None:
        for sample in generate(engine, num_samples=8, max_tokens=40, seed=1, stop=(END,)):
            assert (sample.finish_reason == "stop") == (sample.matched_stop == END)

    def test_bad_stop_strings_are_refused(self, engine: RolloutEngine) -> None:
        with refuses("must not be empty"):
            generate(engine, stop=("a", ""))
        with refuses("at most 64 strings"):
            generate(engine, stop=("a",) * 65)
        with refuses("65,536 characters"):
            generate(engine, stop=("a" * 70_000,))

    def test_a_structure_is_followed_or_refused_by_name(self, engine: RolloutEngine, model_dir: Path) -> None:
        decode = _decoder(model_dir)
        for structure, pattern in STRUCTURES:
            (kind,) = structure.kinds
            if kind not in engine.traits.structures:
                with refuses(f"does not support a structure of kind {kind}"):
                    generate(engine, structure=structure)
                continue
            for sample in generate(engine, num_samples=4, max_tokens=40, seed=2, structure=structure):
                text = decode(sample.token_ids.tolist()).removesuffix(END)
                if pattern is None:
                    assert json.loads(text)["a"] in (1, 2) if sample.finish_reason == "stop" else text[0] == "{"
                else:
                    assert re.fullmatch(pattern, text)
        if engine.traits.structures:  # each byte of this character is a token
            (sample,) = generate(engine, structure=Structure(regex=f"a{EMOJI}b"), stop=(EMOJI,))
            assert decode(sample.token_ids.tolist()) == f"a{EMOJI}"
            assert sample.matched_stop == EMOJI
        with refuses("must have exactly one kind; found regex, grammar"):
            generate(engine, structure=Structure(regex="a", grammar="start: a"))

    def test_logprobs_under_a_structure_are_of_the_distribution_drawn_from(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        if "regex" not in engine.traits.structures:
            return
        decode = _decoder(model_dir)
        allowed = [token for token in range(engine.traits.vocab_size) if decode([token]) in ("a", "b", "{")]
        for sample in generate(engine, num_samples=8, seed=0, structure=Structure(regex="a|b|\\{")):
            row = reference_logprobs(model_dir, joined(PROMPT, sample))[len(PROMPT) - 1]
            expected = row[sample.token_ids[0]] - np.logaddexp.reduce(row[allowed])
            np.testing.assert_allclose(sample.logprobs, [expected, 0.0], atol=TOLERANCE)

    def test_hostile_structures_are_refused_and_leave_the_others_alone(self, engine: RolloutEngine) -> None:
        if "json_schema" not in engine.traits.structures:
            return
        deep = '{"type": "array", "items": ' * 2000 + "{}" + "}" * 2000
        endless = '{"type": "array", "minItems": 1000000000, "items": {"type": "integer"}}'
        alone = generate(engine, seed=6)[0].token_ids.tolist()
        for schema in (
            deep,
            endless,
            '{"type":',
            '{"type": "thing"}',
            '{"$ref": "#"}',
            '{"$ref": "http://127.0.0.1/"}',
        ):
            with refuses("the structure's json_schema cannot be used"):
                generate(engine, structure=Structure(json_schema=schema))
        with refuses("at most 65,536 characters"):
            generate(engine, structure=Structure(regex="a" * 70_000))
        with refuses("the structure's regex cannot be used"):
            generate(engine, structure=Structure(regex="(" * 3000))
        assert generate(engine, seed=6)[0].token_ids.tolist() == alone


async def _streamed(engine: RolloutEngine, request: GenerateRequest) -> list[NewTokens]:
    async with asyncio.timeout(DEADLINE_S), aclosing(stream(engine, request)) as pieces:
        return [piece async for piece in pieces]


def _samples(pieces: Sequence[NewTokens]) -> list[Generation]:
    """Return the complete samples of these pieces."""
    last = {piece.sample_index: piece.ended for piece in pieces if piece.ended is not None}
    for index, sample in last.items():
        own = [piece for piece in pieces if piece.sample_index == index]
        assert [piece.ended is not None for piece in own] == [False] * (len(own) - 1) + [True]
        for name in ("token_ids", "logprobs", "policy_versions"):
            assert np.concatenate([getattr(piece, name) for piece in own]).tolist() == getattr(sample, name).tolist()
    return [last[index] for index in sorted(last)]


def _decoder(model_dir: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _first_stop(tokens: list[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> tuple[int, str | None]:
    """Return after how many tokens the first stop string appears, and that string."""
    for num_tokens in range(1, len(tokens) + 1):
        text = decode(tokens[:num_tokens])
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            return num_tokens, min(found)[1]
    return len(tokens), None
