"""vLLM with tensor parallelism: two worker processes that serve, prove updates and end as one engine."""

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_listeners import listening_sockets, undocumented
from offered_weights import TwoRanks
from safetensors.torch import load_file, save_file

from rl_core.cluster.processes.guard import descendants, is_running
from rl_core.errors import EngineDiedError, WeightProofError
from rl_core.weights.broadcast import BroadcastTransport, SenderOptions
from rl_core.weights.digests import LORA_A, LORA_B, digest_tensors
from rl_core.weights.publish import ProofTolerances, check_receipt
from rl_core.weights.transports import SharedFileTransport, TensorTransport
from rl_core.weights.update import AdapterUpdate, FromSenders, WeightUpdate
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.protocol import GenerateRequest, SamplingParams
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.engines.weight_checks import module_of
from rl_rollout.testing import AdapterConformance, EngineConformance, generate, make_tiny_model, refuses
from rl_rollout.testing.reference_model import PROMPT, TIED_HEAD, make_adapter, perturbed
from rl_rollout.testing.update_checks import UpdateChecks

SMALL = {"max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": 192, "kv_cache_gib": 0.002}
GONE_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose 100 tokens are padded to 128, so that the second worker holds 36 of them."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), is_tied=True, vocab_size=100)


@pytest.fixture(scope="module")
def tokens_of_one_process(wide_model_dir: Path) -> list[list[int]]:
    """Return the tokens that the engine draws without tensor parallelism; it closes before the other starts."""
    engine = VLLMEngine(wide_model_dir, VLLMOptions(**SMALL))
    asyncio.run(engine.start())
    try:
        return drawn(engine)
    finally:
        asyncio.run(engine.close())


@pytest.fixture(scope="module")
def split_vllm(wide_model_dir: Path, tokens_of_one_process: list[list[int]]) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(wide_model_dir, VLLMOptions(tensor_parallel_size=2, max_lora_rank=4, **SMALL))
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize(
    "check",
    [
        EngineConformance.test_greedy_responses_are_the_reference_models_likeliest_tokens,
        EngineConformance.test_logprobs_are_of_the_distribution_drawn_from,
        EngineConformance.test_scores_are_the_reference_models,
        EngineConformance.test_abort_ends_the_requests_that_are_named,
        EngineConformance.test_logprobs_under_a_structure_are_of_the_distribution_drawn_from,
        EngineConformance.test_many_requests_at_once_each_get_their_own,
        EngineConformance.test_an_update_replaces_what_is_served,
        EngineConformance.test_an_update_between_two_tokens_counts_from_the_next_token,
        EngineConformance.test_a_refused_update_changes_nothing,
    ],
)
def test_two_workers_conform(check: Callable[..., None], split_vllm: VLLMEngine, wide_model_dir: Path) -> None:
    """Run the checks that depend on the workers; the others pass too, but take another minute."""
    has_model = "model_dir" in inspect.signature(check).parameters
    check(EngineConformance(), split_vllm, *([wide_model_dir] if has_model else []))


def test_updates_from_files_reach_every_worker(split_vllm: VLLMEngine, wide_model_dir: Path) -> None:
    suite = UpdateChecks()
    suite.transport = SharedFileTransport
    suite.test_an_update_replaces_what_is_served(split_vllm, wide_model_dir)


class KeptOpen(BroadcastTransport):
    """A transport for all updates, as in a learner, although the suite closes it after each update."""

    def __init__(self) -> None:
        super().__init__(bucket_bytes=10_000, deadline_s=60.0)

    def close(self) -> None:
        """Stay open; the fixture closes the transport."""


@pytest.fixture(scope="module")
def broadcast() -> Iterator[KeptOpen]:
    transport = KeptOpen()
    yield transport
    BroadcastTransport.close(transport)


@pytest.mark.parametrize(
    "check",
    [
        UpdateChecks.test_an_update_replaces_what_is_served,
        UpdateChecks.test_an_update_between_two_tokens_counts_from_the_next_token,
        UpdateChecks.test_a_refused_update_changes_nothing,
    ],
)
def test_broadcasts_reach_every_worker(
    check: Callable[..., None], split_vllm: VLLMEngine, wide_model_dir: Path, broadcast: KeptOpen
) -> None:
    """The sender and the workers are separate processes, and a tensor spans several buckets."""
    suite = UpdateChecks()
    suite.transport = lambda: broadcast  # type: ignore[assignment]
    check(suite, split_vllm, wide_model_dir)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks(SenderOptions(bucket_bytes=10_000, deadline_s=60.0))
    yield ranks
    ranks.end()


@pytest.mark.parametrize(
    "check",
    [UpdateChecks.test_an_update_replaces_what_is_served, UpdateChecks.test_a_refused_update_changes_nothing],
)
def test_rectangles_of_every_rank_reach_every_worker(
    check: Callable[..., None], split_vllm: VLLMEngine, wide_model_dir: Path, two_ranks: TwoRanks
) -> None:
    suite = UpdateChecks()
    suite.transport = lambda: two_ranks  # type: ignore[assignment]
    check(suite, split_vllm, wide_model_dir)


@pytest.mark.parametrize("kind", ["embed_tokens", "q_proj", "down_proj"])
def test_a_rectangle_in_a_wrong_place_is_named(
    kind: str, split_vllm: VLLMEngine, wide_model_dir: Path, two_ranks: TwoRanks
) -> None:
    """Each rank holds half of the tensor, and each half is written where the other belongs."""
    tensors = load_file(wide_model_dir / "model.safetensors")
    name = next(name for name in tensors if kind in name)
    update = two_ranks.pack(tensors, version=14, tied=TIED_HEAD)
    of_tensor = [one for source in update.sources for one in source.rectangles if one.name == name]
    places = dict(zip(of_tensor, reversed([one.offsets for one in of_tensor]), strict=True))
    wrong = [
        replace(source, rectangles=[one._replace(offsets=places.get(one, one.offsets)) for one in source.rectangles])
        for source in update.sources
    ]
    receipt = asyncio.run(split_vllm.update_weights(replace(update, location=FromSenders(sources=wrong))))
    with pytest.raises(WeightProofError, match="was changed in transit") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == name
    restored = two_ranks.pack(tensors, version=0, tied=TIED_HEAD)
    check_receipt(restored, asyncio.run(split_vllm.update_weights(restored)), tolerances=ProofTolerances())


def test_weights_that_one_rank_has_withdrawn_are_refused(
    split_vllm: VLLMEngine, wide_model_dir: Path, two_ranks: TwoRanks
) -> None:
    update = two_ranks.pack(load_file(wide_model_dir / "model.safetensors"), version=0, tied=TIED_HEAD)
    two_ranks.senders[1].withdraw()
    before = generate(split_vllm, seed=4)[0]
    with refuses("rank 1 of the learner: weights of version 0 were requested; the sender has none"):
        asyncio.run(split_vllm.update_weights(update))
    assert generate(split_vllm, seed=4)[0].token_ids.tolist() == before.token_ids.tolist()


def test_adapters_reach_every_worker(split_vllm: VLLMEngine, wide_model_dir: Path, broadcast: KeptOpen) -> None:
    """Each worker holds a part of A or B; updates come from memory, through a file, and by broadcast."""
    suite = AdapterConformance()
    suite.test_the_base_is_served_beside_its_adapter(split_vllm, wide_model_dir)
    suite.transport = lambda: broadcast  # type: ignore[assignment]
    suite.test_each_adapter_replaces_the_last_on_the_same_base(split_vllm, wide_model_dir)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"])
def test_an_adapters_part_that_differs_on_one_rank_is_named(
    kind: str, rank: int, split_vllm: VLLMEngine, wide_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_file(wide_model_dir / "model.safetensors")
    adapter = make_adapter(base, rank=2, seed=1)
    told = AdapterUpdate(rank=2, base=digest_tensors(base))
    name = next(name for name in adapter if kind in name and name.endswith(LORA_A if rank else LORA_B))
    before_probing(split_vllm, flip_a_bit(rank, name), monkeypatch)
    update = TensorTransport().pack(adapter, version=3, tied=TIED_HEAD, adapter=told)
    receipt = asyncio.run(split_vllm.update_weights(update))
    with pytest.raises(WeightProofError, match="it was read back with different bits") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == name
    monkeypatch.undo()
    restored = packed(base, version=0)
    check_receipt(restored, asyncio.run(split_vllm.update_weights(restored)), tolerances=ProofTolerances())


def test_a_byte_that_changes_on_its_way_to_the_workers_is_found(
    split_vllm: VLLMEngine, wide_model_dir: Path, broadcast: KeptOpen
) -> None:
    tensors = load_file(wide_model_dir / "model.safetensors")
    update = broadcast.pack(tensors, version=11, tied=TIED_HEAD)
    assert broadcast._offer is not None
    sent = {held.rectangle.name: held.read() for held in broadcast._offer.held}
    sent["model.norm.weight"][5] += 1e-3
    receipt = asyncio.run(split_vllm.update_weights(update))
    with pytest.raises(WeightProofError, match=r"model\.norm\.weight"):
        check_receipt(update, receipt, tolerances=ProofTolerances())


def test_a_broadcast_of_weights_that_are_gone_is_refused(
    split_vllm: VLLMEngine, wide_model_dir: Path, broadcast: KeptOpen
) -> None:
    tensors = load_file(wide_model_dir / "model.safetensors")
    old = broadcast.pack(tensors, version=12, tied=TIED_HEAD)
    new = broadcast.pack(tensors, version=0, tied=TIED_HEAD)
    with refuses("of version 12 were requested; the sender has version 0"):
        asyncio.run(split_vllm.update_weights(old))
    check_receipt(new, asyncio.run(split_vllm.update_weights(new)), tolerances=ProofTolerances())


def test_seeds_give_the_tokens_of_one_process(split_vllm: VLLMEngine, tokens_of_one_process: list[list[int]]) -> None:
    assert drawn(split_vllm) == tokens_of_one_process


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_part_that_stays_stale_on_one_rank_is_named(
    name: str,
    rank: int,
    split_vllm: VLLMEngine,
    wide_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = load_file(wide_model_dir / "model.safetensors")
    new = perturbed(old, scale=0.05)
    save_file({**new, name: old[name]}, tmp_path / "stale.safetensors")
    before_probing(split_vllm, keep_stale(rank, tmp_path / "stale.safetensors"), monkeypatch)
    update = packed(new, version=7)
    receipt = asyncio.run(split_vllm.update_weights(update))
    with pytest.raises(WeightProofError, match="the engine serves something else") as raised:
        check_receipt(update, receipt, tolerances=ProofTolerances())
    assert raised.value.tensor == name
    monkeypatch.undo()
    receipt = asyncio.run(split_vllm.update_weights(packed(old, version=0)))
    check_receipt(packed(old, version=0), receipt, tolerances=ProofTolerances())


def test_nothing_that_workers_share_has_a_name(split_vllm: VLLMEngine) -> None:
    assert len(workers_of(os.getpid())) == 2
    for pid in workers_of(os.getpid()):
        named = [path for path in shared_memory_of(pid) if not path.endswith("(deleted)")]
        assert shared_memory_of(pid)
        assert named == []


def test_what_its_processes_listen_on_is_documented(split_vllm: VLLMEngine) -> None:
    pids = [os.getpid(), *workers_of(os.getpid())]
    assert listening_sockets(pids)
    assert undocumented(pids, played={os.getpid(): "child vllm engine[0]"}) == []


def test_a_killed_worker_fails_who_waits_and_ends_the_others(split_vllm: VLLMEngine) -> None:
    """Runs after all other tests of the module's engine, which it ends."""
    workers = workers_of(os.getpid())
    request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=100, seed=0), num_samples=64)

    async def kill_one() -> None:
        running = asyncio.ensure_future(split_vllm.generate(request))
        await split_vllm.generate(GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
        os.kill(workers[1], 9)
        async with asyncio.timeout(GONE_WITHIN_S):
            await running

    with pytest.raises(EngineDiedError):
        asyncio.run(kill_one())
    with pytest.raises(EngineDiedError):
        generate(split_vllm)
    assert is_soon(lambda: not any(map(is_running, workers)))


def test_a_killed_engine_leaves_no_worker(wide_model_dir: Path) -> None:
    host = EnginePlacement(environment={"OMP_NUM_THREADS": "1"}, deadline_s=300)
    engine = ProcessEngine("vllm", wide_model_dir, VLLMOptions(tensor_parallel_size=2, **SMALL), host=host)
    asyncio.run(killed_under_load(engine))


async def killed_under_load(engine: ProcessEngine) -> None:
    await engine.start()
    try:
        family = [pid for pid, _ in descendants(engine.pid)]
        assert len(workers_of(engine.pid)) == 2
        first = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=2))
        request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=100, seed=0), num_samples=512)
        begun, running = (asyncio.ensure_future(engine.generate(one)) for one in (first, request))
        await begun  # most samples of the other, 8 times max_num_seqs, are left
        os.kill(engine.pid, 9)
        with pytest.raises(EngineDiedError):
            await running
        assert is_soon(lambda: not any(map(is_running, family)))
    finally:
        await engine.close()


def drawn(engine: VLLMEngine) -> list[list[int]]:
    samples = generate(engine, num_samples=16, max_tokens=24, seed=3)
    return [sample.token_ids.tolist() for sample in samples]


def packed(tensors: Mapping[str, torch.Tensor], *, version: int) -> WeightUpdate:
    return TensorTransport().pack(tensors, version=version, tied=TIED_HEAD)


def keep_stale(rank: int, file: Path) -> Callable[[Any], None]:
    """Return a function that loads a file into the worker of one rank."""

    def load(worker: Any) -> None:
        if worker.worker.rank == rank:
            worker.replace_all_weights(file, ["lm_head.weight"])

    return load


def flip_a_bit(rank: int, name: str) -> Callable[[Any], None]:
    """Return a function that flips a bit of one element of an adapter's tensor in the worker of one rank."""

    @torch.inference_mode()
    def flip(worker: Any) -> None:
        if worker.worker.rank == rank:
            part = worker.worker._adapter_slots._parts[module_of(name)]
            part.slots()[name.endswith(LORA_B)][0].view(torch.int32)[1, 1] ^= 1

    return flip


def before_probing(engine: VLLMEngine, act: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine._stepper._core  # type: ignore[union-attr] # vLLM's stepper
    ask = core.collective_rpc

    def ask_after(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "probe_live_weights":
            ask(act)
        return ask(method, *args, **kwargs)

    monkeypatch.setattr(core, "collective_rpc", ask_after)


def workers_of(pid: int) -> list[int]:
    """Return the vLLM workers of a process, without Python's helper processes."""
    children = sorted(child for child, _ in descendants(pid) if is_running(child))
    return [
        child
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        or b"VLLM::Worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def shared_memory_of(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]


def is_soon(holds: Callable[[], bool]) -> bool:
    """Wait up to GONE_WITHIN_S for a condition; return whether it holds."""
    ends_at = time.monotonic() + GONE_WITHIN_S
    while not holds():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.05)
    return True
