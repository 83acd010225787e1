"""Sessions and clients survive the server, and it says what was lost."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rl_core.errors import DataError
from rl_rollout.gateway import RefusedError
from rl_service.clients import Clients, Sampling


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Clients]]:
    """Start servers on one folder; the test's end closes them."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Clients(tmp_path)))


def test_a_restarted_server_knows_its_clients_and_what_they_lost(start, tmp_path):
    clients = start()
    session = clients.open_session(user_metadata={"a": 1}, display_name="run")
    trains = clients.open_training(session.session_id, 0, base_model="m", rank=4, user_metadata=None)
    clients.stepped(trains, 7)
    sampling = Sampling(sampler_id=f"{session.session_id}:sample:0", session_id=session.session_id, base_model="m")
    assert clients.open_sampling(sampling) is clients.open_sampling(sampling)
    with (tmp_path / "clients.jsonl").open("ab") as journal:
        journal.write(b'{"type": "Pro')  # the server was killed here
    again = start()
    assert again.live_session(session.session_id) == session
    lost = again.trains(f"{session.session_id}:train:0")
    assert (lost.step, lost.lost) == (7, "the server was restarted after its step 7")
    assert again.sampling == {sampling.sampler_id: sampling}
    again.end(session.session_id, "its client finished it")
    with pytest.raises(RefusedError, match="is not open: its client finished it"):
        start().live_session(session.session_id)


def test_a_restart_drops_what_has_ended_from_the_journal(start, tmp_path):
    clients = start()
    sessions = [clients.open_session(user_metadata=None, display_name=None).session_id for _ in range(2)]
    for session_id in sessions:
        trains = clients.open_training(session_id, 0, base_model="m", rank=4, user_metadata=None)
        for step in range(50):
            clients.stepped(trains, step)
            clients.open_sampling(Sampling(sampler_id=f"{session_id}:{step}", session_id=session_id, base_model="m"))
    clients.end(sessions[0], "its client finished it")
    assert clients.num_open == 1
    again = start()
    assert len((tmp_path / "clients.jsonl").read_text().splitlines()) == 1 + 2 + 2 + 50 + 1
    assert again.training.keys() == clients.training.keys()
    assert start().training
    assert all(one.step == 49 for one in start().training.values())


def test_steps_and_ends_count_also_while_the_disk_is_full(start):
    clients = start()
    session_id = clients.open_session(user_metadata=None, display_name=None).session_id
    trains = clients.open_training(session_id, 0, base_model="m", rank=4, user_metadata=None)
    clients._journal.close()
    with Path("/dev/full").open("ab", buffering=0) as clients._journal:
        clients.stepped(trains, 7)
        assert trains.step == 7
        clients.end(trains.model_id, "its client finished it")
        assert trains.lost == "its client finished it"
        with pytest.raises(OSError, match="No space left"):
            clients.open_session(user_metadata=None, display_name=None)


def test_a_damaged_journal_is_refused(start, tmp_path):
    (tmp_path / "clients.jsonl").write_text('{"type": "Session"}\n')
    with pytest.raises(DataError, match="line 1 is damaged"):
        start()


def test_unknown_clients_are_refused_by_name(start):
    clients = start()
    with pytest.raises(RefusedError, match="session x is not open: it is not known here"):
        clients.live_session("x")
    with pytest.raises(RefusedError, match="no training client 'x'"):
        clients.trains("x")
