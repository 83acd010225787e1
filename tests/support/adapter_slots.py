"""Checks of an engine with slots for several adapters, for each engine with its own test module."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.errors import EngineError, WeightProofError
from rl_core.weights import (
    POLICY_ADAPTER,
    AdapterUpdate,
    Canary,
    InFile,
    ProofTolerances,
    PublishReport,
    WeightUpdate,
    digest_tensors,
    publish_weights,
    write_safetensors,
)
from rl_rollout.engines import ReplicatedEngine
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.testing import begin, refuses
from rl_rollout.testing.reference_model import (
    TIED_HEAD,
    canary_of,
    make_adapter,
    merged,
    reference_rows,
    token_logprobs,
)
from rl_rollout.testing.update_checks import SEQUENCE

RANK = 4
Tensors = Mapping[str, torch.Tensor]
PROMPTS = [np.array([5, 9, 14], np.int32), (np.arange(40) % 30 + 2).astype(np.int32)]
"""A short prompt and a long one, which a prefix cache keeps."""


class Clients:
    """Adapters of several clients over one base, in files, and the engine that serves them."""

    def __init__(self, engine: RolloutEngine, model_dir: Path, folder: Path) -> None:
        self.engine, self.model_dir, self._folder = engine, model_dir, folder
        self.base = load_file(model_dir / "model.safetensors")
        self._digests = digest_tensors(self.base)
        self._kinds = {"a": None, "b": ("q_proj", "down_proj"), "c": ("o_proj",)}

    def adapter(self, name: str, *, seed: int = 0) -> Tensors:
        """Return the adapter of a client; those of others change other modules."""
        kinds = self._kinds[name]
        more = {} if kinds is None else {"kinds": kinds}
        return make_adapter(self.base, rank=RANK - (name == "b"), seed=100 * seed + ord(name), **more)

    def weights(self, name: str, *, seed: int = 0) -> Tensors:
        """Return the base with a client's adapter merged."""
        return self.base if name == "base" else merged(self.base, self.adapter(name, seed=seed))

    def update(self, name: str, *, version: int, seed: int = 0) -> WeightUpdate:
        tensors = dict(self.adapter(name, seed=seed))
        file = self._folder / f"{name}-{version}.safetensors"
        write_safetensors(tensors, file)
        return WeightUpdate(
            version=version,
            digests=digest_tensors(tensors, kind="crc32c"),
            location=InFile(file=file),
            tied=TIED_HEAD,
            adapter=AdapterUpdate(rank=RANK - (name == "b"), base=self._digests, name=name),
        )

    def canary(self, name: str, *, seed: int = 0) -> Canary:
        return canary_of(self.model_dir, self.weights(name, seed=seed), SEQUENCE)

    async def publish(self, name: str, *, version: int, seed: int = 0) -> PublishReport:
        update, canary = self.update(name, version=version, seed=seed), self.canary(name, seed=seed)
        if isinstance(self.engine, ReplicatedEngine):
            return await self.engine.publish(update, canary=canary, tolerances=ProofTolerances())
        return await publish_weights(update, [self.engine], canary=canary, tolerances=ProofTolerances())

    def request(self, name: str | None, *, seed: int, max_tokens: int = 12) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        return GenerateRequest(input_ids=PROMPTS[seed % 2], sampling=sampling, num_samples=2, adapter=name)

    def check(self, samples: Sequence[Generation], name: str, seed: int, versions: Mapping[int, int]) -> None:
        """Compare samples of `request` with the reference; versions has each version's seed of the adapter."""
        prompt = PROMPTS[seed % 2]
        sequences = [np.concatenate([prompt, sample.token_ids]) for sample in samples]
        assert {version for sample in samples for version in sample.policy_versions.tolist()} <= versions.keys()
        for version, adapter_seed in versions.items():
            tensors = self.weights(name, seed=adapter_seed)
            rows = reference_rows(self.model_dir, sequences, tensors=tensors)
            for sample, sequence, row in zip(samples, sequences, rows, strict=True):
                expected = token_logprobs(row, sequence)[len(prompt) - 1 :]
                here = sample.policy_versions == version
                np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=1e-4)

    async def drop_all(self) -> None:
        for name in ("a", "b", "c"):
            try:
                await self.engine.drop_adapter(name)
            except EngineError as error:
                assert "serves no adapter" in str(error)  # noqa: PT017 - the others do not end the test


async def check_interleaved_requests_equal_each_alone(clients: Clients) -> None:
    """Requests of two adapters and the base run together, and each answers as in an engine that serves only it."""
    engine, names = clients.engine, ["a", "b", "base"] * 4

    async def ask() -> tuple[list[list[Generation]], list[list[Generation]], dict[str, np.ndarray]]:
        alone: list[list[Generation]] = []
        scores: dict[str, np.ndarray] = {}
        requests = [clients.request(name, seed=index) for index, name in enumerate(names)]
        for version, own in enumerate(("a", "b"), start=1):
            await clients.publish(own, version=version)
            alone += [await engine.generate(one) for one in requests if one.adapter == own]
            scores[own] = (await engine.score([SEQUENCE], adapter=own))[0].token_logprobs
            await engine.drop_adapter(own)
        alone += [await engine.generate(one) for one in requests if one.adapter == "base"]
        scores["base"] = (await engine.score([SEQUENCE], adapter="base"))[0].token_logprobs
        await asyncio.gather(*(clients.publish(own, version=version) for version, own in enumerate(("a", "b"), 1)))
        groups = await asyncio.gather(*map(engine.generate, requests))
        for own in ("a", "b", "base"):
            (found,) = await engine.score([SEQUENCE], adapter=own)
            np.testing.assert_allclose(found.token_logprobs, scores[own], atol=1e-5)
        return alone, groups, scores

    alone, groups, scores = await ask()
    ordered = [group for own in ("a", "b", "base") for group, name in zip(groups, names, strict=True) if name == own]
    for expected, found in zip(alone, ordered, strict=True):
        for left, right in zip(expected, found, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
    for seed, (own, group) in enumerate(zip(names, groups, strict=True)):
        clients.check(group, own, seed, {("base", "a", "b").index(own): 0})
    assert min(np.abs(scores[one] - scores["base"]).max() for one in ("a", "b")) > 0.01


async def check_an_update_of_one_leaves_the_others_running(clients: Clients) -> None:
    """Running requests of the other adapters are neither restarted nor changed; those of its own continue with it."""
    engine = clients.engine

    async def run(*, with_update: bool) -> list[Generation]:
        await clients.publish("a", version=1)
        await clients.publish("b", version=2)
        requests = [replace(clients.request(name, seed=7, max_tokens=60), num_samples=8) for name in ("a", "b", "base")]
        running = [asyncio.ensure_future(engine.generate(one)) for one in requests]
        await begin(engine, clients.request("b", seed=1, max_tokens=60))
        if with_update:
            await engine.update_weights(clients.update("a", version=3, seed=1))
        return [sample for group in await asyncio.gather(*running) for sample in group]

    before, after = [await run(with_update=with_update) for with_update in (False, True)]
    own, others = after[:8], after[8:]
    continued = [sample for sample in own if len(set(sample.policy_versions.tolist())) == 2]
    assert continued
    assert {sample.num_preempted for sample in continued} == {1}
    assert {sample.num_preempted for sample in others} == {0}
    for expected, found in zip(before[8:], others, strict=True):
        assert expected.token_ids.tolist() == found.token_ids.tolist()
        np.testing.assert_allclose(expected.logprobs, found.logprobs, atol=1e-5)
    clients.check(continued, "a", 7, {1: 0, 3: 1})


async def check_slots_are_limited_and_freed(clients: Clients) -> None:
    engine = clients.engine

    async def fill() -> None:
        with refuses("serves no adapter 'a', only the base. Publish it first."):
            await engine.generate(clients.request("a", seed=1))
        await clients.publish("a", version=1)
        await clients.publish("b", version=2)
        with refuses("has no slot for the adapter 'c': it serves max_adapters = 2, 'a', 'b'. Drop one"):
            await clients.publish("c", version=3)
        with refuses("serves no adapter 'c', only 'a', 'b'"):
            await engine.generate(clients.request("c", seed=1))
        with refuses("serves no adapter 'c'"):
            await engine.score([SEQUENCE], adapter="c")
        with refuses("serves no adapter 'c'"):
            await engine.drop_adapter("c")
        running = [
            asyncio.ensure_future(engine.generate(clients.request(name, seed=3, max_tokens=60))) for name in "ab"
        ]
        await begin(engine, clients.request("b", seed=1, max_tokens=60))
        await engine.drop_adapter("a")
        lost, kept = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(lost, EngineError)
        assert "serves no adapter 'a', only 'b'" in str(lost)
        assert isinstance(kept, list)
        clients.check(kept, "b", 3, {2: 0})
        await clients.publish("c", version=3)
        for version, name in ((2, "b"), (3, "c")):
            samples = await engine.generate(clients.request(name, seed=5))
            clients.check(samples, name, 5, {version: 0})
        with refuses("neither empty nor 'base'"):
            update = clients.update("c", version=4)
            assert update.adapter is not None
            await engine.update_weights(replace(update, adapter=replace(update.adapter, name="base")))

    await fill()


async def check_a_failed_slot_leaves_the_others(clients: Clients, publish_wrongly: Sequence[object]) -> None:
    """Each entry breaks the update of "a" when it is entered as a context; the proof names its words."""
    engine = clients.engine

    async def expect() -> list[Generation]:
        return [one for seed in (2, 3) for one in await engine.generate(clients.request("b", seed=seed))]

    await clients.publish("a", version=1)
    await clients.publish("b", version=2)
    before = await expect()
    for number, (broken, words) in enumerate(publish_wrongly):  # type: ignore[misc]
        with broken, pytest.raises(WeightProofError, match=words):
            await clients.publish("a", version=3 + number, seed=number + 1)
        for expected, found in zip(before, await expect(), strict=True):
            assert found.policy_versions.tolist() == expected.policy_versions.tolist()
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
        await clients.publish("a", version=3 + number, seed=number + 1)
        samples = await engine.generate(clients.request("a", seed=3))
        clients.check(samples, "a", 3, {3 + number: number + 1})


async def check_nothing_of_a_replaced_adapter_is_used(clients: Clients) -> None:
    """Even if the same version of the same name is published again, or after the adapter was dropped."""
    await clients.publish("b", version=1)
    for seed in range(4):
        if seed == 2:
            await clients.engine.drop_adapter("a")
        await clients.publish("a", version=2, seed=seed)
        for prompt in (2, 3):
            clients.check(await clients.engine.generate(clients.request("a", seed=prompt)), "a", prompt, {2: seed})
            clients.check(await clients.engine.generate(clients.request("b", seed=prompt)), "b", prompt, {1: 0})


async def check_requests_without_a_name_continue_with_the_base(clients: Clients) -> None:
    """The adapter without a name is dropped while a request runs, and another adapter stays."""
    await clients.publish("b", version=1)
    update = clients.update("a", version=2)
    assert update.adapter is not None
    adapter = replace(update.adapter, name=POLICY_ADAPTER)
    await clients.engine.update_weights(replace(update, adapter=adapter))
    request = replace(clients.request(None, seed=7, max_tokens=60), num_samples=8)
    running = await begin(clients.engine, request)
    await clients.engine.drop_adapter(POLICY_ADAPTER)
    samples = await running
    continued = [sample for sample in samples if len(set(sample.policy_versions.tolist())) == 2]
    assert continued
    prompt = request.input_ids
    for sample in continued:
        sequence = np.concatenate([prompt, sample.token_ids])
        for version, tensors in ((2, clients.weights("a")), (0, clients.base)):
            (row,) = reference_rows(clients.model_dir, [sequence], tensors=tensors)
            here = sample.policy_versions == version
            expected = token_logprobs(row, sequence)[len(prompt) - 1 :]
            np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=1e-4)


class SlotConformance:
    """Checks of every engine with two slots. Subclasses run them on the fixture `clients`."""

    def test_nothing_of_a_replaced_adapter_is_used(self, clients: Clients) -> None:
        """See `check_nothing_of_a_replaced_adapter_is_used`."""
        asyncio.run(check_nothing_of_a_replaced_adapter_is_used(clients))

    def test_interleaved_requests_equal_each_alone(self, clients: Clients) -> None:
        """See `check_interleaved_requests_equal_each_alone`."""
        asyncio.run(check_interleaved_requests_equal_each_alone(clients))

    def test_an_update_of_one_leaves_the_others_running(self, clients: Clients) -> None:
        """See `check_an_update_of_one_leaves_the_others_running`."""
        asyncio.run(check_an_update_of_one_leaves_the_others_running(clients))

    def test_requests_without_a_name_continue_with_the_base(self, clients: Clients) -> None:
        """See `check_requests_without_a_name_continue_with_the_base`."""
        asyncio.run(check_requests_without_a_name_continue_with_the_base(clients))

    def test_slots_are_limited_and_freed(self, clients: Clients) -> None:
        """See `check_slots_are_limited_and_freed`."""
        asyncio.run(check_slots_are_limited_and_freed(clients))
