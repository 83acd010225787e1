"""Storages leave the device and return, also for views; an optimizer with offloaded state takes the same steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.data.batch import Batch
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.megatron.optimizer import Offloaded
from rl_distill.megatron.rank_model import RankModel
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, ParallelOptions

STEPS = 3
OPTIONS = LearnerOptions(learning_rate=1e-2, weight_decay=0.1, micro_batch_tokens=64, num_threads=1)


def test_what_is_kept_comes_back_and_what_is_dropped_is_zeros():
    kept, dropped = torch.arange(6.0), torch.ones(4)
    view = kept.view(2, 3)[1]

    offloaded = Offloaded([kept, view], [dropped])

    assert offloaded.num_bytes == 24 + 16
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert dropped.tolist() == [0.0] * 4


def test_a_storage_that_is_kept_is_not_dropped():
    tensor = torch.ones(3)

    offloaded = Offloaded([tensor], [tensor])
    offloaded.restore()

    assert tensor.tolist() == [1.0, 1.0, 1.0]


def keep_on_host(learner: MegatronLearner) -> None:
    """Keep the optimizer's state on the host, as the option does on a GPU."""
    learner._ranks.call_all(RankHost.run, learner._name, "keep_optimizer_on_host", (), {})


def check_same_as_plain(policy: Path, options: LearnerOptions, ranks: Any, batch: Batch, folder: Path) -> None:
    plain, hosted, resumed = (MegatronLearner(policy, options, ranks=ranks, name=name) for name in ("a", "b", "c"))
    for learner in (hosted, resumed):
        keep_on_host(learner)
    for step in range(STEPS):
        assert hosted.train_step(batch, supervised_objective) == plain.train_step(batch, supervised_objective)
        assert hosted.offload() == plain.offload()
        if step == 0:
            hosted.save(folder)
            plain.load(folder)
    expected = plain.export_weights()
    for name, tensor in hosted.export_weights().items():
        assert torch.equal(tensor, expected[name])
    resumed.load(folder)
    for _ in range(STEPS - 1):
        last = resumed.train_step(batch, supervised_objective)
    assert last.step == STEPS
    for name, tensor in resumed.export_weights().items():
        assert torch.equal(tensor, expected[name])
    for learner in (plain, hosted, resumed):
        learner.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_on_the_host_takes_the_same_steps(
    dtype: str, tied_policy: Path, make_batch: Callable[..., Batch], tmp_path: Path
):
    ranks = LearnerRanks(ParallelOptions())
    check_same_as_plain(tied_policy, replace(OPTIONS, dtype=dtype), ranks, make_batch((9, 14, 6)), tmp_path / "saved")


def test_ranks_that_share_an_optimizer_can_have_it_on_their_hosts(
    two_ranks: Any, tied_policy: Path, make_batch: Callable[..., Batch], tmp_path: Path
):
    ranks = two_ranks.in_layout(ParallelOptions(ranks=2, distributed_optimizer=True))
    options = replace(OPTIONS, dtype="bfloat16", overlap_grad_reduce=True, overlap_param_gather=True)
    check_same_as_plain(tied_policy, options, ranks, make_batch((9, 14, 6, 11)), tmp_path / "saved")


@pytest.mark.usefixtures("one_rank")
def test_between_steps_nothing_of_the_optimizer_is_on_the_device(tied_policy: Path, make_batch: Callable[..., Batch]):
    learner = MegatronLearner(tied_policy, replace(OPTIONS, dtype="bfloat16", offload_optimizer=True))
    model: RankModel = learner._ranks._host._models["policy"]  # type: ignore[union-attr]
    adam = model.tensors.adam

    def on_device() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in adam.tensors())

    assert on_device() == 4 * learner.num_parameters  # on a CPU, the option has no effect
    keep_on_host(learner)
    assert on_device() == 0
    learner.train_step(make_batch((9, 14)), supervised_objective)
    assert on_device() == 0
    with adam.on_device():
        assert on_device() == 12 * learner.num_parameters
    assert on_device() == 0
    learner.close()
