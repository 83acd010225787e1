"""Weights over the network: the sender's side. NCCL between GPUs, gloo between CPUs.

A sender keeps a store (torch's TCPStore) where engines announce themselves. Each engine's workers and the sender are a
process group of their own, made when the engine takes its first update and kept: an engine that dies disturbs no other,
and one that is started again takes the current weights when it asks for them.

The store is open to everybody who reaches its port, as those of torch.distributed are: keep it in a trusted network.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

import torch
from torch._C._distributed_c10d import TCPStore

from rl_core.errors import DeadlineError, NotReadyError, RLError, TransferError
from rl_core.weights.broadcast_group import SENDER, BroadcastGroup, TensorSpec, open_store
from rl_core.weights.update import Broadcast, WeightUpdate, digest_tensors

__all__ = [
    "BroadcastGroup",
    "BroadcastReceiver",
    "BroadcastTransport",
    "TensorSpec",
]

log = logging.getLogger(__name__)

JOINS = "joins"
LOOK_S = 0.02
DEFAULT_BUCKET_BYTES = 256 * 2**20


class _Engine:
    """One receiver, as the sender knows it."""

    def __init__(self, name: str, *, num_workers: int) -> None:
        self._name, self._num_workers = name, num_workers
        self._group: BroadcastGroup | None = None
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[torch.Tensor], meeting: Broadcast, device: torch.device) -> None:
        """Meet the workers, the first time, and send; one update after the other."""
        with self._lock:
            if self._group is None:
                size = self._num_workers + 1
                self._group = BroadcastGroup(meeting, self._name, rank=SENDER, size=size, device=device)
            self._group.send(tensors)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


class BroadcastTransport:
    """Sends tensors to engines in other processes and on other machines, in buckets.

    The tensors are copied to this process's memory: an engine that is started again takes them later, when the learner
    has stepped on.
    """

    def __init__(
        self,
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
        host: str = "127.0.0.1",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 60.0,
    ) -> None:
        """Open the store.

        Args:
            backend: "nccl" sends from the current GPU; every engine's worker must have another one.
            host: This machine, as engines reach it.
            bucket_bytes: Most bytes that travel at once.
            deadline_s: Longest wait for a receiver, in every step.
        """
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
        self._meeting = Broadcast(
            backend=backend, host=host, port=self._store.port, bucket_bytes=bucket_bytes, deadline_s=deadline_s
        )
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._engines: dict[str, _Engine] = {}
        self._packed: tuple[int, list[torch.Tensor]] | None = None
        self._sends: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="listen for engines", daemon=True)
        self._listener.start()

    def pack(self, tensors: Mapping[str, torch.Tensor], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        """See `WeightTransport.pack`; waits for engines that still take the last update."""
        if self._is_closed.is_set():
            raise NotReadyError("the weight transport is closed. Make a new one.")
        digests = digest_tensors(tensors)
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors.values()]
        self._finish_sends()
        with self._lock:
            self._packed = version, copies
        return WeightUpdate(version=version, digests=digests, broadcast=self._meeting, tied=dict(tied))

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._is_closed.set()
        self._listener.join()
        self._finish_sends()
        engines, self._engines, self._packed = self._engines, {}, None
        for engine in engines.values():
            engine.close()

    def _listen(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            while self._store.queue_len(JOINS):
                request = json.loads(self._store.queue_pop(JOINS))
                thread = threading.Thread(target=self._serve, args=(request,), name="send weights", daemon=True)
                self._sends.append(thread)
                thread.start()

    def _serve(self, request: Mapping[str, object]) -> None:
        """Send the current update to one engine; what goes wrong, the engine's workers notice by themselves."""
        name = str(request["engine"])
        with self._lock:
            packed, engine = self._packed, self._engines.get(name)
        refusal = _refusal(request, packed, is_known=engine is not None)
        if packed is not None and refusal is None and engine is None:
            engine = self._engines[name] = _Engine(name, num_workers=int(str(request["num_workers"])))
        self._store.set(f"answer/{request['call']}", json.dumps({"refusal": refusal}))
        if packed is None or refusal is not None or engine is None:
            return
        try:
            engine.send(packed[1], self._meeting, self._device)
        except RLError as error:
            log.warning("weights_not_sent engine=%s version=%s error=%s", name, packed[0], error)
            self._engines.pop(name, None)
            engine.close()

    def _finish_sends(self) -> None:
        sends, self._sends = self._sends, []
        for thread in sends:
            thread.join()


class BroadcastReceiver:
    """An engine's side before its workers receive: it announces itself, and hears whether it is served."""

    def __init__(self, *, num_workers: int) -> None:
        """Take a name of its own.

        Args:
            num_workers: That receive.
        """
        self.name = uuid.uuid4().hex
        self._num_workers = num_workers
        self._joined: Broadcast | None = None

    def announce(self, update: WeightUpdate) -> Broadcast:
        """Ask the sender for an update; when this returns, the workers meet it (`BroadcastGroup`).

        Raises:
            TransferError: The sender is gone, or sends another version.
            DeadlineError: It does not answer.
        """
        if update.broadcast is None:
            raise TransferError(f"weight update {update.version} is not one that is broadcast.")
        meeting = update.broadcast
        call = uuid.uuid4().hex
        request = {
            "engine": self.name,
            "call": call,
            "version": update.version,
            "num_workers": self._num_workers,
            "has_group": self._joined == meeting,
        }
        try:
            store = open_store(meeting)
            store.queue_push(JOINS, json.dumps(request))
            answer = _wait_for(store, f"answer/{call}", meeting)
        except RuntimeError as error:
            raise TransferError(
                f"the sender of weight update {update.version} cannot be reached at {meeting.host}:{meeting.port}: "
                f"{error}. Keep its transport open until every engine has taken the update."
            ) from error
        if answer["refusal"] is not None:
            raise TransferError(str(answer["refusal"]))
        self._joined = meeting
        return meeting


def _refusal(
    request: Mapping[str, object], packed: tuple[int, list[torch.Tensor]] | None, *, is_known: bool
) -> str | None:
    if packed is None or packed[0] != request["version"]:
        offered = "none" if packed is None else f"version {packed[0]}"
        return (
            f"the sender was asked for weights of version {request['version']}; it has {offered}. Take the newer ones."
        )
    if request["has_group"] and not is_known:
        return "the sender has lost this engine's process group, as when an earlier update failed. Start a new engine."
    return None


def _wait_for(store: TCPStore, key: str, meeting: Broadcast) -> dict[str, object]:
    ends_at = time.monotonic() + meeting.deadline_s
    while not store.check([key]):
        if time.monotonic() > ends_at:
            raise DeadlineError(
                f"the sender of weights at {meeting.host}:{meeting.port} gave no answer in {meeting.deadline_s:g} s."
            )
        time.sleep(LOOK_S)
    answer: dict[str, object] = json.loads(store.get(key))
    store.delete_key(key)
    return answer
