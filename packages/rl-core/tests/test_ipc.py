"""Weights in memory shared with another process: the code for GPUs, run on host memory."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.errors import EngineError, NotReadyError, SettingsError, TransferError, WeightsGoneError
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.ipc import ALIGNMENT, HostMemory, IpcTransport, bucket_plan, opened
from rl_core.weights.update import SharedBucket, SharedBuckets, WeightUpdate

TENSORS = {
    "embed.weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "head.weight": torch.arange(600, dtype=torch.float32).reshape(20, 30).T,
    "norm.weight": torch.full((3,), 0.5, dtype=torch.bfloat16),
    "large.weight": torch.randn(40, 25, dtype=torch.float64).to(torch.float16),
}


@pytest.fixture
def transport() -> Iterator[IpcTransport]:
    transport = IpcTransport(bucket_bytes=2048, memory=HostMemory())
    yield transport
    transport.close()


def pack(transport: IpcTransport, *, version: int = 3) -> tuple[WeightUpdate, SharedBuckets]:
    update = transport.pack(TENSORS, version=version, tied={})
    assert isinstance(update.location, SharedBuckets)
    return update, update.location


def test_tensors_lie_side_by_side_and_are_views_of_the_senders_memory(transport: IpcTransport) -> None:
    update, shared = pack(transport)
    with opened(update) as tensors:
        assert list(tensors) == list(TENSORS)
        assert {name: tensor_checksum(tensor) for name, tensor in tensors.items()} == {
            name: digest.checksum for name, digest in update.digests.items()
        }
        with opened(update) as again:
            tensors["norm.weight"].zero_()
            assert again["norm.weight"].count_nonzero() == 0  # the same memory
    assert [bucket.size_bytes for bucket in shared.buckets] == [512, 256 + 2560, 512, 256 + 2048]
    assert TENSORS["norm.weight"].count_nonzero() == 3  # the learner's tensors are unchanged


def test_small_tensors_share_a_bucket_and_a_large_one_has_its_own() -> None:
    transport = IpcTransport(bucket_bytes=10_000, memory=HostMemory())
    update, shared = pack(transport)
    assert len(shared.buckets) == 1
    sizes, places = bucket_plan(update.digests, 3000)
    assert [place.bucket for place in places] == [0, 1, 2, 2]
    assert [place.start for place in places] == [ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
    assert sizes
    assert all(size % ALIGNMENT == 0 for size in sizes)
    transport.close()


PROGRAM = """
import json, sys
import numpy as np
from rl_core.weights.digests import TensorDigest, tensor_checksum
from rl_core.weights.ipc import opened
from rl_core.weights.update import SharedBucket, SharedBuckets, WeightUpdate

shared, version, digests = json.loads(sys.argv[1])
buckets, probe = tuple(SharedBucket(**bucket) for bucket in shared.pop("buckets")), np.zeros(0, np.float32)
digests = {n: TensorDigest(shape=tuple(s), dtype=d, checksum=c, probe=probe) for n, (s, d, c) in digests.items()}
update = WeightUpdate(version=version, digests=digests, location=SharedBuckets(buckets=buckets, **shared))
with opened(update) as tensors:
    print(json.dumps({name: tensor_checksum(tensor) for name, tensor in tensors.items()}), flush=True)
    sys.stdin.read()
"""


def receiver(update: WeightUpdate) -> "subprocess.Popen[str]":
    """Start a process that opens an update, passed as JSON, and keeps it open."""
    digests = {name: (digest.shape, digest.dtype, digest.checksum) for name, digest in update.digests.items()}
    words = json.dumps([dataclasses.asdict(update.location), update.version, digests])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_another_process_opens_the_same_bytes_and_one_that_dies_takes_nothing_along(transport: IpcTransport) -> None:
    update, shared = pack(transport)
    dying = receiver(update)
    assert dying.stdout is not None
    found = json.loads(dying.stdout.readline())
    assert found == {name: digest.checksum for name, digest in update.digests.items()}
    os.kill(dying.pid, signal.SIGKILL)
    dying.communicate()
    transport.release()  # the update stays available to a restarted engine
    with opened(update) as tensors:
        assert {name: tensor_checksum(tensor) for name, tensor in tensors.items()} == found
    transport.close()
    assert not any(Path(bucket.handle).exists() for bucket in shared.buckets)


def test_an_update_is_freed_when_it_is_taken_where_nobody_comes_later() -> None:
    transport = IpcTransport(memory=HostMemory(), keeps=False)
    update, shared = pack(transport)
    with opened(update) as tensors:
        transport.release()
        assert not Path(shared.buckets[0].handle).exists()
        assert tensors["norm.weight"].tolist() == [0.5] * 3
    with pytest.raises(WeightsGoneError, match=r"update 3 cannot be opened.*publish again"), opened(update):
        pass
    transport.close()


def test_an_older_version_is_refused(transport: IpcTransport) -> None:
    old, old_buckets = pack(transport, version=3)
    _, new_buckets = pack(transport, version=4)
    with pytest.raises(WeightsGoneError, match="update 3 cannot be opened"), opened(old):
        pass
    reused = replace(old_buckets, buckets=new_buckets.buckets)  # as when a GPU reuses freed memory
    with (
        pytest.raises(WeightsGoneError, match=r"update 3 .*bucket 0 has another stamp"),
        opened(replace(old, location=reused)),
    ):
        pass


def test_freed_memory_is_refused_even_where_it_can_still_be_opened() -> None:
    """A hard link keeps each bucket's file, as a GPU driver keeps freed memory until it is reused."""
    transport = IpcTransport(bucket_bytes=2048, memory=HostMemory(), keeps=False)
    update, shared = pack(transport)
    links = [Path(f"{bucket.handle}.link") for bucket in shared.buckets]
    for bucket, link in zip(shared.buckets, links, strict=True):
        link.hardlink_to(bucket.handle)
    buckets = tuple(replace(bucket, handle=str(link)) for bucket, link in zip(shared.buckets, links, strict=True))
    late = replace(update, location=replace(shared, buckets=buckets))
    with opened(late) as tensors:
        assert torch.equal(tensors["embed.weight"], TENSORS["embed.weight"])
    transport.release()
    with pytest.raises(WeightsGoneError, match=r"update 3 .*bucket 0 has another stamp"), opened(late):
        pass
    transport.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shared: replace(shared, device="GPU-1234"), r"memory of GPU-1234; this process sees no GPU"),
        (lambda shared: replace(shared, buckets=shared.buckets[:1]), r"needs buckets of \[512, 2816, 512, 2304\]"),
        (lambda shared: replace(shared, bucket_bytes=4096), "needs buckets of"),
        (lambda shared: moved(shared, handle="/dev/shm"), "cannot be opened"),
        (lambda shared: moved(shared, handle="/etc/hostname"), "must have 512 bytes"),
    ],
)
def test_what_is_not_the_updates_memory_is_refused(change: Any, message: str, transport: IpcTransport) -> None:
    update, shared = pack(transport)
    with pytest.raises(EngineError, match=message), opened(replace(update, location=change(shared))):
        pass


def moved(shared: SharedBuckets, *, handle: str) -> SharedBuckets:
    first = SharedBucket(handle=handle, size_bytes=shared.buckets[0].size_bytes)
    return replace(shared, buckets=(first, *shared.buckets[1:]))


def test_an_update_is_plain_values_and_travels_in_a_pickle(transport: IpcTransport) -> None:
    update, shared = pack(transport)
    assert json.loads(json.dumps(dataclasses.asdict(shared)))["stamp"] == shared.stamp
    assert pickle.loads(pickle.dumps(update)).location == shared


def test_tensors_of_another_device_and_a_closed_transport_are_refused(transport: IpcTransport) -> None:
    with pytest.raises(TransferError, match=r"found 'a' on meta.*one rank in the trainer's process"):
        transport.pack({"a": torch.empty(2, device="meta")}, version=1, tied={})
    transport.close()
    with pytest.raises(NotReadyError, match="closed"):
        pack(transport)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"torch finds no GPU.*weights.transport = .file"):
        IpcTransport()
