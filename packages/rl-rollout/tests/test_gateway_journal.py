"""Sessions outlive their gateway; a copy of its folder simulates a kill at that moment."""

import os
import resource
import shutil

import openai
import pytest
from chat_model import in_turn
from gateway_site import gateway_site, run
from gateway_talk import owner, said

from rl_core.errors import DataError, SettingsError
from rl_rollout.gateway.journal import Journal, read_session

USER = {"role": "user", "content": "1+2?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def some_turns(gateway, key):
    """Play two turns with a call, an edited history and a probe; return the conversation."""
    first = await said(gateway, key, [USER])
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    second = await said(gateway, key, [USER, first, result])
    await said(gateway, key, [USER, first, {**result, "content": "4"}])
    await said(gateway, key, [{"role": "user", "content": "a title"}], max_tokens=1)
    return [USER, first, result, second, {"role": "user", "content": "and?"}]


def plain(result):
    """Return a session's result in comparable form, without times."""
    arrays = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    fields = ("output_index", "parent", "finish_reason", "reward")
    return result.failure, [
        ([getattr(row, name).tolist() for name in arrays], [getattr(row, name) for name in fields], timeless(row))
        for row in result.trajectories
    ]


def timeless(row):
    extras = {**row.extras}
    if "gateway" in extras:
        extras["gateway"] = {name: value for name, value in extras["gateway"].items() if name != "overhead_ms"}
    return extras


TURNS = in_turn(f"<think>so</think>I add. {CALL}", "3 and 3", "no more")


def test_after_a_kill_the_same_key_goes_on_with_exactly_the_same_tree(tmp_path):
    async def talk():
        async with gateway_site(TURNS, sessions=tmp_path / "first") as gateway:
            session = gateway.open("p", 3, metadata={"task": 7})
            conversation = await some_turns(gateway, session.key)
            shutil.copytree(tmp_path / "first", tmp_path / "second")
            files = sorted((tmp_path / "first").iterdir())
            assert files
            assert all(session.key.encode() not in one.read_bytes() for one in files)
            await said(gateway, session.key, conversation)
            session.set_reward(0.5)
            lasting = await gateway.finish(session)
        async with gateway_site(TURNS, sessions=tmp_path / "second") as gateway:
            (again,) = gateway.sessions
            assert (again.session_id, again.prompt_uid, again.session_index) == (session.session_id, "p", 3)
            assert (again.metadata, again.limits) == ({"task": 7}, session.limits)
            assert again.opened_at == pytest.approx(session.opened_at, abs=2)
            assert (await owner(gateway, "/v1/models")).status_code != 200
            await said(gateway, session.key, conversation)
            again.set_reward(0.5)
            assert plain(await gateway.finish(again)) == plain(lasting)
        assert len(lasting.trajectories) == 2
        assert lasting.trajectories[-1].extras["gateway"]["turns"] == 5

    run(talk)


def test_exact_histories_are_told_apart_after_a_restart_too(tmp_path):
    histories = [[USER, {"role": "assistant", "content": text}, USER] for text in ("x", " x")]

    async def talk():
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            key = gateway.open("p").key
            for history in histories:
                await said(gateway, key, history)
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            (session,) = gateway.sessions
            for history in histories:
                await said(gateway, key, history)
            assert session.counts["repeated"] == 2
            assert len({sample.turn for sample in session.tree.samples}) == 2

    run(talk)


def test_reasoning_that_is_dropped_is_restored_too(tmp_path):
    from rl_rollout.gateway.service import ServiceOptions

    async def talk():
        service = ServiceOptions(reasoning="drop")
        async with gateway_site(TURNS, sessions=tmp_path / "first", service=service) as gateway:
            session = gateway.open("p")
            await some_turns(gateway, session.key)
            shutil.copytree(tmp_path / "first", tmp_path / "second")
            session.set_reward(1)
            lasting = await gateway.finish(session)
        file = tmp_path / "second" / f"{session.session_id}.open"
        again, size = read_session(file)
        assert size == file.stat().st_size
        again.set_reward(1)
        assert plain(again.result()) == plain(lasting)
        assert lasting.failure is None

    run(talk)


def test_a_write_that_was_cut_off_counts_for_nothing_and_any_other_damage_is_refused_by_name(tmp_path):
    async def talk():
        async with gateway_site(TURNS, sessions=tmp_path / "kept") as gateway:
            session = gateway.open("p")
            first = await said(gateway, session.key, [USER])
            before = (tmp_path / "kept" / f"{session.session_id}.open").read_bytes()
            await said(gateway, session.key, [USER, first, {"role": "user", "content": "and?"}])
            whole = (tmp_path / "kept" / f"{session.session_id}.open").read_bytes()
        file = tmp_path / f"{session.session_id}.open"
        for cut in range(len(before), len(whole), 7):
            file.write_bytes(whole[:cut])
            again, size = read_session(file)
            assert len(before) <= size <= cut
            assert len(again.tree.samples) == 1 + (size > len(before))
        for place in range(0, len(whole), 11):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x81]) + whole[place + 1 :])
            told = ""
            try:
                again, size = read_session(file)
            except DataError as error:
                told = str(error)
            assert str(file) in told or size <= place  # a length beyond the file's end

    run(talk)


def test_files_of_strangers_are_named_in_the_log_and_the_others_go_on(tmp_path, capsys):
    async def talk():
        async with gateway_site(TURNS, sessions=tmp_path / "first") as gateway:
            session = gateway.open("p")
            await said(gateway, session.key, [USER])
            shutil.copytree(tmp_path / "first", tmp_path / "second")
        folder = tmp_path / "second"
        good = (folder / f"{session.session_id}.open").read_bytes()
        strangers = [folder / f"session-{number:016x}.open" for number in range(5)]
        strangers[0].write_bytes(good)  # the name of another session
        strangers[1].write_bytes(b"\x80\x04cposix\nsystem\n")
        strangers[2].symlink_to(folder / f"{session.session_id}.open")
        os.mkfifo(strangers[3])
        strangers[4].write_bytes(good[:21] + b"\xff" * 40)
        (folder / "notes.open").write_text("mine")
        async with gateway_site(TURNS, sessions=folder) as gateway:
            assert [one.session_id for one in gateway.sessions] == [session.session_id]
            await said(gateway, session.key, [USER])
        logged = capsys.readouterr().out
        assert all(stranger.name in logged for stranger in strangers)
        held = Journal(folder)
        with pytest.raises(SettingsError, match="another gateway"):
            Journal(folder)
        held.close()

    run(talk)


def test_what_cannot_be_kept_is_answered_503_and_fails_the_session(tmp_path):
    async def talk():
        async with gateway_site(TURNS, sessions=tmp_path) as gateway:
            session = gateway.open("p")
            first = await said(gateway, session.key, [USER])
            size = (tmp_path / f"{session.session_id}.open").stat().st_size
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limit[1]))
            try:
                for _ in range(2):
                    with pytest.raises(openai.InternalServerError, match="cannot store the session") as refused:
                        await said(gateway, session.key, [USER, first, USER])
                    assert refused.value.status_code == 503
                assert (await owner(gateway, f"/sessions/{session.session_id}/finish", reward=1.0)).status_code == 503
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            answer = (await owner(gateway, f"/sessions/{session.session_id}/finish", reward=1.0)).json()
            assert "cannot store the session" in answer["failure"]
            assert answer["trajectories"] == []
        again, _ = read_session(tmp_path / f"{session.session_id}.finished")
        assert len(again.tree.samples) == 1
        assert "cannot store the session" in again.failure

    run(talk)


def test_a_finish_that_is_asked_for_again_gives_the_same_and_no_second_session(tmp_path):
    async def talk():
        finished = []
        told = lambda session, result: finished.append(session.session_id)
        async with gateway_site(TURNS, sessions=tmp_path / "first", on_finished=told) as gateway:
            opened = (await owner(gateway, "/sessions", group="p")).json()
            await said(gateway, opened["key"], [USER])
            path = f"/sessions/{opened['id']}"
            first = (await owner(gateway, f"{path}/finish", reward=2.0)).json()
            shutil.copytree(tmp_path / "first", tmp_path / "second")
        async with gateway_site(TURNS, sessions=tmp_path / "second", on_finished=told) as gateway:
            assert (await owner(gateway, f"{path}/finish", reward=3.0)).json() == first
            assert (await owner(gateway, f"{path}/reward", reward=3.0)).status_code == 404
            assert first["trajectories"][0]["reward"] == 2.0
            with pytest.raises(openai.AuthenticationError):
                await said(gateway, opened["key"], [USER])
        assert finished == [opened["id"]]

    run(talk)
