"""Weight broadcasts: buckets, order, and receivers that are late, die or request expired updates."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from offered_weights import OfferedTo

from rl_core.errors import DeadlineError, NotReadyError, SettingsError, TransferError, WeightsGoneError
from rl_core.weights.broadcast import BroadcastTransport, ReceivePlan, SourceGroups
from rl_core.weights.broadcast_group import BroadcastGroup
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.secret_sockets import hang_up
from rl_core.weights.update import Broadcast, FromSenders, WeightSource, WeightUpdate

CPU = torch.device("cpu")
TENSORS = {
    "large": torch.arange(100, dtype=torch.float32).reshape(20, 5),  # 400 bytes span four buckets of 128
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.linspace(-1, 1, 9).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "one": torch.tensor([4.0]),
}
NUM_BYTES = 400 + 7 + 18 + 0 + 24 + 4


@pytest.fixture
def transport() -> Iterator[BroadcastTransport]:
    transport = BroadcastTransport(bucket_bytes=128, deadline_s=60.0)
    yield transport
    transport.close()


@pytest.fixture(autouse=True)
def closed_receivers() -> Iterator[None]:
    yield
    while Receiver.made:
        Receiver.made.pop().close()


def sent_by(meeting: Broadcast, *, version: int) -> WeightUpdate:
    """Return an update without tensors from this sender."""
    source = WeightSource(sender="the sender of weights", meeting=meeting, rectangles=[])
    return WeightUpdate(version=version, digests={}, location=FromSenders(sources=[source]))


def is_soon(holds: Callable[[], bool]) -> bool:
    """Wait up to a minute for a condition; return whether it holds."""
    ends_at = time.monotonic() + 60
    while not holds():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


class Receiver(OfferedTo):
    """An engine with one worker, in this process."""

    made: ClassVar[list[OfferedTo]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def take(self, update: WeightUpdate) -> dict[str, torch.Tensor]:  # type: ignore[override]
        (found,) = super().take(update)
        return found


def assert_arrived(found: dict[str, torch.Tensor], update: WeightUpdate) -> None:
    assert list(found) == list(update.digests)
    for name, tensor in found.items():
        assert (tuple(tensor.shape), tensor_checksum(tensor)) == (
            update.digests[name].shape,
            update.digests[name].checksum,
        )


@pytest.mark.parametrize("bucket_bytes", [1, 3, 128, NUM_BYTES - 1, NUM_BYTES, NUM_BYTES + 1, 2**20])
def test_tensors_arrive_bit_for_bit_whatever_the_buckets(bucket_bytes: int) -> None:
    transport = BroadcastTransport(bucket_bytes=bucket_bytes, deadline_s=60.0)
    update = transport.pack(TENSORS, version=3, tied={})
    assert update.is_sent
    assert_arrived(Receiver().take(update), update)
    transport.close()


def test_buckets_are_full_but_for_the_last(transport: BroadcastTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, list[int]] = {}
    broadcast = BroadcastGroup._broadcast

    def record(self: BroadcastGroup, values: torch.Tensor) -> None:
        sizes.setdefault(threading.current_thread().name, []).append(len(values))
        broadcast(self, values)

    monkeypatch.setattr(BroadcastGroup, "_broadcast", record)
    Receiver().take(transport.pack(TENSORS, version=1, tied={}))
    transport.close()
    assert list(sizes.values()) == [[128, 128, 128, 69]] * 2


def test_one_group_serves_every_update(transport: BroadcastTransport) -> None:
    receiver = Receiver()
    for version in range(3):
        update = transport.pack({"a": torch.full((50,), float(version))}, version=version, tied={})
        assert receiver.take(update)["a"].tolist() == [version] * 50


def test_engines_take_an_update_side_by_side_and_late(transport: BroadcastTransport) -> None:
    weight = torch.ones(1000)
    update = transport.pack({"a": weight}, version=1, tied={})
    found: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(Receiver().take(update))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weight.fill_(2)  # the learner's next step changes the weights
    found.append(Receiver().take(update))
    assert [tensors["a"].sum().item() for tensors in found] == [1000.0] * 4


def test_a_version_that_is_gone_is_refused_and_the_next_one_arrives(transport: BroadcastTransport) -> None:
    receiver = Receiver()
    old = transport.pack({"a": torch.ones(3)}, version=1, tied={})
    receiver.take(old)
    new = transport.pack({"a": torch.full((3,), 2.0)}, version=2, tied={})
    with pytest.raises(WeightsGoneError, match="of version 1 were requested; the sender has version 2"):
        receiver.take(old)
    for _ in range(2):  # twice, as after a failed proof
        assert receiver.take(new)["a"].tolist() == [2.0, 2.0, 2.0]


def test_a_closed_transport_serves_nobody() -> None:
    transport = BroadcastTransport(deadline_s=1.0)
    update = transport.pack({"a": torch.ones(3)}, version=1, tied={})
    transport.close()
    transport.close()
    with pytest.raises(NotReadyError, match="closed"):
        transport.pack({"a": torch.ones(3)}, version=2, tied={})
    with pytest.raises(WeightsGoneError, match=r"cannot be reached|no answer"):
        Receiver().take(update)


def test_nobody_at_the_address_is_said_so() -> None:
    nowhere = Broadcast(backend="tcp", host="127.0.0.1", port=1, secret="00", bucket_bytes=8, deadline_s=1.0)
    with pytest.raises(WeightsGoneError, match=r"cannot be reached at 127\.0\.0\.1:1"):
        Receiver().take(sent_by(nowhere, version=1))


def test_an_engine_whose_workers_do_not_come_is_given_up(transport: BroadcastTransport) -> None:
    impatient = BroadcastTransport(bucket_bytes=128, deadline_s=1.5)
    update = impatient.pack(TENSORS, version=1, tied={})
    lonely = threading.Thread(target=first_of_two, args=(update,))
    lonely.start()
    assert_arrived(Receiver().take(update), update)  # the sender serves another engine in the meantime
    lonely.join()
    assert is_soon(lambda: not impatient._joining)
    started = time.monotonic()
    impatient.close()
    assert time.monotonic() - started < 60


def first_of_two(update: WeightUpdate) -> None:
    """Join as one worker of an engine whose other worker does not come."""
    group = SourceGroups(rank=1, num_workers=2, device=CPU)
    assert group.ask(ReceivePlan(update=update, group="half")) is not None


RECEIVER_PROGRAM = """
import pickle, sys, torch
from rl_core.weights.broadcast import SourceGroups, WeightSources
from rl_core.weights.digests import tensor_checksum

stops, update = sys.argv[1] == "stops", pickle.loads(bytes.fromhex(sys.argv[2]))
groups = SourceGroups(rank=1, num_workers=1, device=torch.device("cpu"))
plan = WeightSources(lambda plan: [groups.ask(plan)]).announce(update)
for name, tensor in groups.receive(plan):
    print(name, tensor_checksum(tensor), flush=True)
    if stops:
        sys.stdin.read()
"""


def receiver_process(update: WeightUpdate, *, stops: bool) -> "subprocess.Popen[str]":
    bare = {name: dataclasses.replace(digest, probe=np.zeros(0)) for name, digest in update.digests.items()}
    words = ["stops" if stops else "goes on", pickle.dumps(dataclasses.replace(update, digests=bare)).hex()]
    return subprocess.Popen(
        [sys.executable, "-c", RECEIVER_PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_another_process_receives_the_same_bytes(transport: BroadcastTransport) -> None:
    update = transport.pack(TENSORS, version=5, tied={})
    output, _ = receiver_process(update, stops=False).communicate(timeout=60)
    expected = [f"{name} {digest.checksum}" for name, digest in update.digests.items()]
    assert output.splitlines() == expected


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_ends_midway_is_given_up_and_disturbs_no_other(ending: signal.Signals) -> None:
    transport = BroadcastTransport(bucket_bytes=2**20, deadline_s=3.0)
    large = {f"layer {index}": torch.full((4 * 2**20,), float(index)) for index in range(8)}  # 16 MiB each
    update = transport.pack(large, version=1, tied={})
    process = receiver_process(update, stops=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("layer 0 ")
        os.kill(process.pid, ending)
        other = Receiver()
        assert_arrived(other.take(update), update)
        started = time.monotonic()
        transport.pack({"a": torch.ones(3)}, version=2, tied={})  # waits for receivers of the last update
        assert time.monotonic() - started < 60
        assert is_soon(lambda: transport._groups == {other.sources._group})
    finally:
        process.kill()
        process.communicate()
        transport.close()


def test_a_sender_that_ends_midway_is_noticed(transport: BroadcastTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    update = transport.pack({"a": torch.ones(1000)}, version=1, tied={})

    def fail(self: BroadcastGroup, tensors: object) -> None:
        self.close()
        raise TransferError("pulled the plug")

    monkeypatch.setattr(BroadcastGroup, "send", fail)
    with pytest.raises((TransferError, DeadlineError), match="broadcast group"):
        Receiver().take(update)


def test_an_engine_that_the_sender_gave_up_meets_it_anew(transport: BroadcastTransport) -> None:
    receiver = Receiver()
    update = transport.pack(TENSORS, version=1, tied={})
    receiver.take(update)
    (connection,) = transport._serving.values()
    hang_up(connection)
    assert_arrived(receiver.take(update), update)


def test_a_worker_on_a_cpu_says_why_nccl_does_not_reach_it(transport: BroadcastTransport) -> None:
    update = transport.pack({"a": torch.ones(1)}, version=1, tied={})
    by_nccl = dataclasses.replace(update.sources[0].meeting, backend="nccl")
    with pytest.raises(TransferError, match=r"by NCCL, but this member .* is on a CPU"):
        BroadcastGroup(by_nccl, "a group", [], rank=1, size=2, device=CPU)


def test_a_meeting_is_plain_values(transport: BroadcastTransport) -> None:
    meeting = transport.pack({"a": torch.ones(1)}, version=1, tied={}).sources[0].meeting
    assert Broadcast(**json.loads(json.dumps(dataclasses.asdict(meeting)))) == meeting


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r'but torch finds none. Set weights.transport = "tcp" or "file"'):
        BroadcastTransport(backend="nccl")
