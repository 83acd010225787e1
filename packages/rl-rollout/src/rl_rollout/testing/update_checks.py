# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of weight updates and adapters."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    check_receipt,
    digest_tensors,
    publish_weights,
)
from rl_rollout.engines.process import ProcessEngine
from rl_rollout.engines.protocol import Generation, NewTokens, RolloutEngine
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.streaming import stream
from rl_rollout.testing.generation_checks import TOLERANCE
from rl_rollout.testing.reference_model import (
    PROMPT,
    TIED_HEAD,
    answers_during,
    begin,
    canary_of,
    generate,
    joined,
    long_request,
    make_adapter,
    merged,
    perturbed,
    reference_rows,
    refuses,
    short_request,
    token_logprobs,
)

SEQUENCE = np.arange(2, 20, dtype=np.int32)
Tensors = Mapping[str, torch.Tensor]


class WeightChecks:
    """Weights of an engine, sent as a learner does."""

    transport: type[WeightTransport] = TensorTransport
    """Transport of updates to the engine."""

    async def send(
        self,
        engine: RolloutEngine,
        tensors: Tensors,
        *,
        version: int,
        adapter: AdapterUpdate | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> tuple[WeightUpdate, WeightReceipt]:
        """Send tensors. `tied` are those of the model, by default as the tensors show it."""
        transport = self.transport()
        try:
            tied = _tied(tensors) if tied is None else tied
            update = transport.pack(tensors, version=version, tied=tied, adapter=adapter)
            return update, await engine.update_weights(update)
        finally:
            transport.close()

    def restore(self, engine: RolloutEngine, model_dir: Path) -> None:
        """Make the engine serve the folder's weights again, as version 0."""
        asyncio.run(self.send(engine, _weights_of(model_dir), version=0))

    @contextmanager
    def restoring(self, engine: RolloutEngine, model_dir: Path) -> Iterator[None]:
        """Restore the engine on exit."""
        try:
            yield
        finally:
            self.restore(engine, model_dir)


class UpdateChecks(WeightChecks):
    """Checks of weight updates. A subclass provides `model_dir` and `engine`, started and serving it in float32.

    Each check leaves the engine serving model_dir as version 0.
    """

    def test_an_update_replaces_what_is_served(self, engine: RolloutEngine, model_dir: Path) -> None:
        tensors = perturbed(_weights_of(model_dir), scale=0.05)
        before = _logprobs(engine)
        with self.restoring(engine, model_dir):
            update, receipt = asyncio.run(self.send(engine, tensors, version=41))
            assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-4
            after = _logprobs(engine)
            (rows,) = reference_rows(model_dir, [SEQUENCE], tensors=tensors)
            assert np.abs(after - before).max() > 100 * TOLERANCE
            np.testing.assert_allclose(after[1:], token_logprobs(rows, SEQUENCE), atol=TOLERANCE)
            assert set(generate(engine)[0].policy_versions.tolist()) == {41}

    def test_a_stream_goes_on_through_new_weights(self, engine: RolloutEngine, model_dir: Path) -> None:
        new = perturbed(_weights_of(model_dir), scale=0.05)
        request = replace(long_request(engine), num_samples=4)

        async def ask() -> tuple[list[NewTokens], list[Generation]]:
            noted: list[NewTokens] = []
            return noted, await engine.generate(replace(request, on_tokens=noted.append))

        self.restore(engine, model_dir)
        with self.restoring(engine, model_dir):
            answers = asyncio.run(answers_during(engine, ask, lambda: self.send(engine, new, version=46)))
        for noted, samples in answers:
            for index, sample in enumerate(samples):
                pieces = [piece for piece in noted if piece.sample_index == index]
                for name in ("token_ids", "logprobs", "policy_versions"):
                    streamed = np.concatenate([getattr(piece, name) for piece in pieces]).tolist()
                    assert streamed == getattr(sample, name).tolist()
        assert {0, 46} in [set(sample.policy_versions.tolist()) for _, samples in answers for sample in samples]

    def test_an_update_between_two_tokens_counts_from_the_next_token(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        """Tokens before the update are the old weights', and tokens after it the new ones'."""
        old = _weights_of(model_dir)
        new = perturbed(old, scale=0.05)
        request = replace(long_request(engine), num_samples=32)

        self.restore(engine, model_dir)
        with self.restoring(engine, model_dir):
            answers = asyncio.run(
                answers_during(engine, lambda: engine.generate(request), lambda: self.send(engine, new, version=44))
            )
        samples = [sample for answer in answers for sample in answer]
        versions = [sample.policy_versions.tolist() for sample in samples]
        assert versions == [sorted(of_sample) for of_sample in versions]
        continued = [sample for sample in samples if len(set(sample.policy_versions.tolist())) == 2]
        assert continued
        check_samples(continued, model_dir, {0: old, 44: new})

    def test_a_drained_update_comes_between_two_responses(self, engine: RolloutEngine, model_dir: Path) -> None:
        new = perturbed(_weights_of(model_dir), scale=0.05)
        canary = canary_of(model_dir, new, np.arange(2, 12, dtype=np.int32))
        request, transport = long_request(engine), self.transport()

        replicas = engine if isinstance(engine, ReplicatedEngine) else ReplicatedEngine([engine])

        async def drain() -> tuple[PublishReport, list[Generation], list[Generation]]:
            if replicas is not engine:
                await replicas.start()
            running = await begin(replicas, request)
            update = transport.pack(new, version=45, tied=_tied(new))
            publishing = asyncio.ensure_future(
                replicas.publish(update, canary=canary, tolerances=ProofTolerances(), drain=True)
            )
            await asyncio.sleep(0)
            later = await asyncio.gather(*(replicas.generate(short_request(seed=seed)) for seed in range(6)))
            return await publishing, await running, [sample for samples in later for sample in samples]

        self.restore(engine, model_dir)
        with self.restoring(engine, model_dir):
            try:
                report, (before,), after = asyncio.run(drain())
            finally:
                transport.close()
                if isinstance(engine, ProcessEngine):
                    engine.on_restart = None
        assert report.drain_s > 0
        assert report.stall_s > 0
        assert set(before.policy_versions.tolist()) == {0}
        check_samples(after, model_dir, {45: new})

    def test_a_refused_update_changes_nothing(self, engine: RolloutEngine, model_dir: Path) -> None:
        tensors = _weights_of(model_dir)
        name = next(name for name in tensors if name.endswith(".down_proj.weight"))
        before = generate(engine, seed=4)[0]
        for wrong in (
            {key: tensor for key, tensor in tensors.items() if key != name},
            {**tensors, name: tensors[name][:, :-1].contiguous()},
            {**tensors, "model.layers.99.weight": tensors[name].clone()},
        ):
            with refuses("tensor"):
                asyncio.run(self.send(engine, wrong, version=43))
        after = generate(engine, seed=4)[0]
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.policy_versions.tolist() == before.policy_versions.tolist()


class AdapterConformance(WeightChecks):
    """All checks of adapters. A subclass provides `model_dir` and `engine`, started and serving it in float32.

    The engine needs room for adapters of every linear layer except the head. Each check leaves it serving model_dir
    without an adapter, as version 0.
    """

    def test_each_adapter_replaces_the_last_on_the_same_base(self, engine: RolloutEngine, model_dir: Path) -> None:
        base, most = _weights_of(model_dir), engine.traits.max_lora_rank
        adapters = [
            make_adapter(base, rank=most, seed=1),
            make_adapter(base, rank=most, seed=2),
            make_adapter(base, rank=most - 1, seed=3, kinds=("q_proj", "down_proj")),
            make_adapter(base, rank=1, seed=4, kinds=("o_proj", "up_proj")),
            make_adapter(base, rank=most, seed=5),
        ]
        scores = [_logprobs(engine)]
        with self.restoring(engine, model_dir):
            for version, adapter in enumerate(adapters, start=1):
                report = asyncio.run(self.prove(engine, model_dir, adapter, version=version))
                assert report.probe_max_diff <= 1e-4
                assert report.canary_max_diff <= TOLERANCE
                scores.append(_logprobs(engine))
                (sample,) = asyncio.run(engine.generate(short_request(seed=version)))
                assert set(sample.policy_versions.tolist()) == {version}
        assert min(np.abs(now - last).max() for last, now in pairwise(scores)) > 100 * TOLERANCE
        np.testing.assert_allclose(_logprobs(engine), scores[0], atol=TOLERANCE)

    def test_the_base_is_served_beside_its_adapter(self, engine: RolloutEngine, model_dir: Path) -> None:
        """Both answer the same prompts, concurrently, one after the other, and streamed."""
        base = _weights_of(model_dir)
        adapter = make_adapter(base, rank=engine.traits.max_lora_rank, seed=6)
        requests = [
            replace(short_request(seed=index), num_samples=2, adapter="base" if index % 2 else None)
            for index in range(12)
        ]

        async def ask() -> list[list[Generation]]:
            groups = list(await asyncio.gather(*map(engine.generate, requests)))
            groups += [await engine.generate(request) for request in requests[:4]]
            pieces = [piece async for piece in stream(engine, replace(short_request(seed=1), adapter="base"))]
            return [*groups, [piece.ended for piece in pieces if piece.ended is not None]]

        self.restore(engine, model_dir)
        with self.restoring(engine, model_dir):
            asyncio.run(self.publish(engine, model_dir, adapter, version=7))
            groups = asyncio.run(ask())
        names = [request.adapter for request in [*requests, *requests[:4]]] + ["base"]
        for wanted, versions in ((None, {7: merged(base, adapter)}), ("base", {0: base})):
            samples = [one for group, name in zip(groups, names, strict=True) if name == wanted for one in group]
            check_samples(samples, model_dir, versions)

    def test_an_adapter_between_two_tokens_counts_from_the_next_one(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        base = _weights_of(model_dir)
        first, second = (make_adapter(base, rank=engine.traits.max_lora_rank, seed=seed) for seed in (7, 8))
        request = long_request(engine)

        async def update_twice() -> None:
            await self.publish(engine, model_dir, first, version=8)
            await begin(engine, request)
            await self.publish(engine, model_dir, second, version=9)

        async def ask() -> list[Generation]:
            groups = [engine.generate(one) for one in (request, replace(request, adapter="base"))]
            return [sample for (sample,) in await asyncio.gather(*groups)]

        self.restore(engine, model_dir)
        with self.restoring(engine, model_dir):
            answers = asyncio.run(answers_during(engine, ask, update_twice))
        adapted, beside = ([answer[index] for answer in answers] for index in range(2))
        versions = [sample.policy_versions.tolist() for sample in adapted]
        assert versions == [sorted(of_sample) for of_sample in versions]
        continued = [sample for sample in adapted if len(set(sample.policy_versions.tolist())) > 1]
        assert continued
        check_samples(continued, model_dir, {0: base, 8: merged(base, first), 9: merged(base, second)})
        check_samples(beside[:2], model_dir, {0: base})

    def test_all_weights_take_an_adapters_place(self, engine: RolloutEngine, model_dir: Path) -> None:
        base = _weights_of(model_dir)
        adapter = make_adapter(base, rank=engine.traits.max_lora_rank, seed=9)
        full = merged(base, make_adapter(base, rank=2, seed=10))
        request = short_request(seed=3)
        with self.restoring(engine, model_dir):
            asyncio.run(self.publish(engine, model_dir, adapter, version=10))
            asyncio.run(self.send(engine, full, version=11))
            both = [asyncio.run(engine.generate(one))[0] for one in (request, replace(request, adapter="base"))]
            check_samples(both, model_dir, {11: full})
            with refuses("model.norm.weight"):
                asyncio.run(self.publish(engine, model_dir, adapter, version=12, less="model.norm.weight"))

    def test_adapters_that_do_not_fit_are_refused_and_change_nothing(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        base, most = _weights_of(model_dir), engine.traits.max_lora_rank
        adapter = make_adapter(base, rank=most, seed=11)
        name = next(name for name in adapter if name.endswith(LORA_A))
        unknown = name.replace("layers.0", "layers.99")
        with self.restoring(engine, model_dir):
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

    async def prove(self, engine: RolloutEngine, model_dir: Path, adapter: Tensors, *, version: int) -> PublishReport:
        """Publish an adapter of the folder's model, with proof."""
        base, transport = _weights_of(model_dir), self.transport()
        canary = canary_of(model_dir, merged(base, adapter), SEQUENCE)
        try:
            record = AdapterUpdate(rank=rank_of(adapter), base=digest_tensors(base))
            update = transport.pack(adapter, version=version, tied=_tied(base), adapter=record)
            return await publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances())
        finally:
            transport.close()

    async def publish(
        self, engine: RolloutEngine, model_dir: Path, adapter: Tensors, *, version: int, less: str = ""
    ) -> tuple[WeightUpdate, WeightReceipt]:
        """Send an adapter of the folder's model. The base's digest named by `less` is left out."""
        base = _weights_of(model_dir)
        digests = {name: digest for name, digest in digest_tensors(base).items() if name != less}
        record = AdapterUpdate(rank=rank_of(adapter), base=digests)
        return await self.send(engine, adapter, version=version, adapter=record, tied=_tied(base))


def check_samples(samples: Sequence[Generation], model_dir: Path, versions: Mapping[int, Tensors]) -> None:
    """Compare the logprobs of responses to PROMPT with those of the weights of each token's version."""
    sampled = {version for sample in samples for version in sample.policy_versions.tolist()}
    assert sampled <= versions.keys()
    sequences: list[IntArray] = [joined(PROMPT, sample) for sample in samples]
    for version in sampled:
        rows = reference_rows(model_dir, sequences, tensors=versions[version])
        for sample, sequence, row in zip(samples, sequences, rows, strict=True):
            expected = token_logprobs(row, sequence)[len(PROMPT) - 1 :]
            here = sample.policy_versions == version
            np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=TOLERANCE)


def rank_of(adapter: Tensors) -> int:
    """Return the number of rows of an A; 1 if there is none."""
    return next((len(tensor) for name, tensor in adapter.items() if name.endswith(LORA_A)), 1)


def _tied(tensors: Tensors) -> Mapping[str, str]:
    return {} if "lm_head.weight" in tensors else TIED_HEAD


def _weights_of(model_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(model_dir / "model.safetensors")


def _logprobs(engine: RolloutEngine) -> FloatArray:
    return asyncio.run(engine.score([SEQUENCE]))[0].token_logprobs
