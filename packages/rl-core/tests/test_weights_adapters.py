"""Adapter updates: tensors, size in bytes, and proofs for engines with one fault each."""

import asyncio
import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from offered_weights import OfferedTo
from rounding import rounding_bound
from safetensors.torch import load_file

from rl_core.data import IntArray
from rl_core.errors import WeightProofError
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    InProcess,
    ProofTolerances,
    PublishReport,
    SharedFileTransport,
    TensorTransport,
    TokenScores,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    digest_tensors,
    probe_tensor,
    probe_vector,
    publish_weights,
    tensor_checksum,
)
from rl_core.weights.broadcast import BroadcastTransport

TIED = {"lm_head.weight": "embed.weight"}
A, B = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"


def base(*, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator) for name in ("embed.weight", "q_proj.weight")}


def adapter(*, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {A: torch.randn(2, 4, generator=generator), B: torch.randn(6, 2, generator=generator)}


def packed(transport: WeightTransport, *, version: int = 5, base_seed: int = 0) -> WeightUpdate:
    told = AdapterUpdate(rank=2, base=digest_tensors(base(seed=base_seed)))
    return transport.pack(adapter(), version=version, tied=TIED, adapter=told)


class FakeEngine:
    """An engine with a matrix, its adapter's A and B, and an output head tied to the embedding."""

    def __init__(self) -> None:
        self.live = {**base(), "lm_head.weight": base()["embed.weight"]}
        self.version = 0
        self.problems: tuple[str, ...] = ()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.live |= {name: tensor.clone() for name, tensor in update.location.tensors.items()}
        self.version = update.version
        self.corrupt()
        arrived = {name: tensor_checksum(tensor) for name, tensor in update.location.tensors.items()}
        live = {name: probe_tensor(tensor, name) for name, tensor in self.live.items()}
        return WeightReceipt(version=self.version, arrived=arrived, live=live, problems=self.problems)

    def corrupt(self) -> None:
        """Corrupt the served weights; subclasses define the fault."""

    async def score(self, sequences: Sequence[IntArray], *, with_experts: bool = False) -> list[TokenScores]:
        return [TokenScores(token_ids=one[:, None], logprobs=np.zeros((len(one), 1), np.float32)) for one in sequences]


def publish(engine: FakeEngine, update: WeightUpdate | None = None) -> PublishReport:
    canary = Canary(sequences=[np.array([1, 2], np.int32)], logprobs=[np.zeros(2, np.float32)])
    update = update or packed(TensorTransport())
    return asyncio.run(publish_weights(update, [engine], canary=canary, tolerances=ProofTolerances()))


def test_a_b_is_probed_from_its_other_side() -> None:
    first, second = probe_vector(2).tolist()
    matrix = torch.tensor([[1.0, 0.0, 5.0], [0.0, 2.0, 5.0]])
    assert probe_tensor(matrix, B).tolist() == pytest.approx(
        [first, 2 * second, 5 * (first + second)], abs=rounding_bound(10.0, roundings=3)
    )
    assert probe_tensor(matrix, A).shape == (2,)


def test_a_digest_travels_bit_for_bit() -> None:
    (digest, _) = digest_tensors(base()).values()
    found = pickle.loads(pickle.dumps(digest))
    assert (found.shape, found.dtype, found.checksum) == (digest.shape, digest.dtype, digest.checksum)
    assert (found.probe.dtype, found.probe.tobytes()) == (digest.probe.dtype, digest.probe.tobytes())


def test_tensors_are_handed_over_with_what_they_are() -> None:
    update = packed(TensorTransport())
    assert update.adapter is not None
    assert list(update.digests) == list(update.location.tensors) == [A, B]
    assert update.adapter.rank == 2
    assert set(update.served) == {A, B, *base()}


def test_a_file_holds_the_adapter_alone(tmp_path: Path) -> None:
    transport = SharedFileTransport(tmp_path)
    update = packed(transport)
    arrived = load_file(update.location.file)
    transport.close()
    assert {name: tensor_checksum(tensor) for name, tensor in arrived.items()} == {
        name: digest.checksum for name, digest in update.digests.items()
    }
    assert update.adapter is not None
    assert update.adapter.base.keys() == base().keys()


@pytest.fixture
def broadcast() -> Iterator[BroadcastTransport]:
    transport = BroadcastTransport(bucket_bytes=16)
    yield transport
    transport.close()


def test_an_adapter_is_received_over_the_network(broadcast: BroadcastTransport) -> None:
    update = packed(broadcast)
    engine = OfferedTo()
    (found,) = engine.take(update)
    engine.close()
    assert {name: tensor_checksum(tensor) for name, tensor in found.items()} == {
        name: digest.checksum for name, digest in update.digests.items()
    }
    assert update.adapter is not None


def test_an_update_costs_hardly_more_than_its_a_and_b(tmp_path: Path) -> None:
    """Measure rank 16 on all matrices of a 52M-parameter model: the file plus the pickled message."""
    hidden, ffn = 576, 1536
    matrices = {"q_proj": (576, hidden), "k_proj": (192, hidden), "v_proj": (192, hidden), "o_proj": (hidden, 576)}
    matrices |= {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    whole = {"model.embed_tokens.weight": torch.zeros(4096, hidden), "model.norm.weight": torch.ones(hidden)}
    tensors = {}
    for layer in range(14):
        for name, size in {"input_layernorm": hidden, "post_attention_layernorm": hidden, "q_norm": 64}.items():
            whole[f"model.layers.{layer}.{name}.weight"] = torch.ones(size)
        for name, (rows, columns) in matrices.items():
            module = f"model.layers.{layer}.{'mlp' if ffn in (rows, columns) else 'self_attn'}.{name}"
            whole[f"{module}.weight"] = torch.zeros(rows, columns)
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(16, columns)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(rows, 16)
    transport = SharedFileTransport(tmp_path)
    update = transport.pack(tensors, version=1, tied=TIED, adapter=AdapterUpdate(rank=16, base=digest_tensors(whole)))
    num_bytes = update.location.file.stat().st_size + len(pickle.dumps(update))
    transport.close()
    assert num_bytes <= 1.05 * sum(tensor.nbytes for tensor in tensors.values())


def test_the_fingerprint_is_of_the_base_too() -> None:
    update = packed(TensorTransport())
    assert packed(TensorTransport(), version=6).fingerprint == update.fingerprint
    assert packed(TensorTransport(), base_seed=1).fingerprint != update.fingerprint
    assert TensorTransport().pack(adapter(), version=5, tied=TIED).fingerprint != update.fingerprint


def test_a_right_adapter_is_proven_with_its_base_and_the_head() -> None:
    report = publish(FakeEngine())
    assert (report.version, report.num_tensors, report.probe_max_diff) == (5, 5, 0.0)


@pytest.mark.parametrize("name", ["q_proj.weight", "embed.weight"])
def test_a_changed_base_is_named(name: str) -> None:
    class Changed(FakeEngine):
        def corrupt(self) -> None:
            self.live[name][2, 1] += 0.5

    with pytest.raises(WeightProofError, match="is not the one on which the adapter of version 5") as caught:
        publish(Changed())
    assert caught.value.tensor == name


def test_a_head_that_is_not_the_bases_embedding_is_named() -> None:
    class OtherHead(FakeEngine):
        def corrupt(self) -> None:
            self.live["lm_head.weight"] = self.live["q_proj.weight"]

    with pytest.raises(WeightProofError) as caught:
        publish(OtherHead())
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.parametrize("name", [A, B])
def test_an_adapter_that_is_not_served_is_named(name: str) -> None:
    class Deaf(FakeEngine):
        def corrupt(self) -> None:
            self.live[name] = torch.zeros_like(self.live[name])

    with pytest.raises(WeightProofError, match="serves something else") as caught:
        publish(Deaf())
    assert caught.value.tensor == name


def test_what_the_engine_finds_itself_fails_the_proof() -> None:
    engine = FakeEngine()
    engine.problems = ("q_proj scales its adapter by 2.0.", "the adapter is in slot 1.")
    with pytest.raises(WeightProofError, match=r"for version 5: q_proj scales .* by 2\.0\. the adapter is in slot 1"):
        publish(engine)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [A, B, "q_proj.weight"])
def test_what_is_not_finite_is_not_sent(name: str, value: float) -> None:
    tensors, under, engine = adapter(), base(), FakeEngine()
    (tensors if name in tensors else under)[name][0, 1] = value
    told = AdapterUpdate(rank=2, base=digest_tensors(under))
    update = TensorTransport().pack(tensors, version=5, tied=TIED, adapter=told)
    with pytest.raises(WeightProofError, match="nothing was published") as caught:
        publish(engine, update)
    assert (caught.value.tensor, engine.version) == (name, 0)


def test_a_skipped_version_is_named() -> None:
    class Late(FakeEngine):
        def corrupt(self) -> None:
            self.version = 4

    with pytest.raises(WeightProofError, match="serves version 4; version 5 was published"):
        publish(Late())


def test_a_tensor_that_travelled_wrongly_is_named() -> None:
    update = packed(TensorTransport())
    update.location.tensors[A].view(torch.int32)[1, 2] ^= 1
    with pytest.raises(WeightProofError, match="was changed in transit") as caught:
        publish(FakeEngine(), update)
    assert caught.value.tensor == A
    less = dataclasses.replace(update, location=InProcess(tensors={A: update.location.tensors[A]}))
    with pytest.raises(WeightProofError, match="did not arrive"):
        publish(FakeEngine(), dataclasses.replace(less, digests={B: update.digests[B]}))
