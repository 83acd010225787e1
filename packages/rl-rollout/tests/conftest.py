"""Fixtures of the engines' tests: tiny models, and one vLLM engine per module."""

import asyncio
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions


class ProcessState(NamedTuple):
    """Process-wide state that vLLM could change."""

    num_threads: int
    set_num_threads: Any
    torch_state: list[int]
    numpy_state: list[int]
    python_state: Any
    children: int

    @classmethod
    def now(cls) -> "ProcessState":
        import torch  # late, so that tests without engines start fast

        return cls(
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            len(multiprocessing.active_children()),
        )


class StartedEngine(NamedTuple):
    """The vLLM engine, and the state of its process just before and after the start."""

    engine: VLLMEngine
    before: ProcessState
    after: ProcessState


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl_rollout.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rl_rollout.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("untied"), is_tied=False)


@pytest.fixture(scope="module")
def learner_process_group() -> Iterator[None]:
    """Initialize torch.distributed, as a learner in the same process does before the engine starts."""
    import torch.distributed as dist

    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    assert dist.is_initialized(), "closing the engine destroyed the learner's process group"
    if is_ours:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def started_vllm(tied_model_dir: Path, learner_process_group: None) -> Iterator[StartedEngine]:
    """Start one vLLM engine per module, as a process can hold only one; each test leaves it serving tied_model_dir."""
    options = VLLMOptions(
        max_model_len=128,
        max_num_seqs=64,
        max_num_batched_tokens=192,  # long prompts are computed in pieces
        kv_cache_gib=0.002,  # 65 blocks of 32 tokens: 64 samples fit only while they are short
    )
    engine = VLLMEngine(tied_model_dir, options)
    before = ProcessState.now()
    asyncio.run(engine.start())
    yield StartedEngine(engine, before, ProcessState.now())
    asyncio.run(engine.close())
    asyncio.run(engine.close())


@pytest.fixture
def vllm_engine(started_vllm: StartedEngine) -> VLLMEngine:
    return started_vllm.engine
