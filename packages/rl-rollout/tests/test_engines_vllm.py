"""The vLLM engine: conformance, proof of weights, and no lasting changes to its process."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.errors import EngineDiedError, EngineError, NotReadyError, TransferError, WeightProofError
from rl_core.weights.broadcast import BroadcastTransport
from rl_core.weights.broadcast_group import BroadcastGroup
from rl_core.weights.publish import ProofTolerances, check_receipt
from rl_core.weights.transports import SharedFileTransport, TensorTransport
from rl_core.weights.update import InProcess, WeightUpdate
from rl_rollout.engines.protocol import GenerateRequest, Generation, NewTokens, SamplingParams, Structure
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.testing import EngineConformance, generate, joined, reference_logprobs, refuses
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, perturbed, token_logprobs
from rl_rollout.testing.update_checks import UpdateChecks


class TestVLLMEngine(EngineConformance):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, vllm_engine: VLLMEngine) -> VLLMEngine:
        return vllm_engine


class TestVLLMUpdatesFromFiles(UpdateChecks):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, vllm_engine: VLLMEngine) -> VLLMEngine:
        return vllm_engine


@pytest.fixture
def weights(tied_model_dir: Path, vllm_engine: VLLMEngine) -> Any:
    """Yield other weights than the engine's; restore the engine's own afterwards."""
    original = load_file(tied_model_dir / "model.safetensors")
    yield perturbed(original, scale=0.05)
    asyncio.run(vllm_engine.update_weights(packed(original, version=0)))


def packed(tensors: Mapping[str, torch.Tensor], *, version: int) -> WeightUpdate:
    return TensorTransport().pack(tensors, version=version, tied=TIED_HEAD)


@pytest.mark.parametrize("kind", ["crc32c", "sums"])
def test_a_tensor_corrupted_on_its_way_is_named(
    kind: str, vllm_engine: VLLMEngine, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_core.weights.digests._own_kind", lambda tensor: kind)
    name = "model.layers.1.self_attn.v_proj.weight"
    update = packed(weights, version=7)
    assert {digest.kind for digest in update.digests.values()} == {kind}
    corrupt = dict(update.location.tensors)
    corrupt[name] = corrupt[name].clone()
    corrupt[name][3, 5] += 1e-3
    damaged = WeightUpdate(version=7, digests=update.digests, location=InProcess(tensors=corrupt), tied=update.tied)
    receipt = asyncio.run(vllm_engine.update_weights(damaged))
    assert [key for key, crc in receipt.arrived.items() if crc != update.digests[key].checksum] == [name]
    with pytest.raises(WeightProofError, match="v_proj") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == name


def test_a_tied_head_that_stays_stale_is_named(
    vllm_engine: VLLMEngine, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_rollout.engines.vllm import worker as vllm_worker  # imports vLLM, after the engine has set it up

    monkeypatch.setattr(vllm_worker, "repack_output_head", lambda model: None)
    update = packed(weights, version=8)
    receipt = asyncio.run(vllm_engine.update_weights(update))
    with pytest.raises(WeightProofError, match="the engine serves something else") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == "lm_head.weight"
    monkeypatch.undo()
    receipt = asyncio.run(vllm_engine.update_weights(update))
    assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-5


def test_layers_that_differ_from_the_folder_are_named_at_the_start(
    vllm_engine: VLLMEngine, weights: dict[str, torch.Tensor], tied_model_dir: Path
) -> None:
    stepper: Any = vllm_engine._stepper
    stepper._prove_first_weights(tied_model_dir, "float32")
    changed = load_file(tied_model_dir / "model.safetensors") | {"model.norm.weight": weights["model.norm.weight"]}
    asyncio.run(vllm_engine.update_weights(packed(changed, version=10)))
    with pytest.raises(WeightProofError, match=r"serves something else as tensor 'model\.norm\.weight'"):
        stepper._prove_first_weights(tied_model_dir, "float32")


def test_a_buffer_that_a_sleep_has_changed_is_named(
    vllm_engine: VLLMEngine, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps buffers on the host during a level 2 sleep, and updates contain none of them."""
    core: Any = vllm_engine._stepper._core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point())
    update = packed(weights, version=9)
    core.collective_rpc("note_buffers")
    before = buffer.clone()
    buffer.flatten()[3] += 1
    receipt = asyncio.run(vllm_engine.update_weights(update))
    with pytest.raises(WeightProofError, match=f"buffer '{re.escape(name)}' changed while the engine slept"):
        check_receipt(update, receipt, tolerances=ProofTolerances())
    buffer.copy_(before)
    core.collective_rpc("note_buffers")
    receipt = asyncio.run(vllm_engine.update_weights(update))
    assert check_receipt(update, receipt, tolerances=ProofTolerances()) < 1e-5


def test_logprobs_stay_within_1e4_of_transformers_over_five_updates(
    vllm_engine: VLLMEngine, tied_model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    for version in range(1, 6):
        tensors = {name: tensor * (1 + 0.02 * version) for name, tensor in weights.items()}
        asyncio.run(vllm_engine.update_weights(packed(tensors, version=version)))
        for sample in generate(vllm_engine, num_samples=4, max_tokens=24, seed=version):
            sequence = joined(PROMPT, sample)
            rows = reference_logprobs(tied_model_dir, sequence, tensors=tensors)
            expected = token_logprobs(rows, sequence)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_a_long_prompt_shared_by_samples_is_not_served_from_old_weights(
    vllm_engine: VLLMEngine, tied_model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    prompt = (np.arange(80) % 30 + 2).astype(np.int32)
    request = GenerateRequest(input_ids=prompt, sampling=SamplingParams(max_tokens=4, seed=0), num_samples=4)
    asyncio.run(vllm_engine.generate(request))
    asyncio.run(vllm_engine.update_weights(packed(weights, version=9)))
    for sample in asyncio.run(vllm_engine.generate(request)):
        sequence = joined(prompt, sample)
        expected = token_logprobs(reference_logprobs(tied_model_dir, sequence, tensors=weights), sequence)
        np.testing.assert_allclose(sample.logprobs, expected[len(prompt) - 1 :], atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 64, 65, 100])
def test_samples_that_share_a_prompt_match_its_scores(vllm_engine: VLLMEngine, length: int) -> None:
    prompt = np.random.default_rng(length).integers(2, 32, length).astype(np.int32)
    sampling = SamplingParams(max_tokens=6, seed=0)
    request = GenerateRequest(input_ids=prompt, sampling=sampling, num_samples=8)

    async def ask_twice() -> list[Generation]:
        groups = await asyncio.gather(vllm_engine.generate(request), vllm_engine.generate(request))
        return [sample for group in groups for sample in group]

    samples = asyncio.run(ask_twice())
    scores = asyncio.run(vllm_engine.score([joined(prompt, sample) for sample in samples]))
    for sample, row in zip(samples, scores, strict=True):
        np.testing.assert_allclose(sample.logprobs, row.token_logprobs[length:], atol=1e-4)


def test_a_group_that_does_not_fit_is_served_in_turns(vllm_engine: VLLMEngine) -> None:
    prompts = [np.random.default_rng(seed).integers(2, 32, 40).astype(np.int32) for seed in range(3)]

    async def ask_all() -> list[list[Generation]]:
        sampling = SamplingParams(max_tokens=80, seed=0)
        requests = [GenerateRequest(input_ids=prompt, sampling=sampling, num_samples=40) for prompt in prompts]
        return list(await asyncio.gather(*map(vllm_engine.generate, requests)))

    groups = asyncio.run(ask_all())
    sequences = [joined(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    samples = [sample for group in groups for sample in group]
    assert any(sample.num_preempted for sample in samples)
    for sample, row in zip(samples, asyncio.run(vllm_engine.score(sequences)), strict=True):
        np.testing.assert_allclose(sample.logprobs, row.token_logprobs[40:], atol=1e-4)


def test_streams_and_structures_survive_preemption(vllm_engine: VLLMEngine, tied_model_dir: Path) -> None:
    """Run more samples than the KV cache holds; one sample of each prompt has a structure."""
    tokenizer = PromptTokenizer.load(tied_model_dir)
    free, bound = (
        SamplingParams(max_tokens=80, seed=0, structure=structure) for structure in (None, Structure(regex="[ab]{40}"))
    )
    prompts = [np.random.default_rng(seed).integers(2, 32, 40).astype(np.int32) for seed in range(2)]
    noted: list[list[NewTokens]] = [[], []]

    async def ask_all() -> list[list[Generation]]:
        requests = [
            GenerateRequest(input_ids=prompt, sampling=(bound, *[free] * 39), num_samples=40, on_tokens=found.append)
            for prompt, found in zip(prompts, noted, strict=True)
        ]
        return list(await asyncio.gather(*map(vllm_engine.generate, requests)))

    groups = asyncio.run(ask_all())
    assert any(sample.num_preempted for group in groups for sample in group)
    for group, pieces in zip(groups, noted, strict=True):
        (text,) = tokenizer.decode([group[0].token_ids])
        assert set(text) == {"a", "b"}
        assert len(text) == 40
        for index, sample in enumerate(group):
            own = [piece for piece in pieces if piece.sample_index == index]
            assert np.concatenate([piece.token_ids for piece in own]).tolist() == sample.token_ids.tolist()
            assert np.concatenate([piece.logprobs for piece in own]).tolist() == sample.logprobs.tolist()


def test_the_process_is_left_as_it_was(started_vllm: Any) -> None:
    assert started_vllm.after == started_vllm.before


def test_draws_leave_the_global_generator_alone(vllm_engine: VLLMEngine) -> None:
    before = torch.get_rng_state()
    generate(vllm_engine, num_samples=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_on_a_cpu_have_no_gpu_to_report(vllm_engine: VLLMEngine) -> None:
    assert asyncio.run(vllm_engine.gpu_use()) == []


def test_a_dense_model_has_no_experts_to_tell(vllm_engine: VLLMEngine) -> None:
    (sample,) = generate(vllm_engine)
    assert sample.routed_experts is None


def test_a_process_holds_one_vllm_engine(vllm_engine: VLLMEngine, tied_model_dir: Path) -> None:
    second = VLLMEngine(tied_model_dir, VLLMOptions(max_model_len=64))
    with refuses("already has a vLLM engine"):
        asyncio.run(second.start())
    asyncio.run(second.close())
    assert len(generate(vllm_engine)) == 1


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        asyncio.run(VLLMEngine(tmp_path).start())


def test_an_engine_that_was_not_started_says_so(tied_model_dir: Path) -> None:
    engine = VLLMEngine(tied_model_dir)
    with pytest.raises(NotReadyError, match="has not been started"):
        generate(engine)
    asyncio.run(engine.close())
    with pytest.raises(NotReadyError, match="closed"):
        asyncio.run(engine.start())


def test_a_sender_that_dies_midway_ends_the_engine(
    vllm_engine: VLLMEngine, tied_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs last in this module: its engine ends up with weights of two versions, and must stop."""
    transport = BroadcastTransport(bucket_bytes=10_000, deadline_s=5.0)
    update = transport.pack(load_file(tied_model_dir / "model.safetensors"), version=13, tied=TIED_HEAD)
    send = BroadcastGroup.send

    def send_half(self: BroadcastGroup, tensors: Iterable[torch.Tensor]) -> None:
        send(self, islice(tensors, len(update.digests) // 2))
        self.close()
        raise TransferError("the learner died")

    monkeypatch.setattr(BroadcastGroup, "send", send_half)
    with pytest.raises(EngineDiedError, match="version 13 could not be loaded"):
        asyncio.run(vllm_engine.update_weights(update))
    with pytest.raises(EngineDiedError):
        generate(vllm_engine)
    transport.close()
