"""Tiny policies and batches for the tests of learners."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cpu_kernels import install_uncompiled_kernels
from megatron.core import parallel_state, tensor_parallel
from rearranged_ranks import RearrangedRanks
from tiny_policies import FAMILIES, VOCAB_SIZE, write_policy

from rl_core.cluster import ClusterOptions
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged, offsets_of
from rl_core.data.row_keys import RowKey
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import ParallelOptions


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False, num_key_value_heads=4)


@pytest.fixture(scope="session", params=list(FAMILIES))
def family_policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy of each architecture."""
    return write_policy(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def mixture_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of four experts, two per token."""
    return write_policy(tmp_path_factory.mktemp("mixture"), "Qwen3MoeForCausalLM")


@pytest.fixture(scope="session")
def policy_writer() -> Callable[..., Path]:
    return write_policy


@pytest.fixture(scope="session")
def one_rank() -> None:
    """Create megatron's groups for this process alone."""
    install_cpu_compatibility()
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"  # like learners in the same process
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
        tensor_parallel.model_parallel_cuda_manual_seed(0)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """Return a function that makes rows of random tokens with two prompt tokens each and alternating advantages.

    With num_prompts, the rows belong to that many prompts. Rows of one prompt share beginnings of different lengths, so
    they form a tree.
    """

    def make(lengths: Sequence[int], *, seed: int = 0, num_prompts: int | None = None) -> Batch:
        random = np.random.default_rng(seed)
        offsets = offsets_of(lengths)
        total = int(offsets[-1])
        positions = np.arange(total) - np.repeat(offsets[:-1], lengths)
        mask = positions >= 2
        signs = np.repeat(np.where(np.arange(len(lengths)) % 2, 1.0, -0.5), lengths)
        values = {
            "input_ids": random.integers(0, VOCAB_SIZE, total).astype(np.int32),
            "loss_mask": mask,
            "loss_weights": (mask / max(mask.sum(), 1)).astype(np.float32),
            "advantages": (signs * mask).astype(np.float32),
        }
        keys = [RowKey(f"prompt{i}", 0, 0) for i in range(len(lengths))]
        if num_prompts is not None:
            keys = [RowKey(f"prompt{i % num_prompts}", i // num_prompts, 0) for i in range(len(lengths))]
            for row in range(num_prompts, len(lengths)):
                start, before = offsets[row], offsets[row - num_prompts]
                alike = int(random.integers(0, min(lengths[row], lengths[row - num_prompts]) + 1))
                values["input_ids"][start : start + alike] = values["input_ids"][before : before + alike]
        return Batch(keys, {name: Ragged(column, offsets) for name, column in values.items()})

    return make


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run the fused passes uncompiled; test_megatron_compiled.py traces and compiles them."""
    with torch.compiler.set_stance("force_eager"):
        yield


class _Installation:
    """Installs the CPU kernels of flash attention when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install_uncompiled_kernels, ()


class Started:
    """Ranks that all tests share; restarted if a test ended them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: RearrangedRanks | None = None

    def in_layout(self, parallel: ParallelOptions) -> LearnerRanks:
        if self._ranks is None or not self._ranks.is_alive:
            self._ranks = RearrangedRanks(
                ParallelOptions(ranks=self._num_ranks),
                cluster=ClusterOptions(kind="process"),
                num_threads=1,
                deadline_s=120.0,
                call_deadline_s=180.0,
            )
        self._ranks.rearrange(parallel)
        return self._ranks

    def with_cpu_kernels(self, parallel: ParallelOptions) -> LearnerRanks:
        ranks = self.in_layout(parallel)
        ranks.call_all(RankHost.drop, _Installation())
        return ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Started]:
    ranks = Started(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Started]:
    ranks = Started(4)
    yield ranks
    ranks.close()
