import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl_core.errors import DiskError, NotReadyError
from rl_core.weights.digests import tensor_checksum
from rl_core.weights.transports import SharedFileTransport, TensorTransport, write_safetensors


def tensors(value):
    """Return tensors of several kinds, one of them not contiguous."""
    return {
        "embed.weight": torch.full((3, 2), value),
        "head.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).T * value,
        "norm.weight": torch.full((2,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def transport(tmp_path):
    transport = SharedFileTransport(tmp_path)
    yield transport
    transport.close()


def test_tensors_are_handed_over_without_a_copy():
    sent = tensors(1.0)
    update = TensorTransport().pack(sent, version=3, tied={"lm_head.weight": "embed.weight"})
    assert update.version == 3
    assert update.location.tensors["embed.weight"] is sent["embed.weight"]
    assert update.digests["head.weight"].checksum == tensor_checksum(sent["head.weight"])
    assert update.tied == {"lm_head.weight": "embed.weight"}


def test_a_file_gives_back_the_tensors_bit_for_bit(transport):
    sent = tensors(0.1)
    update = transport.pack(sent, version=1, tied={"lm_head.weight": "embed.weight"})
    arrived = load_file(update.location.file)
    assert arrived.keys() == sent.keys() == update.digests.keys()
    for name, tensor in sent.items():
        assert torch.equal(arrived[name], tensor)
        assert arrived[name].dtype == tensor.dtype
        assert tensor_checksum(arrived[name]) == update.digests[name].checksum
    assert (update.version, update.tied) == (1, {"lm_head.weight": "embed.weight"})


def test_slices_of_one_buffer_travel(transport):
    buffer = torch.arange(8, dtype=torch.float32)
    update = transport.pack({"a": buffer[:4].view(2, 2), "b": buffer[4:]}, version=1, tied={})
    assert load_file(update.location.file)["b"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_file_is_replaced_whole(transport):
    first = transport.pack(tensors(1.0), version=1, tied={})
    inode = first.location.file.stat().st_ino
    with safe_open(first.location.file, "pt") as reader:
        second = transport.pack(tensors(2.0), version=2, tied={})
        assert reader.get_tensor("embed.weight").unique().tolist() == [1.0]
    assert second.location.file == first.location.file
    assert second.location.file.stat().st_ino != inode
    assert load_file(second.location.file)["embed.weight"].unique().tolist() == [2.0]
    assert [*second.location.file.parent.iterdir()] == [second.location.file]


def test_a_failed_write_leaves_the_last_file(transport):
    first = transport.pack(tensors(1.0), version=1, tied={})
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="memory"):
        transport.pack({"a": shared, "b": shared}, version=2, tied={})
    assert load_file(first.location.file)["embed.weight"].unique().tolist() == [1.0]


def test_close_leaves_nothing_behind(tmp_path):
    transport = SharedFileTransport(tmp_path)
    transport.pack(tensors(1.0), version=1, tied={})
    assert len([*tmp_path.iterdir()]) == 1
    transport.close()
    transport.close()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(NotReadyError, match="closed"):
        transport.pack(tensors(1.0), version=2, tied={})


def test_others_cannot_read_the_folder(transport):
    update = transport.pack(tensors(1.0), version=1, tied={})
    assert update.location.file.parent.stat().st_mode & 0o077 == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from rl_core.weights.transports import SharedFileTransport

transport = SharedFileTransport(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(tmp_path, transport):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    live = transport.pack(tensors(1.0), version=1, tied={}).location.file
    assert len(folders(tmp_path)) == 2
    other = SharedFileTransport(tmp_path)
    assert live.exists()
    assert len(folders(tmp_path)) == 2
    other.close()
    assert folders(tmp_path) == [live.parent]


def test_a_folder_that_was_taken_for_abandoned_is_made_again(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def steal_first(fd, flags):
        if not calls:
            folders(tmp_path)[0].rmdir()
        calls.append(flags)
        flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", steal_first)
    transport = SharedFileTransport(tmp_path)
    assert len(calls) == 2
    assert load_file(transport.pack(tensors(1.0), version=1, tied={}).location.file)
    transport.close()
    assert folders(tmp_path) == []


def folders(parent: Path):
    return sorted(parent.iterdir())


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_full_disk_has_a_type_and_leaves_what_there_was(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    write_safetensors({"w": torch.zeros(1)}, tmp_path / "old", metadata=metadata)
    earlier = (tmp_path / "old").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(DiskError, match="old cannot be written"):
            write_safetensors({"w": torch.zeros(1 << 18)}, tmp_path / "old", metadata=metadata)
        with pytest.raises(DiskError, match=r"a\.part cannot be written: .* It needs 1048576 bytes, and \d+ are free"):
            write_safetensors({"w": torch.zeros(1 << 18)}, tmp_path / "a.part", metadata=metadata)
        with pytest.raises(DiskError, match="Its folder does not exist"):
            write_safetensors({"w": torch.zeros(1)}, tmp_path / "none" / "a", metadata=metadata)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == earlier
