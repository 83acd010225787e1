"""Export of the policy's weights as views, with one transfer for the proof."""

from pathlib import Path

import pytest
import torch

from rl_core.weights import SharedFileTransport, TensorTransport, WeightTransport
from rl_distill.learners import Learners
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.options import LearnerOptions


@pytest.mark.parametrize(("steps_on", "leaves"), [(False, False), (True, False), (False, True)])
def test_weights_that_are_handed_over_leave_the_device_in_no_copy(
    steps_on: bool, leaves: bool, tied_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MegatronLearner(tied_policy, LearnerOptions())
    learners = Learners(policy=policy, reference=None, critic=None, close=policy.close)
    monkeypatch.setattr("rl_core.weights.digests._own_kind", lambda tensor: "sums")
    transfers = count_transfers(monkeypatch)
    own = policy.export_weights()["model.norm.weight"].data_ptr()
    assert not transfers

    update = learners.pack(TensorTransport(), version=1, steps_on=steps_on, leaves=leaves)

    assert len(transfers) == 1 + leaves * len(update.location.tensors)
    assert (update.location.tensors["model.norm.weight"].data_ptr() == own) == (not steps_on)
    learners.close()


def test_a_file_takes_each_tensor_to_the_host_once(
    tied_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MegatronLearner(tied_policy, LearnerOptions())
    learners = Learners(policy=policy, reference=None, critic=None, close=policy.close)
    transport: WeightTransport = SharedFileTransport(tmp_path)
    monkeypatch.setattr("rl_core.weights.digests.tensor_crc32c", lambda tensor: 0)  # it calls `cpu` on host copies
    transfers = count_transfers(monkeypatch)
    update = learners.pack(transport, version=1)
    assert len(transfers) == len(update.digests) + 1  # plus one for the probes
    assert {digest.kind for digest in update.digests.values()} == {"crc32c"}
    transport.close()
    learners.close()


def count_transfers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Record the shapes of tensors that `Tensor.cpu` copies from now on."""
    moved: list[torch.Size] = []
    to_cpu = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.shape)
        return to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return moved
