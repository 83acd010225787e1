"""Mistakes of a session's owner, and requests that cannot train."""

import pytest
from gateway_site import gateway_site, run
from gateway_talk import owner, plain_client, said

from rl_rollout.gateway import ServiceOptions

USER = {"role": "user", "content": "1+2?"}


def test_indexes_count_up_and_none_is_given_twice(tmp_path):
    async def talk():
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            opened = [(await owner(gateway, "/sessions", group="g")).json() for _ in range(2)]
            assert [one["session_index"] for one in opened] == [0, 1]
            twice = await owner(gateway, "/sessions", group="g", session_index=1)
            assert (twice.status_code, twice.json()["error"]["param"]) == (400, "session_index")
            await owner(gateway, f"/sessions/{opened[1]['id']}/finish", failure="enough")
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            assert (await owner(gateway, "/sessions", group="g")).json()["session_index"] == 2
            assert (await owner(gateway, "/sessions", group="other")).json()["session_index"] == 0

    run(talk)


def test_what_is_nowhere_is_an_error_of_the_api():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            missing = await owner(gateway, "/v1/nothing")
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
            assert (await owner(gateway, "/health")).status_code == 405

    run(talk)


def test_a_misspelt_field_is_named_and_ends_nothing():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            wrong = await owner(gateway, "/sessions", group="g", limit={"max_turns": 1})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")
            wrong = await owner(gateway, "/sessions", group="g", limits={"max_turn": 1})
            assert wrong.status_code == 400
            assert "Did you mean 'max_turns'?" in wrong.json()["error"]["message"]
            session = (await owner(gateway, "/sessions", group="g")).json()
            await said(gateway, session["key"], [USER])
            for body in ({"Reward": 1}, {}, {"reward": 1, "components": [1]}):
                assert (await owner(gateway, f"/sessions/{session['id']}/finish", **body)).status_code == 400
            done = (await owner(gateway, f"/sessions/{session['id']}/finish", reward=1)).json()
            assert (done["failure"], done["reward"], len(done["trajectories"])) == (None, 1.0, 1)

    run(talk)


@pytest.mark.parametrize("wrong", [{"top_p": 0}, {"temperature": 0.005}])
def test_a_value_that_the_engine_cannot_take_is_the_clients_fault_and_fails_nothing(wrong):
    async def talk():
        async with gateway_site(lambda _: "3", service=ServiceOptions(decided_by="client")) as gateway:
            session = gateway.open("p")
            first = await said(gateway, session.key, [USER])
            with pytest.raises(Exception, match=r"Error code: 400.*" + next(iter(wrong))):
                await said(gateway, session.key, [USER, first, USER], **wrong)
            session.set_reward(1.0)
            result = await gateway.finish(session)
            assert (result.failure, len(result.trajectories)) == (None, 1)

    run(talk)


def test_what_a_client_had_drawn_otherwise_does_not_train():
    async def talk():
        async with gateway_site(lambda _: "3", service=ServiceOptions(decided_by="client")) as gateway:
            session = gateway.open("p")
            first = await said(gateway, session.key, [USER], temperature=0)
            await said(gateway, session.key, [USER, first, USER], temperature=1, top_p=1)
            session.set_reward(1.0)
            (row,) = (await gateway.finish(session)).trajectories
            _, second = session.tree.samples
            assert row.input_ids[row.loss_mask].tolist() == second.generation.token_ids.tolist()
            assert row.loss_mask[-len(second.generation.token_ids) :].all()
            other = gateway.open("p", 1)
            await said(gateway, other.key, [USER], temperature=0)
            other.set_reward(1.0)
            assert "--decided-by run" in (await gateway.finish(other)).failure

    run(talk)


def test_a_fault_is_logged_in_a_line_and_its_traceback_once_without_values(capsys):
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, plain_client() as client:
            session = gateway.open("p")
            gateway.service.answer = None
            for _ in range(3):
                body = {"model": "any", "messages": [USER]}
                headers = {"x-api-key": session.key}
                given = await client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
                assert (given.status_code, "NoneType" in given.text) == (503, False)
            return session.key

    key = run(talk)
    logged = capsys.readouterr().out
    assert logged.count("gateway_request_failed") == logged.count("/v1/chat/completions") == 3
    assert logged.count("'NoneType' object is not callable") == 4
    assert logged.count("Traceback (most recent call last):\n  File") == 1
    assert "locals" not in logged
    assert key not in logged
