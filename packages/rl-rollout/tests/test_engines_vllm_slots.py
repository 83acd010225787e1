"""vLLM with several adapters at once."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_slots import (
    RANK,
    Clients,
    SlotConformance,
    check_a_failed_slot_leaves_the_others,
)
from vllm_adapter_faults import manager_of

from rl_core.errors import EngineError
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.testing import AdapterConformance, refuses

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def engine(tied_model_dir: Path, learner_process_group: None) -> Iterator[VLLMEngine]:
    options = VLLMOptions(
        max_model_len=128,
        max_num_seqs=64,
        max_num_batched_tokens=192,
        kv_cache_gib=0.008,
        max_lora_rank=RANK,
        max_adapters=2,
    )
    engine = VLLMEngine(tied_model_dir, options)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def clients(engine: VLLMEngine, tied_model_dir: Path, tmp_path: Path) -> Iterator[Clients]:
    clients = Clients(engine, tied_model_dir, tmp_path)
    yield clients
    asyncio.run(clients.drop_all())


class TestTwoSlots(SlotConformance):
    """With as many adapters as slots."""


class TestVLLMSlots(AdapterConformance):
    """With slots to spare."""

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir


def test_a_failed_slot_leaves_the_others(clients: Clients, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine._stepper._core  # type: ignore[union-attr] # vLLM's stepper
    ask = core.collective_rpc

    @contextmanager
    def broken(after: Callable[[Any], Any], instead: Callable[[Any], Any] | None = None) -> Iterator[None]:
        def ask_wrongly(asked: str, **rest: Any) -> Any:
            answer = ask(instead) if asked == "replace_adapter" and instead is not None else ask(asked, **rest)
            if asked == "replace_adapter":
                ask(torch.inference_mode()(after))
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(core, "collective_rpc", ask_wrongly)
            yield

    def first(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = next(part for name, part in worker.worker._adapter_slots._parts.items() if name.endswith("o_proj"))
        found: tuple[torch.Tensor, torch.Tensor] = part.slots()
        return found

    def flip(worker: Any) -> None:
        first(worker)[0][0].view(torch.int32)[0, 0] ^= 1

    def fill_the_last_slot(worker: Any) -> None:
        first(worker)[0][2].fill_(1.0)

    def evict(worker: Any) -> None:
        manager_of(worker).remove_adapter(1)

    def add_another(worker: Any) -> None:
        manager_of(worker).add_adapter(manager_of(worker).get_adapter(1).clone(3))

    faults = [
        (broken(flip), "read back with different bits"),
        (broken(fill_the_last_slot), "slot 2, which must stay empty, has numbers of"),
        (broken(evict), r"must contain \[1, 2, None\]; found \[None, 2, None\]"),
        (broken(add_another), r"vLLM has the adapters \[1, 2, 3\]"),
    ]
    asyncio.run(check_a_failed_slot_leaves_the_others(clients, faults))


def test_requests_of_a_lost_adapter_fail_alone(clients: Clients, engine: VLLMEngine) -> None:
    core = engine._stepper._core  # type: ignore[union-attr] # vLLM's stepper
    asyncio.run(clients.publish("a", version=1))
    asyncio.run(clients.publish("b", version=2))
    core.collective_rpc(lambda worker: manager_of(worker).remove_adapter(1))

    async def ask() -> list[Any]:
        requests = [clients.request(name, seed=3) for name in ("a", "b", "base", "a")]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    lost, of_b, of_base, lost_too = asyncio.run(ask())
    for error in (lost, lost_too):
        assert isinstance(error, EngineError)
        assert "must contain [1, 2, None]; found [None, 2, None]. Publish the weights again." in str(error)
    clients.check(of_b, "b", 3, {2: 0})
    clients.check(of_base, "base", 3, {0: 0})
    with refuses("Publish the weights again"):
        asyncio.run(engine.generate(clients.request("a", seed=3)))
    asyncio.run(clients.publish("a", version=3))
    clients.check(asyncio.run(engine.generate(clients.request("a", seed=3))), "a", 3, {3: 0})
