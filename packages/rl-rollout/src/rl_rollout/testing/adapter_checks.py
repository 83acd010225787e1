# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of engines with room for adapters."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from rl_core.data import FloatArray, IntArray
from rl_core.weights import (
    LORA_A,
    AdapterUpdate,
    ProofTolerances,
    PublishReport,
    TensorTransport,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    digest_tensors,
)
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.engines.publishing import publish_to
from rl_rollout.engines.streaming import stream
from rl_rollout.testing.engine_calls import PROMPT, begin, joined, long_request, refuses, short_request
from rl_rollout.testing.generation_checks import TOLERANCE
from rl_rollout.testing.reference_model import (
    TIED_HEAD,
    canary_of,
    make_adapter,
    merged,
    reference_rows,
    token_logprobs,
)

SEQUENCE = np.arange(2, 20, dtype=np.int32)
Tensors = Mapping[str, torch.Tensor]


class AdapterChecks:
    """Checks of adapters. A subclass provides `model_dir` and `engine`, started and serving it in float32.

    The engine needs room for adapters of every linear layer except the head. Each check leaves it serving model_dir
    without an adapter, as version 0.
    """

    transport: type[WeightTransport] = TensorTransport
    """Transport of updates to the engine."""

    def test_each_adapter_replaces_the_last_on_the_same_base(self, engine: RolloutEngine, model_dir: Path) -> None:
        base, most = load_file(model_dir / "model.safetensors"), engine.traits.max_lora_rank
        adapters = [
            make_adapter(base, rank=most, seed=1),
            make_adapter(base, rank=most, seed=2),
            make_adapter(base, rank=most - 1, seed=3, kinds=("q_proj", "down_proj")),
            make_adapter(base, rank=1, seed=4, kinds=("o_proj", "up_proj")),
            make_adapter(base, rank=most, seed=5),
        ]
        scores = [_logprobs(engine)]
        try:
            for version, adapter in enumerate(adapters, start=1):
                report = asyncio.run(self.prove(engine, model_dir, adapter, version=version))
                assert report.probe_max_diff <= 1e-4
                assert report.canary_max_diff <= TOLERANCE
                scores.append(_logprobs(engine))
                (sample,) = asyncio.run(engine.generate(short_request(seed=version)))
                assert set(sample.policy_versions.tolist()) == {version}
        finally:
            self.restore(engine, model_dir)
        assert min(np.abs(now - last).max() for last, now in pairwise(scores)) > 100 * TOLERANCE
        np.testing.assert_allclose(_logprobs(engine), scores[0], atol=TOLERANCE)

    def test_the_base_is_served_beside_its_adapter(self, engine: RolloutEngine, model_dir: Path) -> None:
        """Both answer the same prompts, concurrently, one after the other, and streamed."""
        base = load_file(model_dir / "model.safetensors")
        adapter = make_adapter(base, rank=engine.traits.max_lora_rank, seed=6)
        requests = [
            replace(short_request(seed=index), num_samples=2, adapter="base" if index % 2 else None)
            for index in range(12)
        ]

        async def ask() -> list[list[Generation]]:
            found = list(await asyncio.gather(*map(engine.generate, requests)))
            return [*found, *[await engine.generate(request) for request in requests[:4]], await _streamed(engine)]

        self.restore(engine, model_dir)
        try:
            asyncio.run(self.publish(engine, model_dir, adapter, version=7))
            groups = asyncio.run(ask())
        finally:
            self.restore(engine, model_dir)
        asked = [request.adapter for request in [*requests, *requests[:4]]] + ["base"]
        for name, versions in ((None, {7: merged(base, adapter)}), ("base", {0: base})):
            samples = [sample for group, other in zip(groups, asked, strict=True) if other == name for sample in group]
            check_samples(samples, model_dir, versions)

    def test_an_adapter_between_two_tokens_counts_from_the_next_one(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        base = load_file(model_dir / "model.safetensors")
        first, second = (make_adapter(base, rank=engine.traits.max_lora_rank, seed=seed) for seed in (7, 8))
        request = long_request(engine)

        async def update_midway() -> list[Generation]:
            beside = asyncio.ensure_future(engine.generate(replace(request, adapter="base")))
            running = await begin(engine, request)
            await self.publish(engine, model_dir, first, version=8)
            await begin(engine, request)
            await self.publish(engine, model_dir, second, version=9)
            return [*await running, *await beside]

        self.restore(engine, model_dir)
        try:
            sample, beside = asyncio.run(update_midway())
        finally:
            self.restore(engine, model_dir)
        versions = {0: base, 8: merged(base, first), 9: merged(base, second)}
        assert sample.policy_versions.tolist() == sorted(sample.policy_versions.tolist())
        assert len(set(sample.policy_versions.tolist())) > 1
        check_samples([sample], model_dir, versions)
        check_samples([beside], model_dir, {0: base})

    def test_all_weights_take_an_adapters_place(self, engine: RolloutEngine, model_dir: Path) -> None:
        base = load_file(model_dir / "model.safetensors")
        adapter = make_adapter(base, rank=engine.traits.max_lora_rank, seed=9)
        full = merged(base, make_adapter(base, rank=2, seed=10))
        request = short_request(seed=3)
        try:
            asyncio.run(self.publish(engine, model_dir, adapter, version=10))
            asyncio.run(self.take(engine, full, version=11, adapter=None))
            both = [asyncio.run(engine.generate(one))[0] for one in (request, replace(request, adapter="base"))]
            check_samples(both, model_dir, {11: full})
            with refuses("model.norm.weight"):
                asyncio.run(self.publish(engine, model_dir, adapter, version=12, less="model.norm.weight"))
        finally:
            self.restore(engine, model_dir)

    def test_adapters_that_do_not_fit_are_refused_and_change_nothing(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        base, most = load_file(model_dir / "model.safetensors"), engine.traits.max_lora_rank
        adapter = make_adapter(base, rank=most, seed=11)
        name = next(name for name in adapter if name.endswith(LORA_A))
        unknown = name.replace("layers.0", "layers.99")
        try:
            asyncio.run(self.publish(engine, model_dir, adapter, version=13))
            before = _logprobs(engine)
            for words, wrong in (
                ("max_lora_rank", make_adapter(base, rank=most + 1, seed=12)),
                ("missing", {key: tensor for key, tensor in adapter.items() if key != name}),
                ("shape", {**adapter, name: adapter[name][:, :-1].contiguous()}),
                ("layers.99", {**adapter, unknown: adapter[name].clone()}),
                ("at least one A and B", {}),
            ):
                with refuses(words):
                    asyncio.run(self.publish(engine, model_dir, wrong, version=14))
            (sample,) = asyncio.run(engine.generate(short_request(seed=4)))
            np.testing.assert_allclose(_logprobs(engine), before, atol=TOLERANCE)
            check_samples([sample], model_dir, {13: merged(base, adapter)})
        finally:
            self.restore(engine, model_dir)

    async def prove(self, engine: RolloutEngine, model_dir: Path, adapter: Tensors, *, version: int) -> PublishReport:
        """Publish an adapter of the folder's model, with proof."""
        base, transport = load_file(model_dir / "model.safetensors"), self.transport()
        canary = canary_of(model_dir, merged(base, adapter), SEQUENCE)
        try:
            told = AdapterUpdate(rank=rank_of(adapter), base=digest_tensors(base))
            update = transport.pack(adapter, version=version, tied=_tied(base), adapter=told)
            return await publish_to(engine, update, canary=canary, tolerances=ProofTolerances())
        finally:
            transport.close()

    async def publish(
        self, engine: RolloutEngine, model_dir: Path, adapter: Tensors, *, version: int, less: str = ""
    ) -> tuple[WeightUpdate, WeightReceipt]:
        """Send an adapter of the folder's model. The base's digest named by `less` is left out."""
        base = load_file(model_dir / "model.safetensors")
        digests = {name: digest for name, digest in digest_tensors(base).items() if name != less}
        told = AdapterUpdate(rank=rank_of(adapter), base=digests)
        return await self.take(engine, adapter, version=version, adapter=told, tied=_tied(base))

    async def take(
        self,
        engine: RolloutEngine,
        tensors: Tensors,
        *,
        version: int,
        adapter: AdapterUpdate | None,
        tied: Mapping[str, str] | None = None,
    ) -> tuple[WeightUpdate, WeightReceipt]:
        """Send tensors as a learner does."""
        transport = self.transport()
        try:
            told = _tied(tensors) if tied is None else tied
            update = transport.pack(tensors, version=version, tied=told, adapter=adapter)
            return update, await engine.update_weights(update)
        finally:
            transport.close()

    def restore(self, engine: RolloutEngine, model_dir: Path) -> None:
        """Make the engine serve the folder's weights again, as version 0."""
        base = load_file(model_dir / "model.safetensors")
        asyncio.run(self.take(engine, base, version=0, adapter=None))


def check_samples(samples: Sequence[Generation], model_dir: Path, versions: Mapping[int, Tensors]) -> None:
    """Compare the logprobs of responses to PROMPT with those of the weights of each token's version."""
    found = {version for sample in samples for version in sample.policy_versions.tolist()}
    assert found <= versions.keys()
    sequences: list[IntArray] = [joined(PROMPT, sample) for sample in samples]
    for version in found:
        rows = reference_rows(model_dir, sequences, tensors=versions[version])
        for sample, sequence, row in zip(samples, sequences, rows, strict=True):
            expected = token_logprobs(row, sequence)[len(PROMPT) - 1 :]
            here = sample.policy_versions == version
            np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=TOLERANCE)


def rank_of(adapter: Tensors) -> int:
    """Return the number of rows of an A; 1 if there is none."""
    return next((len(tensor) for name, tensor in adapter.items() if name.endswith(LORA_A)), 1)


async def _streamed(engine: RolloutEngine) -> list[Generation]:
    request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=8, seed=1), adapter="base")
    pieces = [piece async for piece in stream(engine, request)]
    return [piece.ended for piece in pieces if piece.ended is not None]


def _tied(tensors: Tensors) -> Mapping[str, str]:
    return {} if "lm_head.weight" in tensors else TIED_HEAD


def _logprobs(engine: RolloutEngine) -> FloatArray:
    return asyncio.run(engine.score([SEQUENCE]))[0].token_logprobs
