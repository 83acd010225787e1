"""Experts that vLLM reports for a mixture, compared with transformers' choice for the same tokens."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_core.data import ExpertArray, IntArray, Prompt
from rl_core.errors import DataError
from rl_core.weights import ProofTolerances, SharedFileTransport, check_receipt
from rl_rollout.audit import RecordingEngine, audit_session
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.loops.conversation import Conversation, TurnLimits
from rl_rollout.loops.protocol import LoopContext
from rl_rollout.rewards.scorer import RewardScorer
from rl_rollout.testing import joined, refuses
from rl_rollout.testing.reference_model import perturbed, write_tiny_tokenizer

MIXTURES = (0, 2)
"""Layers of the model that are mixtures; layer 1 is dense."""
VOCAB_SIZE, TOP_K, DECIDED_BY = 200, 2, 1e-5
OPTIONS = VLLMOptions(
    max_model_len=160,
    max_num_seqs=64,
    max_num_batched_tokens=64,  # longer prompts are computed in pieces
    kv_cache_gib=0.0032,  # 68 blocks of 32 tokens: samples are preempted as they grow
    num_threads=1,
)
ONE_THREAD = EnginePlacement(environment={"OMP_NUM_THREADS": "1"})


class Reference:
    """A transformers model in float32 that chooses the expected experts."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.num_rows = self.num_exempt = 0

    def choose(self, sequences: Sequence[IntArray]) -> tuple[ExpertArray, np.ndarray]:
        """Return the sorted experts, [N, T, layers, top_k], and whether they are clearly the best, [N, T, layers]."""
        rows = pad_sequence([torch.from_numpy(each.astype(np.int64)) for each in sequences], batch_first=True)
        with torch.inference_mode():  # causal: no token attends to the padding
            logits = self.model(rows, output_router_logits=True).router_logits
        best = torch.stack([one.float().softmax(-1) for one in logits], 1).topk(TOP_K + 1, -1)
        is_clear = best.values[..., -2] - best.values[..., -1] >= DECIDED_BY
        chosen = best.indices[..., :-1].sort(-1).values
        return chosen.unflatten(0, rows.shape).numpy(), is_clear.unflatten(0, rows.shape).numpy()

    def check(
        self,
        sequences: Sequence[IntArray],
        told: Sequence[ExpertArray | None],
        *,
        start: int = 0,
        by_these: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Check that these weights choose the experts of every row from start on, except the last, which has none.

        Args:
            by_these: [T - 1] of each sequence, True where these weights chose the experts; None means everywhere.
        """
        masks = by_these or [np.ones(len(sequence) - 1, bool) for sequence in sequences]
        for sequence, experts, mask, chosen, is_clear in zip(
            sequences, told, masks, *self.choose(sequences), strict=True
        ):
            assert experts is not None
            assert experts.dtype == np.int16
            assert experts.shape == (len(sequence), 3, TOP_K)
            assert (experts[-1] == -1).all()
            assert (experts[:, 1] == -1).all()
            rows = start + np.flatnonzero(mask[start:])
            is_same = (np.sort(experts[rows][:, MIXTURES], -1) == chosen[rows]).all(-1)
            wrong = ~is_same & is_clear[rows]
            assert not wrong.any(), f"{wrong.sum()} of {wrong.size} are wrong, the first {np.argwhere(wrong)[0]}"
            self.num_rows += is_same.size
            self.num_exempt += int((~is_same).sum())

    def check_all(self, requests: Sequence[GenerateRequest], groups: Sequence[Sequence[Generation]]) -> None:
        for request, samples in zip(requests, groups, strict=True):
            sequences = [joined(request.input_ids, sample) for sample in samples]
            self.check(sequences, [sample.routed_experts for sample in samples])


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=8,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    write_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def reference(mixture_dir: Path) -> Reference:
    return Reference(mixture_dir)


@pytest.fixture(scope="module")
def engine(mixture_dir: Path, learner_process_group: None) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(mixture_dir, OPTIONS)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


def request_of(seed: int, length: int, *, num_samples: int = 1, max_tokens: int = 12) -> GenerateRequest:
    prompt = np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return GenerateRequest(input_ids=prompt, sampling=sampling, num_samples=num_samples, request_id=str(seed))


async def ask(engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> list[list[Generation]]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def test_prompts_in_pieces_shared_and_cached(engine: VLLMEngine, reference: Reference) -> None:
    requests = [request_of(n, n, num_samples=10) for n in (1, 2, 31, 32, 33, 34, 63, 64, 65, 100, 129)]
    for _ in range(2):  # the second round takes whole blocks from the prefix cache
        reference.check_all(requests, asyncio.run(ask(engine, requests)))


def test_samples_that_are_preempted_keep_their_first_pass(engine: VLLMEngine, reference: Reference) -> None:
    requests = [request_of(200 + n, 40, num_samples=20, max_tokens=80) for n in range(3)]
    groups = asyncio.run(ask(engine, requests))
    assert any(sample.num_preempted for group in groups for sample in group)
    reference.check_all(requests, groups)


def test_prompts_are_scored_beside_them(engine: VLLMEngine, reference: Reference) -> None:
    requests = [request_of(300 + n, 50, num_samples=4) for n in range(2)]

    async def both() -> list[list[Generation]]:
        scoring = asyncio.ensure_future(engine.score([request_of(310, 150).input_ids, requests[0].input_ids]))
        groups = await ask(engine, requests)
        await scoring
        return groups

    reference.check_all(requests, asyncio.run(both()))


def conversation(engine: RolloutEngine, request: GenerateRequest, **limits: object) -> Conversation:
    (sampling,) = request.samplings
    context = LoopContext(engine=engine, sampling=sampling, scorer=RewardScorer(lambda _: 0.0), decode=lambda _: [])
    prompt = Prompt(uid="p", input_ids=request.input_ids)
    return Conversation(
        prompt=prompt, prompt_ids=prompt.input_ids, session_index=0, context=context, limits=TurnLimits(**limits)
    )


def test_turns_are_joined(engine: VLLMEngine, reference: Reference) -> None:
    recording = RecordingEngine(engine)
    talk = conversation(recording.as_engine, request_of(400, 37, max_tokens=100), max_turn_tokens=14)
    told: list[Generation] = []

    async def converse() -> None:
        for turn in range(4):
            told.append(await talk.sample())
            talk.append(request_of(410 + turn, 9).input_ids)
            await engine._call(engine._stepper.reset_prefix_cache)  # so that earlier turns are recomputed

    asyncio.run(converse())
    (trajectory,) = talk.trajectories
    end = 37 + sum(len(turn.token_ids) for turn in told) + 27
    assert trajectory.routed_experts is not None
    assert (trajectory.routed_experts[end - 1 :] == -1).all()  # the last turn's last token, and the message after it
    reference.check([trajectory.input_ids[:end]], [trajectory.routed_experts[:end]])
    audit_session(talk.trajectories, recording.spans)
    swapped = trajectory.routed_experts.copy()
    swapped[[40, 60]] = swapped[[60, 40]]
    with pytest.raises(DataError, match=r"p/0/0: token 40 .* in layer 0, but the engine used"):
        audit_session([replace(trajectory, routed_experts=swapped)], recording.spans)


def test_turns_that_go_on_in_another_trajectory_have_its_context(engine: VLLMEngine, reference: Reference) -> None:
    recording = RecordingEngine(engine)
    request = request_of(500, 20, max_tokens=60)
    talk = conversation(recording.as_engine, request, max_turn_tokens=14, on_context_full="new_trajectory")

    async def converse() -> None:
        for turn in range(5):
            await talk.sample()
            talk.append(request_of(510 + turn, 6).input_ids)
        await talk.sample()

    asyncio.run(converse())
    assert len(talk.trajectories) > 1
    for trajectory in talk.trajectories:
        end = int(np.flatnonzero(trajectory.loss_mask)[-1]) + 1
        assert trajectory.routed_experts is not None
        reference.check([trajectory.input_ids[:end]], [trajectory.routed_experts[:end]])
    audit_session(talk.trajectories, recording.spans)


async def midway(engine: VLLMEngine, request: GenerateRequest) -> "asyncio.Future[list[Generation]]":
    """Start a request, and return it once it has some of its tokens."""
    running = asyncio.ensure_future(engine.generate(request))
    await asyncio.sleep(0)
    await engine.generate(request_of(1, 3, max_tokens=6))
    return running


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_response_that_is_aborted_has_what_was_computed(
    engine: VLLMEngine, reference: Reference, is_reset: bool
) -> None:
    request = request_of(600, 70, num_samples=3, max_tokens=90)

    async def cut() -> list[Generation]:
        running = await midway(engine, request)
        reset = [engine._call(engine._stepper.reset_prefix_cache)] if is_reset else []
        await asyncio.gather(*reset, engine.abort(["600"]))  # the abort comes before any recomputation
        return await running

    samples = asyncio.run(cut())
    assert samples
    assert all(sample.finish_reason == "abort" and len(sample.token_ids) > 1 for sample in samples)
    reference.check_all([request], [samples])


def test_a_response_that_a_stop_string_ends_has_its_experts(engine: VLLMEngine, reference: Reference) -> None:
    request = request_of(700, 40, num_samples=8, max_tokens=40)
    sampling = replace(request.samplings[0], stop=("a", '"', "1"))
    (samples,) = asyncio.run(ask(engine, [replace(request, sampling=sampling)]))
    assert sum(sample.matched_stop is not None for sample in samples) > 4
    reference.check_all([request], [samples])


def with_noise(embeddings: torch.Tensor) -> None:
    embeddings += 0.1 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))


def test_a_response_that_goes_on_under_other_weights_keeps_the_experts_that_sampled_it(
    engine: VLLMEngine, reference: Reference, mixture_dir: Path
) -> None:
    request, other = request_of(700, 70, num_samples=4, max_tokens=90), Reference(mixture_dir)
    num_sampled: list[int] = []

    def change(each: Callable[[torch.Tensor], None]) -> None:
        """Change the embedding, which no kernel packs."""
        num_sampled[:] = [len(sample.token_ids) for sample, _ in engine._stepper._running.values()]
        model = engine._stepper._core.model_executor.driver_worker.worker.model_runner.get_model()
        with torch.inference_mode():
            each(model.model.embed_tokens.weight[:VOCAB_SIZE])
        engine._stepper.reset_prefix_cache()

    async def change_midway() -> list[Generation]:
        running = await midway(engine, request)
        await engine._call(change, with_noise)
        return await running

    embeddings = other.model.model.embed_tokens.weight.data
    original = embeddings.clone()
    with_noise(embeddings)
    samples = asyncio.run(change_midway())
    assert samples
    assert all(sample.num_preempted == 1 for sample in samples)
    for sample, count in zip(samples, num_sampled.copy(), strict=True):
        sequence, first_new = joined(request.input_ids, sample), 70 + count - 1
        assert sample.routed_experts is not None
        kept = np.concatenate([sample.routed_experts[:first_new], np.full((1, 3, TOP_K), -1, np.int16)])
        reference.check([sequence[: first_new + 1]], [kept])
        other.check([sequence], [sample.routed_experts], start=first_new)
    asyncio.run(engine._call(change, lambda weight: weight.copy_(original)))


def test_a_model_that_forgets_tokens_is_refused_with_what_to_set(engine: VLLMEngine) -> None:
    from rl_rollout.engines.vllm.expert_capture import whole_group  # imports vLLM, after the engine has set it up

    sliding = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=object())])
    with refuses("Set capture_experts = false"):
        whole_group(sliding)
    whole = engine._stepper._core.scheduler.kv_cache_config.kv_cache_groups
    assert whole_group(SimpleNamespace(kv_cache_groups=[*sliding.kv_cache_groups, *whole])) == 1


def test_enough_rows_were_looked_at(reference: Reference) -> None:
    """Runs after all other tests of this module except the slow ones."""
    assert reference.num_rows > 20_000 * len(MIXTURES)
    assert reference.num_exempt < 20


MIXES = {
    "as above": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "room for four samples": {"kv_cache_gib": 0.0016},
    "steps of 16 tokens": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
}


@pytest.mark.soak
@pytest.mark.parametrize("changed", MIXES.values(), ids=MIXES)
def test_any_mix_of_requests_updates_resets_and_aborts(
    changed: dict[str, Any], mixture_dir: Path, tmp_path: Path, seed: int
) -> None:
    """Partial responses continue after losing their blocks; each row matches the weights that sampled with it."""
    rng, transport = np.random.default_rng(seed), SharedFileTransport()
    weights = load_file(mixture_dir / "model.safetensors")
    both = [weights, perturbed(weights, scale=0.05)]
    shutil.copytree(mixture_dir, tmp_path / "new")
    save_file(both[1], tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    references = [Reference(mixture_dir), Reference(tmp_path / "new")]
    engine = ProcessEngine("vllm", mixture_dir, replace(OPTIONS, **changed), host=ONE_THREAD)
    version = 0

    def check(requests: Sequence[GenerateRequest], groups: Sequence[Sequence[Generation]]) -> None:
        pairs = [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
        early = [sample.routed_experts for _, sample in pairs if not len(sample.token_ids)]
        assert early
        assert all(told is None or (told == -1).all() for told in early)  # aborted before their first token
        begun = [(request, sample) for request, sample in pairs if len(sample.token_ids)]
        sequences = [joined(request.input_ids, sample) for request, sample in begun]
        of_rows = [np.pad(one.policy_versions, (len(request.input_ids) - 1, 0), "edge") for request, one in begun]
        for parity, reference in enumerate(references if begun else ()):
            by_these = [of % 2 == parity for of in of_rows]
            reference.check(sequences, [sample.routed_experts for _, sample in begun], by_these=by_these)

    async def disturb(requests: Sequence[GenerateRequest]) -> None:
        nonlocal version
        await engine.generate(request_of(1, 3, max_tokens=int(rng.integers(1, 20))))
        what = rng.random()
        if what < 0.3:
            version += 1
            update = transport.pack(both[version % 2], version=version, tied={})
            check_receipt(update, await engine.update_weights(update), tolerances=ProofTolerances())
        elif what < 0.5:
            await engine._call(engine._stepper.reset_prefix_cache)
        elif what < 0.9:
            await engine.abort([requests[rng.integers(5)].request_id or ""])

    async def mix(number: int) -> None:
        requests = [
            request_of(
                1000 * number + index if rng.random() < 0.7 else index,  # some prompts repeat
                length,
                num_samples=int(rng.integers(1, 12)),
                max_tokens=int(rng.integers(1, 160 - length)),
            )
            for index, length in enumerate(rng.integers(1, 150, 5).tolist())
        ]
        running = asyncio.ensure_future(ask(engine, requests))
        for _ in range(rng.integers(0, 4)):
            await disturb(requests)
        groups = await running
        check(requests, groups)
        partial = [
            GenerateRequest(input_ids=joined(request.input_ids, one), sampling=SamplingParams(max_tokens=5))
            for request, group in zip(requests, groups, strict=True)
            for one in group
            if one.finish_reason == "abort" and len(request.input_ids) + len(one.token_ids) < 155
        ]
        await engine.generate(request_of(2000 + number, 140, num_samples=4, max_tokens=10))
        check(partial, await ask(engine, partial))

    async def all_rounds() -> None:
        await engine.start()
        try:
            for number in range(20):
                await mix(number)
        finally:
            await engine.close()

    asyncio.run(all_rounds())
    transport.close()
    assert sum(reference.num_rows for reference in references) > 20_000 * len(MIXTURES)


@pytest.mark.soak
def test_two_ranks_of_a_replica_in_a_process_tell_them_too(mixture_dir: Path, reference: Reference) -> None:
    options = VLLMOptions(
        tensor_parallel_size=2, max_model_len=160, max_num_seqs=64, max_num_batched_tokens=64, kv_cache_gib=0.01
    )
    replica = ProcessEngine("vllm", mixture_dir, options, host=ONE_THREAD)
    requests = [request_of(n, n, num_samples=6) for n in (3, 32, 65, 129)]

    async def from_process() -> list[list[Generation]]:
        engine = ReplicatedEngine([replica])
        await engine.start()
        try:
            return await ask(engine, requests)
        finally:
            await engine.close()

    reference.check_all(requests, asyncio.run(from_process()))


@pytest.mark.soak
def test_what_a_killed_replica_owed_is_told_by_another(mixture_dir: Path, reference: Reference) -> None:
    host = replace(ONE_THREAD, max_restarts=1)
    replicas = [ProcessEngine("vllm", mixture_dir, OPTIONS, host=host, index=index) for index in (0, 1)]
    requests = [request_of(n, n, num_samples=8, max_tokens=90) for n in (3, 32, 65, 33, 20, 64)]

    async def from_replicas() -> list[list[Generation]]:
        engine = ReplicatedEngine(replicas)
        await engine.start()
        try:
            await engine.generate(request_of(1, 3, num_samples=4))
            running = [asyncio.ensure_future(engine.generate(one)) for one in requests]
            await asyncio.sleep(0)
            os.kill(replicas[0].pid, signal.SIGKILL)
            groups = list(await asyncio.gather(*running))
            async with asyncio.timeout(120):
                while engine.num_serving < 2:
                    await asyncio.sleep(0.05)
            return [*groups, *await ask(replicas[0], requests[:2])]  # the restarted replica reports experts too
        finally:
            await engine.close()

    reference.check_all([*requests, *requests[:2]], asyncio.run(from_replicas()))
