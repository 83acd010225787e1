"""The transformers engine with several adapters at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_slots import (
    RANK,
    Clients,
    SlotConformance,
    Tensors,
    check_a_failed_slot_leaves_the_others,
)

from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.engines.transformers_adapters import ModelAdapters
from rl_rollout.engines.transformers_stepper import TransformersStepper
from rl_rollout.testing import AdapterConformance
from rl_rollout.testing.update_checks import SEQUENCE


@pytest.fixture(scope="module")
def engine(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(
        tied_model_dir, TransformersOptions(max_model_len=128, max_lora_rank=RANK, max_adapters=2)
    )
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def clients(engine: TransformersEngine, tied_model_dir: Path, tmp_path: Path) -> Iterator[Clients]:
    clients = Clients(engine, tied_model_dir, tmp_path)
    yield clients
    asyncio.run(clients.drop_all())


class TestTwoSlots(SlotConformance):
    """With as many adapters as slots."""


class TestTransformersSlots(AdapterConformance):
    """With slots to spare."""

    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir


def test_a_failed_slot_leaves_the_others(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = ModelAdapters.replace

    @contextmanager
    def broken(break_it: object) -> Iterator[None]:
        def replace_wrongly(self: ModelAdapters, name: str, tensors: Tensors) -> None:
            replace(self, name, tensors)
            with torch.inference_mode(mode=False):
                break_it(self, name, next(iter(tensors)))  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(ModelAdapters, "replace", replace_wrongly)
            yield

    def flip(adapters: ModelAdapters, name: str, key: str) -> None:
        live = adapters._live(name, key)
        assert live is not None
        live.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    faults = [(broken(flip), "read back with different bits")]
    asyncio.run(check_a_failed_slot_leaves_the_others(clients, faults))


def test_a_damaged_adapter_is_restored_by_the_update_of_another(clients: Clients, engine: TransformersEngine) -> None:
    stepper = engine._stepper
    assert isinstance(stepper, TransformersStepper)
    assert stepper._adapters is not None

    async def logprobs() -> np.ndarray:
        return (await engine.score([SEQUENCE], adapter="b"))[0].token_logprobs

    asyncio.run(clients.publish("a", version=1))
    asyncio.run(clients.publish("b", version=2))
    before = asyncio.run(logprobs())
    for key in clients.adapter("b"):
        live = stepper._adapters._live("b", key)
        assert live is not None
        live.data.mul_(2)
    assert np.abs(asyncio.run(logprobs()) - before).max() > 1e-3
    asyncio.run(clients.publish("a", version=3, seed=1))
    np.testing.assert_array_equal(asyncio.run(logprobs()), before)
