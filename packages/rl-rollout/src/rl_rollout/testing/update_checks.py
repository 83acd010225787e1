# ruff: noqa: S101, D102 - a test suite that other packages import: assertions are its purpose, names say the checks
"""Checks of weight updates."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from rl_core.weights import (
    ProofTolerances,
    PublishReport,
    TensorTransport,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    check_receipt,
)
from rl_rollout.engines.protocol import Generation, NewTokens, RolloutEngine
from rl_rollout.engines.publishing import publish_to
from rl_rollout.testing.engine_calls import PROMPT, begin, generate, joined, long_request, refuses, short_request
from rl_rollout.testing.generation_checks import TOLERANCE
from rl_rollout.testing.reference_model import TIED_HEAD, canary_of, perturbed, reference_logprobs, token_logprobs

ATTEMPTS = 10
"""Number of attempts. On a busy machine, a response may end before its update."""


class UpdateChecks:
    """Checks of weight updates. A subclass provides `model_dir` and `engine`, started and serving it in float32.

    Each check leaves the engine serving model_dir as version 0.
    """

    transport: type[WeightTransport] = TensorTransport
    """Transport of updates to the engine."""

    def test_an_update_replaces_what_is_served(self, engine: RolloutEngine, model_dir: Path) -> None:
        tensors = perturbed(load_file(model_dir / "model.safetensors"), scale=0.05)
        sequence = np.arange(2, 20, dtype=np.int32)
        (before,) = asyncio.run(engine.score([sequence]))
        update, receipt = asyncio.run(self.publish(engine, tensors, version=41))
        try:
            assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-4
            (after,) = asyncio.run(engine.score([sequence]))
            expected = token_logprobs(reference_logprobs(model_dir, sequence, tensors=tensors), sequence)
            assert np.abs(after.token_logprobs - before.token_logprobs).max() > 100 * TOLERANCE
            np.testing.assert_allclose(after.token_logprobs[1:], expected, atol=TOLERANCE)
            assert set(generate(engine)[0].policy_versions.tolist()) == {41}
        finally:
            self.restore(engine, model_dir)

    def test_a_stream_goes_on_through_new_weights(self, engine: RolloutEngine, model_dir: Path) -> None:
        new = perturbed(load_file(model_dir / "model.safetensors"), scale=0.05)
        request = replace(long_request(engine), num_samples=4)
        noted: list[NewTokens] = []

        async def update_midway() -> list[Generation]:
            running = asyncio.ensure_future(engine.generate(replace(request, on_tokens=noted.append)))
            async with asyncio.timeout(60):
                while not noted:
                    await asyncio.sleep(0)
                await self.publish(engine, new, version=46)
                return await running

        self.restore(engine, model_dir)
        try:
            samples = asyncio.run(update_midway())
        finally:
            self.restore(engine, model_dir)
        assert {version for sample in samples for version in sample.policy_versions.tolist()} == {0, 46}
        for index, sample in enumerate(samples):
            pieces = [piece for piece in noted if piece.sample_index == index]
            for name in ("token_ids", "logprobs", "policy_versions"):
                streamed = np.concatenate([getattr(piece, name) for piece in pieces]).tolist()
                assert streamed == getattr(sample, name).tolist()

    def test_an_update_between_two_tokens_counts_from_the_next_token(
        self, engine: RolloutEngine, model_dir: Path
    ) -> None:
        """In 64 running sequences, tokens before the update are the old weights', and tokens after it the new ones'."""
        old = load_file(model_dir / "model.safetensors")
        new = perturbed(old, scale=0.05)
        request = replace(long_request(engine), num_samples=64)

        async def swap() -> list[Generation]:
            running = await begin(engine, request)
            await self.publish(engine, new, version=44)
            return await running

        num_mixed = 0
        for _ in range(ATTEMPTS):
            self.restore(engine, model_dir)
            try:
                samples = asyncio.run(swap())
            finally:
                self.restore(engine, model_dir)
            for sample in samples:
                versions = sample.policy_versions
                assert versions.tolist() == sorted(versions.tolist())
                num_mixed += len(set(versions.tolist())) == 2
                sequence = joined(PROMPT, sample)
                for version, tensors in ((0, old), (44, new)):
                    rows = reference_logprobs(model_dir, sequence, tensors=tensors)
                    expected = token_logprobs(rows, sequence)[len(PROMPT) - 1 :]
                    here = versions == version
                    np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=TOLERANCE)
            if num_mixed:
                return
        raise AssertionError(f"none of 64 responses continued after an update, in {ATTEMPTS} attempts")

    def test_a_drained_update_comes_between_two_responses(self, engine: RolloutEngine, model_dir: Path) -> None:
        new = perturbed(load_file(model_dir / "model.safetensors"), scale=0.05)
        canary = canary_of(model_dir, new, np.arange(2, 12, dtype=np.int32))
        request, transport = long_request(engine), self.transport()

        async def drain() -> tuple[PublishReport, list[Generation], list[Generation]]:
            running = await begin(engine, request)
            update = transport.pack(new, version=45, tied=_tied(new))
            publishing = asyncio.ensure_future(
                publish_to(engine, update, canary=canary, tolerances=ProofTolerances(), drain=True)
            )
            await asyncio.sleep(0)
            later = await asyncio.gather(*(engine.generate(short_request(seed=seed)) for seed in range(6)))
            return await publishing, await running, [sample for samples in later for sample in samples]

        self.restore(engine, model_dir)
        try:
            report, (before,), after = asyncio.run(drain())
        finally:
            transport.close()
            self.restore(engine, model_dir)
        assert report.drain_s > 0
        assert report.stall_s > 0
        assert set(before.policy_versions.tolist()) == {0}
        for sample in after:
            assert set(sample.policy_versions.tolist()) == {45}
            sequence = joined(PROMPT, sample)
            expected = token_logprobs(reference_logprobs(model_dir, sequence, tensors=new), sequence)
            np.testing.assert_allclose(sample.logprobs, expected[len(PROMPT) - 1 :], atol=TOLERANCE)

    def test_a_refused_update_changes_nothing(self, engine: RolloutEngine, model_dir: Path) -> None:
        tensors = load_file(model_dir / "model.safetensors")
        name = next(name for name in tensors if name.endswith(".down_proj.weight"))
        before = generate(engine, seed=4)[0]
        for wrong in (
            {key: tensor for key, tensor in tensors.items() if key != name},
            {**tensors, name: tensors[name][:, :-1].contiguous()},
            {**tensors, "model.layers.99.weight": tensors[name].clone()},
        ):
            with refuses("tensor"):
                asyncio.run(self.publish(engine, wrong, version=43))
        after = generate(engine, seed=4)[0]
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.policy_versions.tolist() == before.policy_versions.tolist()

    async def publish(
        self, engine: RolloutEngine, tensors: Mapping[str, torch.Tensor], *, version: int
    ) -> tuple[WeightUpdate, WeightReceipt]:
        """Send weights as a learner does."""
        transport = self.transport()
        try:
            update = transport.pack(tensors, version=version, tied=_tied(tensors))
            return update, await engine.update_weights(update)
        finally:
            transport.close()

    def restore(self, engine: RolloutEngine, model_dir: Path) -> None:
        """Make the engine serve the folder's weights again, as version 0."""
        asyncio.run(self.publish(engine, load_file(model_dir / "model.safetensors"), version=0))


def _tied(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
    return {} if "lm_head.weight" in tensors else TIED_HEAD
