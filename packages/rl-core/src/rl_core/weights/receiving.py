"""An engine's side of weights over the network: its workers request them from every sender, and assemble them."""

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from rl_core.errors import DeadlineError, TransferError, WeightsGoneError
from rl_core.record_fields import record
from rl_core.weights.broadcast_group import BroadcastGroup
from rl_core.weights.digests import TensorDigest
from rl_core.weights.messages import WorkerHello
from rl_core.weights.secret_sockets import connect, send_message
from rl_core.weights.update import Broadcast, Rectangle, WeightSource, WeightUpdate

NO_PROBE = np.zeros(0, np.float32)


@record
class ReceivePlan:
    """What an engine's workers request and receive.

    Attributes:
        update: The update, without what only its proof needs: the probes, and an adapter's base.
        group: Name under which the workers connect to every sender; another name makes them connect again.
    """

    update: WeightUpdate
    group: str


class WeightSources:
    """An engine's requests to the senders of updates, which its workers make together."""

    def __init__(self, ask: Callable[[ReceivePlan], Sequence[str | None]]) -> None:
        """Initialize without connecting.

        Args:
            ask: Calls `SourceGroups.ask` in every worker at once, and returns the results.
        """
        self._ask = ask
        self._group: str | None = None

    def announce(self, update: WeightUpdate) -> ReceivePlan:
        """Request an update from every sender, which then waits for the workers to receive it.

        If one sender refuses, the workers disconnect from all. Workers that are connected already connect again and
        ask once more, because a connection may have been lost.

        Raises:
            WeightsGoneError: A sender has ended, sends another version, or does not answer.
        """
        digests = {name: replace(digest, probe=NO_PROBE) for name, digest in update.digests.items()}
        bare = replace(update, digests=digests, adapter=None)
        while True:
            is_new = self._group is None
            plan = ReceivePlan(update=bare, group=self._group or uuid.uuid4().hex)
            problem = next(filter(None, self._ask(plan)), None)
            self._group = plan.group if problem is None else None
            if problem is None:
                return plan
            if is_new:
                raise WeightsGoneError(problem)


class SourceGroups:
    """One worker's side: its groups with all senders, kept from update to update."""

    def __init__(self, *, rank: int, num_workers: int, device: torch.device) -> None:
        """Initialize without connecting.

        Args:
            rank: The worker's rank in each group, from 1.
            num_workers: Number of the engine's workers.
            device: Device on which tensors are assembled.
        """
        self._rank, self._num_workers, self._device = rank, num_workers, device
        self._joined: tuple[str, list[Broadcast]] = "", []
        self._groups: list[BroadcastGroup] = []

    def ask(self, plan: ReceivePlan) -> str | None:
        """Request an update from every sender, together with the engine's other workers.

        Returns:
            Why a sender does not send it, in which case the worker leaves every group; None if `receive` may follow.
        """
        try:
            self._join(plan)
            for source, group in zip(plan.update.sources, self._groups, strict=True):
                with _named(source, plan.update.version):
                    refusal = group.ask(plan.update.version)
                if refusal is not None:
                    raise TransferError(f"{source.sender}: {refusal}")
        except (TransferError, DeadlineError) as error:
            self.close()
            return str(error)
        return None

    def receive(self, plan: ReceivePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive an update tensor by tensor, assembled from its senders' rectangles.

        If it ends midway, it leaves every group, so that no sender waits.

        Raises:
            TransferError: A sender has ended.
            DeadlineError: A sender stopped sending.
        """
        digests, sources = plan.update.digests, plan.update.sources
        try:
            with ThreadPoolExecutor(1, "receive weights") as thread:
                parts: dict[str, list[tuple[Rectangle, Iterator[torch.Tensor]]]] = {name: [] for name in digests}
                for source, group in zip(sources, self._groups, strict=True):
                    sizes = [math.prod(one.sizes) * _dtype(digests[one.name]).itemsize for one in source.rectangles]
                    arriving = _naming(source.sender, group.receive(sizes, thread))
                    for rectangle in source.rectangles:
                        parts[rectangle.name].append((rectangle, arriving))
                for name, digest in digests.items():
                    yield name, self._assembled(name, digest, parts[name])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave every group. Can be called twice."""
        for group in self._groups:
            group.close()
        self._joined, self._groups = ("", []), []

    def _join(self, plan: ReceivePlan) -> None:
        """Connect to the senders, unless the worker is in these groups."""
        joined = plan.group, [source.meeting for source in plan.update.sources]
        if joined == self._joined:
            return
        self.close()
        name, rank, size = plan.group, self._rank, self._num_workers + 1
        for source in plan.update.sources:
            meeting = source.meeting
            with _named(source, plan.update.version):
                secret = bytes.fromhex(meeting.secret)
                connection = connect(meeting.host, meeting.port, secret, deadline_s=meeting.deadline_s)
                send_message(connection, WorkerHello(name, rank, self._num_workers), deadline_s=meeting.deadline_s)
            group = BroadcastGroup(meeting, name, [connection], rank=rank, size=size, device=self._device)
            self._groups.append(group)
        self._joined = joined

    def _assembled(
        self, name: str, digest: TensorDigest, parts: Sequence[tuple[Rectangle, Iterator[torch.Tensor]]]
    ) -> torch.Tensor:
        dtype = _dtype(digest)
        whole: torch.Tensor | None = None
        for rectangle, arriving in parts:
            part = next(arriving).view(dtype).reshape(rectangle.sizes)
            if rectangle.sizes == digest.shape:
                return part
            if whole is None:
                whole = torch.empty(digest.shape, dtype=dtype, device=self._device)
            whole[tuple(slice(o, o + s) for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True))] = part
        if whole is None:
            raise TransferError(f"no sender provides tensor {name!r}.")
        return whole


@contextmanager
def _named(source: WeightSource, version: int) -> Iterator[None]:
    """Name the sender in errors of connecting and asking."""
    meeting = source.meeting
    try:
        yield
    except TimeoutError as error:
        raise DeadlineError(
            f"{source.sender} at {meeting.host}:{meeting.port} did not answer within {meeting.deadline_s:g} s."
        ) from error
    except OSError as error:
        raise TransferError(
            f"{source.sender} with weight update {version} cannot be reached at {meeting.host}:{meeting.port}: "
            f"{error}. Keep its transport open until every engine has received the update."
        ) from error


def _naming(sender: str, tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Name the sender in errors while its tensors arrive."""
    try:
        yield from tensors
    except (TransferError, DeadlineError) as error:
        raise type(error)(f"{sender}: {error}") from error


def _dtype(digest: TensorDigest) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, digest.dtype)
    return dtype
