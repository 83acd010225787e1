"""Images of requests: what is refused by name, and the transformers engine against transformers' own forward pass."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_engines import ImagePrompts
from image_families import IMAGE_FAMILIES, make_image_family

from rl_core.data import ImageSpan
from rl_core.errors import EngineError, SettingsError, ShapeError
from rl_core.images import pixel_digest
from rl_core.weights import Canary
from rl_rollout.engines.process import ProcessEngine
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, SamplingParams
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.requests import check_request
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions

IN_CI = ("qwen2_5_vl", "gemma3")


@pytest.fixture(
    scope="module",
    params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in IMAGE_FAMILIES],
)
def prompts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    model_dir = tmp_path_factory.mktemp(request.param) / "model"
    make_image_family(request.param, model_dir)
    return ImagePrompts(model_dir, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def engine(prompts: ImagePrompts) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(prompts.model_dir, TransformersOptions(image_folder=prompts.store.folder))
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


def test_scores_and_samples_are_those_of_the_class(engine: TransformersEngine, prompts: ImagePrompts) -> None:
    prompts.check(engine, within=1e-4)


def test_a_batch_of_texts_and_images_gives_the_logprobs_of_rows_alone(
    engine: TransformersEngine, prompts: ImagePrompts
) -> None:
    rows = [prompts.with_images(0), prompts.with_images(), prompts.with_images(1, 2), prompts.with_images(1)]
    together = asyncio.run(engine.score([ids for ids, _ in rows], images=[spans for _, spans in rows]))
    for (ids, spans), scores in zip(rows, together, strict=True):
        (alone,) = asyncio.run(engine.score([ids], images=[spans]))
        np.testing.assert_allclose(scores.token_logprobs, alone.token_logprobs, atol=1e-4)


def test_updates_reach_the_vision_tower(engine: TransformersEngine, prompts: ImagePrompts) -> None:
    prompts.check_updates(engine)


def test_an_adapter_that_names_modules_as_the_class_does_is_served(prompts: ImagePrompts) -> None:
    """These folders name their language layers otherwise."""
    options = TransformersOptions(image_folder=prompts.store.folder, max_lora_rank=4)
    engine = TransformersEngine(prompts.model_dir, options)
    asyncio.run(engine.start())
    prompts.check_adapter(engine, rank=4)
    asyncio.run(engine.close())


def test_a_sampled_placeholder_is_an_ordinary_token(engine: TransformersEngine, prompts: ImagePrompts) -> None:
    """A response is sampled with a cache, after the images are embedded, and scored as a whole."""
    ids, spans = prompts.with_images(0)
    stray = prompts.processor.token_id
    sampled = np.concatenate([ids, [40, stray, 41, 42]]).astype(np.int32)
    (scores,) = asyncio.run(engine.score([sampled], images=[spans]))
    asked = SamplingParams(max_tokens=1, temperature=1.0, seed=0)
    for length in range(len(ids), len(sampled)):
        request = GenerateRequest(input_ids=sampled[:length], images=spans, sampling=asked)
        (one,) = asyncio.run(engine.generate(request))
        (again,) = asyncio.run(engine.score([np.append(sampled[:length], one.token_ids)], images=[spans]))
        np.testing.assert_allclose(again.token_logprobs[-1], one.logprobs[0], atol=1e-4)
        np.testing.assert_allclose(again.token_logprobs[:-1], scores.token_logprobs[:length], atol=1e-4)


def test_pixel_values_are_named_by_their_digest(engine: TransformersEngine, prompts: ImagePrompts) -> None:
    asked = SamplingParams(max_tokens=1, seed=0)
    for images in ((0,), (1, 2)):
        ids, spans = prompts.with_images(*images)
        (one,) = asyncio.run(engine.generate(GenerateRequest(input_ids=ids, images=spans, sampling=asked)))
        assert one.pixel_digest == pixel_digest(prompts.pixels(spans))
    ids, _ = prompts.with_images()
    (one,) = asyncio.run(engine.generate(GenerateRequest(input_ids=ids, sampling=asked)))
    assert one.pixel_digest == ""


def refused(engine: Any, ids: np.ndarray, spans: tuple[ImageSpan, ...], match: str) -> None:
    """Check that a request and a sequence to score are refused, and that the engine serves on."""
    request = GenerateRequest(input_ids=ids, images=spans, sampling=SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match=match):
        asyncio.run(engine.generate(request))
    with pytest.raises(EngineError, match=match):
        asyncio.run(engine.score([ids], images=[spans]))
    assert len(asyncio.run(engine.score([ids[:3]]))) == 1


def test_wrong_images_are_refused_by_name(engine: TransformersEngine, prompts: ImagePrompts) -> None:
    ids, (span,) = prompts.with_images(0)

    def changed(**fields: Any) -> tuple[ImageSpan, ...]:
        found = {"digest": span.digest, "start": span.start, "length": span.length} | fields
        return (ImageSpan(**found),)

    refused(engine, ids, changed(digest="ab" * 32), f"image {'ab' * 32} cannot be used")
    refused(engine, ids, changed(digest="../x"), "must be a SHA-256")
    damaged = prompts.add()
    file = prompts.store.folder / damaged[:2] / damaged
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    refused(engine, ids, changed(digest=damaged), f"image {damaged} cannot be used: .*its bytes have changed")
    refused(engine, ids, changed(length=span.length - 1), rf"image {span.digest} needs \d+ tokens of id \d+; found")
    refused(engine, ids, changed(start=span.start + 2), "needs .* tokens of id")
    refused(engine, ids, changed(start=len(ids)), "must lie among the sequence's")
    refused(engine, ids, (span, span), "one after the other")
    refused(engine, ids, (span,) * 65, "at most 64 images; found 65")
    with pytest.raises(EngineError, match="found 2 for 1 sequences"):
        asyncio.run(engine.score([ids], images=[(span,), ()]))


def test_an_engine_or_model_without_images_refuses_them(prompts: ImagePrompts, tied_model_dir: Path) -> None:
    engine = TransformersEngine(prompts.model_dir)
    asyncio.run(engine.start())
    ids, spans = prompts.with_images(0)
    refused(engine, ids, spans, "accepts no images. Start it with image_folder")
    asyncio.run(engine.close())
    text = TransformersEngine(tied_model_dir, TransformersOptions(image_folder=prompts.store.folder))
    with pytest.raises(SettingsError, match="cannot load the processor of its images"):
        asyncio.run(text.start())


def test_images_pass_through_replicas_and_processes(prompts: ImagePrompts) -> None:
    options = TransformersOptions(image_folder=prompts.store.folder)
    if prompts.name != "qwen2_5_vl":
        return  # one family is enough
    ids, spans = prompts.with_images(0)
    prompts.load()
    expected = prompts.reference(ids, spans)

    async def run() -> None:
        engine = ReplicatedEngine([ProcessEngine("transformers", prompts.model_dir, options)])
        await engine.start()
        try:
            text = prompts.with_images()[0]
            scores = await engine.score([ids, text], images=[spans, ()])
            np.testing.assert_allclose(scores[0].token_logprobs[1:], expected, atol=1e-4)
            request = GenerateRequest(input_ids=ids, images=spans, sampling=SamplingParams(max_tokens=2, seed=0))
            (one,) = await engine.generate(request)
            assert one.pixel_digest == pixel_digest(prompts.pixels(spans))
        finally:
            await engine.close()

    asyncio.run(run())


def test_requests_without_images_cost_nothing_and_engines_need_not_know_them() -> None:
    traits = EngineTraits(name="old", max_model_len=8, vocab_size=8)
    ids = np.array([1, 2], dtype=np.int32)
    check_request(GenerateRequest(input_ids=ids, sampling=SamplingParams(max_tokens=1)), traits)
    spans = (ImageSpan(digest="ab" * 32, start=0, length=1),)
    with pytest.raises(EngineError, match="old accepts no images"):
        check_request(GenerateRequest(input_ids=ids, images=spans, sampling=SamplingParams(max_tokens=1)), traits)
    engine = ScriptedEngine({})
    asyncio.run(engine.start())
    with pytest.raises(EngineError, match="scripted accepts no images"):
        asyncio.run(engine.score([ids], images=[spans]))


def test_a_canary_has_the_images_of_each_sequence() -> None:
    sequence, logprobs = np.array([1, 2], dtype=np.int32), np.zeros(2, dtype=np.float32)
    with pytest.raises(ShapeError, match="found 2 for 1 sequences"):
        Canary(sequences=[sequence], logprobs=[logprobs], images=[(), ()])
