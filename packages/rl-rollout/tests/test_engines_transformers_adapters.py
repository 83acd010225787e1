"""The transformers engine with adapters of peft's: conformance, what it needs, and what is refused."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.testing import AdapterChecks

RANK = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def adapted_engine(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    """Each test leaves it serving tied_model_dir as version 0."""
    engine = TransformersEngine(tied_model_dir, TransformersOptions(max_model_len=128, max_lora_rank=RANK))
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


class TestTransformersAdapters(AdapterChecks):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, adapted_engine: TransformersEngine) -> RolloutEngine:
        return adapted_engine
