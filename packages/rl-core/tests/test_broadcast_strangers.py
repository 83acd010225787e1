"""Weight broadcasts with unauthorized peers: open ports, access, and malformed traffic."""

import json
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch
from listening_sockets import listening_sockets
from offered_weights import OfferedTo
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rl_core.errors import SettingsError
from rl_core.weights.broadcast import BroadcastTransport, ReceivePlan, SourceGroups
from rl_core.weights.broadcast_group import UniqueIdStore
from rl_core.weights.messages import Answer, NcclId, decode_answer
from rl_core.weights.secret_sockets import MAX_STRANGERS, connect, receive_message, send_message
from rl_core.weights.update import Broadcast, WeightUpdate

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(1000, dtype=torch.float32)}
HOST = "127.0.0.1"


@pytest.fixture
def transport() -> Iterator[BroadcastTransport]:
    transport = BroadcastTransport(bucket_bytes=512, deadline_s=60.0)
    yield transport
    transport.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pack(transport: BroadcastTransport) -> tuple[WeightUpdate, Broadcast]:
    update = transport.pack(WEIGHTS, version=1, tied={})
    return update, update.sources[0].meeting


def take(update: WeightUpdate, stack: ExitStack, *, num_workers: int = 1) -> OfferedTo:
    """Receive an update in an engine that stays connected."""
    engine = OfferedTo(num_workers)
    stack.callback(engine.close)
    for found in engine.take(update):
        assert torch.equal(found["a"], WEIGHTS["a"])
    return engine


def listening_addresses() -> set[tuple[str, int]]:
    """Return the addresses that this process listens on."""
    return {(one.address, one.port) for one in listening_sockets([os.getpid()])}


def is_soon_refused(port: int) -> bool:
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        try:
            socket.create_connection((HOST, port), timeout=60).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.01)
    return False


def test_one_address_is_open_and_receivers_open_none(opened: ExitStack) -> None:
    before = listening_addresses()
    transport = BroadcastTransport(host=HOST, bucket_bytes=512)
    opened.callback(transport.close)
    update, meeting = pack(transport)
    assert listening_addresses() - before == {(HOST, meeting.port)}
    take(update, opened)
    assert listening_addresses() - before == {(HOST, meeting.port)}
    transport.close()
    assert listening_addresses() <= before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "no such host"])
def test_a_host_that_is_no_address_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match=r"one address of this machine.*Set weights\.host"):
        BroadcastTransport(host=host)


def test_a_stranger_with_torchs_store_gets_nothing_and_ends_nothing(
    transport: BroadcastTransport, opened: ExitStack
) -> None:
    update, meeting = pack(transport)
    with pytest.raises(RuntimeError, match="Ping failed"):
        TCPStore(HOST, meeting.port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False).set(
            "a", "{"
        )
    take(update, opened)


def test_who_has_another_secret_is_refused_and_refuses(transport: BroadcastTransport) -> None:
    _, meeting = pack(transport)
    with pytest.raises(ConnectionError, match="the other side closed the connection"):
        connect(HOST, meeting.port, secrets.token_bytes(32), deadline_s=0.1)
    stranger = socket.create_server((HOST, 0))
    stranger.listen()
    port = stranger.getsockname()[1]
    with stranger, pytest.raises(OSError, match="timed out"):
        connect(HOST, port, bytes.fromhex(meeting.secret), deadline_s=0.1)


def test_an_impostor_learns_nothing_that_opens_the_real_one(transport: BroadcastTransport) -> None:
    """A peer that reflects the sender's nonce is refused: a proof covers the nonces of both sides."""
    _, meeting = pack(transport)
    with socket.create_connection((HOST, meeting.port)) as first:
        said = first.recv(32, socket.MSG_WAITALL)
        first.sendall(said + bytes(32))  # send the sender's own nonce back
        assert first.recv(1) == b""
    assert meeting.secret not in repr(meeting)


NOISE = {
    "nothing": b"",
    "a malformed line": b"{\n",
    "binary": secrets.token_bytes(5000),
    "zeros": bytes(64),
    "a huge line": b"x" * (8 << 20),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3,
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_ends_nothing(noise: str, transport: BroadcastTransport, opened: ExitStack) -> None:
    update, meeting = pack(transport)
    stranger = opened.enter_context(socket.create_connection((HOST, meeting.port)))
    with suppress(ConnectionError):
        stranger.sendall(NOISE[noise])
    take(update, opened)
    if len(NOISE[noise]) >= 64:
        said = b"."
        with suppress(ConnectionError):
            while said:
                said = stranger.recv(100)
                assert len(said) <= 32
    take(update, opened)


def test_a_thousand_connections_that_say_nothing_hold_nobody_up(
    transport: BroadcastTransport, opened: ExitStack
) -> None:
    update, meeting = pack(transport)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(1000 if most > 4000 else most // 4):
        opened.enter_context(socket.create_connection((HOST, meeting.port)))
    take(update, opened)
    assert len(transport._listener._strangers) <= MAX_STRANGERS


HELLOS = [
    b"{",
    b"[]",
    b"[" * 60_000,
    b"{}",
    b'{"rank": 1, "group": "nobody"}',
    b'{"rank": 1, "group": ["nobody"], "num_workers": 1}',
    b'{"rank": 2, "group": "a", "num_workers": 1}',
    b'{"rank": 1, "group": "a", "num_workers": 0}',
    b'{"rank": 1, "group": "a", "num_workers": 1e999}',
    b'{"rank": 1, "group": "a", "num_workers": 1000000000}',
    b'{"rank": 1, "group": "\\ud800", "num_workers": 1}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("hello", [*(len(text).to_bytes(4, "big") + text for text in HELLOS), b"\xff\xff\xff\xff"])
def test_nonsense_of_one_who_knows_the_secret_ends_his_connection_alone(
    hello: bytes, transport: BroadcastTransport, opened: ExitStack
) -> None:
    update, meeting = pack(transport)
    connection = connect(HOST, meeting.port, bytes.fromhex(meeting.secret), deadline_s=60)
    opened.enter_context(connection)
    connection.sendall(hello)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    take(update, opened)


def test_a_worker_that_comes_twice_or_unasked_takes_nobodys_place(
    transport: BroadcastTransport, opened: ExitStack
) -> None:
    update, _ = pack(transport)
    engine = take(update, opened)
    taken = ReceivePlan(update=update, group=str(engine.sources._group))
    for rank in (1, 2):
        second = SourceGroups(rank=rank, num_workers=1, device=CPU)
        assert "cannot be reached" in str(second.ask(taken))
    (found,) = engine.take(update)
    assert torch.equal(found["a"], WEIGHTS["a"])


def test_nothing_listens_once_the_expected_receivers_have_come(opened: ExitStack) -> None:
    transport = BroadcastTransport(bucket_bytes=512, num_receivers=2)
    opened.callback(transport.close)
    update, meeting = pack(transport)
    first = take(update, opened, num_workers=2)
    socket.create_connection((HOST, meeting.port), timeout=60).close()  # the port stays open for the missing receiver
    take(update, opened)
    assert is_soon_refused(meeting.port)
    update, _ = pack(transport)
    assert len(first.take(update)) == 2  # connected receivers are still served
    thief = opened.enter_context(socket.socket())
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with pytest.raises(OSError, match="in use"):
        thief.bind((HOST, meeting.port))

    first.close()  # a receiver dies, so the port opens for its replacement
    take(update, opened, num_workers=2)
    assert is_soon_refused(meeting.port)
    transport.expect(3)
    take(update, opened)
    assert is_soon_refused(meeting.port)


def test_the_unique_id_of_nccl_travels_over_the_workers_connections() -> None:
    """NCCL's process group reads the store from C++, through torch's PrefixStore."""
    meeting = Broadcast(backend="nccl", host=HOST, port=1, secret="00", bucket_bytes=1, deadline_s=60.0)
    pairs = [socket.socketpair() for _ in range(2)]
    unique_id = secrets.token_bytes(128)
    sending = UniqueIdStore([ours for ours, _ in pairs], meeting)
    PrefixStore("", sending).set("0", unique_id)
    for ours, theirs in pairs:
        receiving = UniqueIdStore([theirs], meeting)
        assert PrefixStore("", receiving).get("0") == unique_id
        assert not PrefixStore("", receiving).check(["0"])
        send_message(ours, NcclId("1", b""), deadline_s=60.0)
        with pytest.raises(ConnectionError, match="expected NCCL's unique id '/0'; found '1'"):
            PrefixStore("", receiving).get("0")
        ours.close()
        theirs.close()


def test_a_message_is_an_object_of_json() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_message(ours, Answer("no"), deadline_s=60.0)
        assert receive_message(theirs, decode_answer, deadline_s=60.0) == Answer("no")
        text = json.dumps([1]).encode()
        ours.sendall(len(text).to_bytes(4, "big") + text)
        with pytest.raises(ConnectionError, match="must be JSON with its fields"):
            receive_message(theirs, decode_answer, deadline_s=60.0)
