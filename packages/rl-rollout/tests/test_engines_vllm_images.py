"""vLLM with images: our pixel values against transformers, live updates with the vision tower, and caches by image."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from image_engines import ImagePrompts
from image_families import make_image_family

from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions

AXES = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
LARGE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_parameters": AXES}
HEADS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": LARGE_HEADS,
    "qwen3_vl": LARGE_HEADS | {"rope_parameters": AXES | {"mrope_interleaved": True}},
}
"""Heads of the smallest size that vLLM computes on CPUs."""
FAMILIES = ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.soak)]


def started(prompts: ImagePrompts, **options: Any) -> VLLMEngine:
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    folder = prompts.store.folder
    engine = VLLMEngine(prompts.model_dir, VLLMOptions(**sizes, kv_cache_gib=0.02, image_folder=folder, **options))
    asyncio.run(engine.start())
    return engine


def made(family: str, factory: pytest.TempPathFactory) -> ImagePrompts:
    model_dir = factory.mktemp(family) / "model"
    make_image_family(family, model_dir, **HEADS.get(family, {}))
    return ImagePrompts(model_dir, factory.mktemp("images"))


@pytest.fixture(scope="module", params=FAMILIES)
def prompts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def engine(prompts: ImagePrompts, learner_process_group: None) -> Iterator[VLLMEngine]:
    engine = started(prompts)
    yield engine
    asyncio.run(engine.close())


def test_scores_and_samples_are_those_of_transformers(engine: VLLMEngine, prompts: ImagePrompts) -> None:
    prompts.check(engine, within=1e-4)


def test_three_updates_reach_every_tensor_and_cache(engine: VLLMEngine, prompts: ImagePrompts) -> None:
    """Between updates, the same prompts and images are asked again, so that a stale cache would be used."""
    prompts.check_updates(engine)


def test_a_sample_that_runs_during_an_update_sees_its_images_with_the_new_weights(
    engine: VLLMEngine, prompts: ImagePrompts
) -> None:
    """The later samples have copied the first one's prompt, and must embed the image themselves after the update."""
    ids, spans = prompts.with_images(0)
    prompts.publish(engine, 4)
    sampling = SamplingParams(max_tokens=100, seed=5)
    request = GenerateRequest(input_ids=ids, images=spans, sampling=sampling, num_samples=4)
    stepper: Any = engine._stepper

    async def run() -> Any:
        running = asyncio.ensure_future(engine.generate(request))
        while not any(sample.token_ids for sample, _ in stepper._running.values()):
            await asyncio.sleep(0)
        update = prompts.update(5)
        await engine.update_weights(update)
        return await running

    samples, num_spanning = asyncio.run(run()), 0
    for sample in samples:
        (new,) = np.nonzero(sample.policy_versions == 5)
        (strays,) = np.nonzero(sample.token_ids == prompts.processor.token_id)
        end = int(strays[0]) if len(strays) else len(sample.token_ids)
        expected = prompts.reference(np.concatenate([ids, sample.token_ids[:end]]), spans)[len(ids) - 1 :]
        kept = new[new < end]
        num_spanning += 0 < len(new) < len(sample.token_ids)
        np.testing.assert_allclose(sample.logprobs[kept], expected[kept], atol=1e-4)
    assert num_spanning  # others may end before


def test_equal_images_share_caches_and_other_images_do_not(
    engine: VLLMEngine, prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images 0 and 1 have the same tokens. Their prompts are admitted in the same step, and share no prompt."""
    core: Any = engine._stepper._core
    runner: Any = core.model_executor.driver_worker.worker.model_runner
    embedded: list[int] = []
    embed = runner.model.embed_multimodal

    def counted(**inputs: Any) -> Any:
        embedded.append(len(inputs["image_grid_thw"]))
        return embed(**inputs)

    monkeypatch.setattr(runner.model, "embed_multimodal", counted)
    engine._stepper.reset_prefix_cache()  # type: ignore[union-attr]
    (ids, one), (same, two) = prompts.with_images(0), prompts.with_images(1)
    np.testing.assert_array_equal(ids, same)

    async def ask() -> Any:
        sampling = SamplingParams(max_tokens=3, seed=7)
        requests = [GenerateRequest(input_ids=ids, images=spans, sampling=sampling) for spans in (one, two, one, two)]
        return await asyncio.gather(*map(engine.generate, requests))

    samples = [sample for (sample,) in asyncio.run(ask())]
    assert sum(embedded) == 2
    for sample, spans in zip(samples, (one, two, one, two), strict=True):
        (strays,) = np.nonzero(sample.token_ids == prompts.processor.token_id)
        end = int(strays[0]) if len(strays) else len(sample.token_ids)
        expected = prompts.reference(np.concatenate([ids, sample.token_ids[:end]]), spans)[len(ids) - 1 :]
        np.testing.assert_allclose(sample.logprobs[:end], expected, atol=1e-4)
    asyncio.run(ask())
    assert sum(embedded) == 2


def test_nothing_of_torchvision_is_used_or_left(engine: VLLMEngine) -> None:
    """vLLM's models of images import transformers' processors, which import torchvision, for a function and types."""
    from rl_rollout.engines.vllm import image_models

    if image_models.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    with image_models.without_torchvision():
        from torchvision.transforms.v2 import functional

        with pytest.raises(AttributeError, match=r"uses torchvision\.transforms\.v2\.functional\.resize"):
            functional.resize(None)
