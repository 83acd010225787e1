"""An engine's side of weights over the network: it requests them from every sender, and its workers assemble them."""

import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rl_core.errors import DeadlineError, TransferError
from rl_core.weights.broadcast_group import BroadcastGroup, TensorSpec
from rl_core.weights.digests import ChecksumKind
from rl_core.weights.secret_sockets import connect, receive_message, send_message
from rl_core.weights.update import Broadcast, Rectangle, WeightUpdate


class JoinedSource(NamedTuple):
    """A sender that an engine has contacted.

    Attributes:
        meeting: Address and options of the sender, for the engine's workers.
        engine: Name of the engine in this group.
        sender: Name of the sender, for error messages.
    """

    meeting: Broadcast
    engine: str
    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivePlan:
    """The tensors that an engine's workers receive.

    Attributes:
        version: Policy version.
        specs: All tensors, in order.
        tied: Names that the model serves from another tensor.
        kinds: Kind of checksum per tensor.
        rectangles: Rectangles of each sender, in order.
    """

    version: int
    specs: Sequence[TensorSpec]
    tied: Sequence[str] = ()
    kinds: Mapping[str, ChecksumKind] = field(default_factory=dict)
    rectangles: Sequence[Sequence[Rectangle]] = field(default=(), repr=False)


def receive_plan(update: WeightUpdate) -> ReceivePlan:
    """Return the receive plan of an update."""
    specs = [TensorSpec(name, tuple(digest.shape), digest.dtype) for name, digest in update.digests.items()]
    return ReceivePlan(
        version=update.version,
        specs=specs,
        tied=list(update.tied),
        kinds={name: digest.kind for name, digest in update.digests.items()},
        rectangles=[source.rectangles for source in update.sources],
    )


class _SenderLink:
    """An engine's connection to one sender for its requests.

    Attributes:
        engine: Name under which the engine's workers connect to the sender; new for each connection.
    """

    def __init__(self, meeting: Broadcast, *, num_workers: int) -> None:
        self.engine = ""
        self._meeting, self._num_workers = meeting, num_workers
        self._connection: socket.socket | None = None

    def ask(self, version: int, *, sender: str) -> None:
        """Request an update; the sender waits for `go_on`.

        Raises:
            TransferError: The sender has ended, or sends another version.
            DeadlineError: The sender does not answer.
        """
        meeting = self._meeting
        try:
            answer = self._ask(version)
        except TimeoutError as error:
            self.close()
            raise DeadlineError(
                f"{sender} at {meeting.host}:{meeting.port} did not answer within {meeting.deadline_s:g} s."
            ) from error
        except OSError as error:
            self.close()
            raise TransferError(
                f"{sender} with weight update {version} cannot be reached at {meeting.host}:{meeting.port}: "
                f"{error}. Keep its transport open until every engine has received the update."
            ) from error
        if answer["refusal"] is not None:
            raise TransferError(f"{sender}: {answer['refusal']}")

    def go_on(self, *, goes_on: bool = True) -> None:
        """Tell the sender to send, or to cancel.

        Raises:
            TransferError: The sender has ended.
        """
        try:
            self._send({"goes_on": goes_on})
        except OSError as error:
            self.close()
            raise TransferError(f"the sender of weights at {self._meeting.host} has ended: {error}.") from error

    def close(self) -> None:
        """Disconnect from the sender. Can be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, version: int) -> dict[str, Any]:
        if self._connection is not None:
            with suppress(ConnectionError):  # the sender dropped this engine, for example after a failed update
                return self._request(version)
        self.close()
        meeting, self.engine = self._meeting, uuid.uuid4().hex
        secret = bytes.fromhex(meeting.secret)
        self._connection = connect(meeting.host, meeting.port, secret, deadline_s=meeting.deadline_s)
        self._send({"engine": self.engine, "num_workers": self._num_workers})
        return self._request(version)

    def _request(self, version: int) -> dict[str, Any]:
        connection = self._send({"version": version})
        return receive_message(connection, deadline_s=self._meeting.deadline_s)

    def _send(self, message: Mapping[str, Any]) -> socket.socket:
        if self._connection is None:
            raise ConnectionError("it is disconnected")
        send_message(self._connection, message, deadline_s=self._meeting.deadline_s)
        return self._connection


class WeightSources:
    """An engine's side before its workers receive, for all senders of an update."""

    def __init__(self, *, num_workers: int) -> None:
        """Initialize without connecting.

        Args:
            num_workers: Number of receiving workers.
        """
        self._num_workers = num_workers
        self._links: dict[Broadcast, _SenderLink] = {}

    def announce(self, update: WeightUpdate) -> list[JoinedSource]:
        """Request an update from every sender; afterwards the workers connect (`SourceGroups`).

        If one sender refuses, none sends.

        Raises:
            TransferError: A sender has ended, or sends another version.
            DeadlineError: A sender does not answer.
        """
        sources = {source.meeting: source for source in update.sources}
        for meeting in [known for known in self._links if known not in sources]:
            self._links.pop(meeting).close()
        requested: list[_SenderLink] = []
        try:
            for meeting, source in sources.items():
                link = self._links.setdefault(meeting, _SenderLink(meeting, num_workers=self._num_workers))
                link.ask(update.version, sender=source.sender)
                requested.append(link)
        except (TransferError, DeadlineError):
            for link in requested:
                with suppress(TransferError):
                    link.go_on(goes_on=False)
            raise
        try:
            for link in requested:
                link.go_on()
        except TransferError:
            self.close()  # the other senders must not wait for the workers
            raise
        return [JoinedSource(meeting, self._links[meeting].engine, one.sender) for meeting, one in sources.items()]

    def close(self) -> None:
        """Disconnect from every sender. Can be called twice."""
        for link in self._links.values():
            link.close()
        self._links.clear()


class SourceGroups:
    """One worker's side of the groups with all senders.

    Attributes:
        sources: Connected senders; empty after leaving.
    """

    def __init__(self, sources: Sequence[JoinedSource], *, rank: int, size: int, device: torch.device) -> None:
        """Connect to every sender.

        Args:
            sources: The senders.
            rank: The worker's rank in each group, from 1.
            size: Members of each group: the sender and the engine's workers.
            device: Device on which tensors are assembled.

        Raises:
            TransferError: A sender has ended.
        """
        self.sources = list(sources)
        self._device = device
        self._groups: list[BroadcastGroup] = []
        try:
            for one in sources:
                self._groups.append(BroadcastGroup(one.meeting, one.engine, rank=rank, size=size, device=device))
        except TransferError:
            self.close()
            raise

    def receive(self, plan: ReceivePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive an update tensor by tensor, assembled from its senders' rectangles.

        If it ends midway, it leaves every group, so that no sender waits.

        Raises:
            TransferError: A sender has ended.
            DeadlineError: A sender stopped sending.
        """
        dtypes = {spec.name: spec.dtype for spec in plan.specs}
        pieces: dict[str, list[tuple[int, Rectangle]]] = {}
        for number, rectangles in enumerate(plan.rectangles):
            for rectangle in rectangles:
                pieces.setdefault(rectangle.name, []).append((number, rectangle))
        try:
            with ThreadPoolExecutor(1, "receive weights") as thread:
                streams = [
                    group.receive([TensorSpec(one.name, one.sizes, dtypes[one.name]) for one in part], thread=thread)
                    for group, part in zip(self._groups, plan.rectangles, strict=True)
                ]
                for spec in plan.specs:
                    parts = ((one, self._next(streams, number)) for number, one in pieces.get(spec.name, ()))
                    yield spec.name, _put_together(spec, parts, self._device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave every group. Can be called twice."""
        self.sources = []
        for group in self._groups:
            group.close()

    def _next(self, streams: Sequence[Iterator[tuple[str, torch.Tensor]]], number: int) -> torch.Tensor:
        sender = self.sources[number].sender
        try:
            return next(streams[number])[1]
        except (TransferError, DeadlineError) as error:
            raise type(error)(f"{sender}: {error}") from error


def _put_together(
    spec: TensorSpec, parts: Iterator[tuple[Rectangle, torch.Tensor]], device: torch.device
) -> torch.Tensor:
    whole: torch.Tensor | None = None
    for rectangle, part in parts:
        if tuple(part.shape) == tuple(spec.shape):
            return part
        if whole is None:
            whole = torch.empty(spec.shape, dtype=part.dtype, device=device)
        whole[tuple(slice(o, o + s) for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True))] = part
    if whole is None:
        raise TransferError(f"no sender provides tensor {spec.name!r}.")
    return whole
