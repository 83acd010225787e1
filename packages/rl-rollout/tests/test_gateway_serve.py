"""`rl-rollout serve`: its errors and its output."""

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from chat_model import make_tokenizer

from rl_core.errors import EngineDiedError
from rl_rollout.cli import main
from rl_rollout.engines.process import ProcessEngine
from rl_rollout.engines.scripted import ScriptedEngine

SPEAKER = str(Path(__file__).parents[3] / "tests" / "support" / "speaker_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with a tokenizer but no model, enough for errors raised before a model is loaded."""
    made = tmp_path_factory.mktemp("model")
    make_tokenizer().wrapped.save_pretrained(made)
    return made


def refusal(capsys, *arguments):
    assert main(["serve", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(folder, tmp_path, capsys):
    assert "not a folder" in refusal(capsys, tmp_path / "none")
    assert "unknown engine 'vlm'. Did you mean 'vllm'?" in refusal(capsys, folder, "--engine", "vlm")
    refused = refusal(capsys, folder, "--engine", "transformers", "--engine-options", '{"max_len": 4}')
    assert "max_len" in refused
    assert "Fields: dtype, device, max_model_len" in refused
    assert "JSON object" in refusal(capsys, folder, "--engine-options", "max_model_len=4")
    (tmp_path / "short.key").write_text("1234\n")
    assert "length at least 32" in refusal(capsys, folder, "--owner-key-file", tmp_path / "short.key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = refusal(capsys, folder, "--engine", "transformers", "--port", port)
        assert f"cannot listen on 127.0.0.1:{port}" in refused
        assert "Choose another port, or 0 for a free one." in refused
    assert "config.json" in refusal(capsys, folder, "--engine", "transformers", "--port", 0)


def test_a_tokenizer_without_a_chat_template_is_refused_with_what_to_do(tmp_path, capsys):
    make_tokenizer(None).wrapped.save_pretrained(tmp_path)
    assert "chat template" in refusal(capsys, tmp_path, "--engine", "transformers", "--port", 0)


def test_the_owners_key_is_made_for_its_user_alone_and_kept(folder, tmp_path, capsys):
    file = tmp_path / "owner.key"
    refusal(capsys, folder, "--engine", "transformers", "--port", 0, "--owner-key-file", file)
    first = file.read_text()
    assert len(first.strip()) > 40
    assert file.stat().st_mode & 0o777 == 0o600
    refusal(capsys, folder, "--engine", "transformers", "--port", 0, "--owner-key-file", file)
    assert file.read_text() == first


def words_of(text):
    """Return the URLs and keys that the greeting prints for SDKs."""
    return dict(word.split("=", 1) for word in text.split() if "_BASE_URL=" in word or "_KEY=" in word)


class Client:
    """Waits for the greeting of a gateway in the test's thread, sends it two rounds of requests, and terminates it."""

    def __init__(self, capfd):
        self.answers, self.told, self._capfd = [], "", capfd
        self.thread = threading.Thread(target=self._talk, daemon=True)
        self.thread.start()

    def _talk(self):
        while "ANTHROPIC_BASE_URL" not in self.told:
            self.told += self._capfd.readouterr().out
        words = words_of(self.told)
        body = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "go on"}]}
        headers = {"x-api-key": words["ANTHROPIC_API_KEY"]}
        with httpx.Client(base_url=words["ANTHROPIC_BASE_URL"], headers=headers, timeout=50, verify=False) as client:
            for _ in range(2):
                answer = client.post("/v1/messages", json=body)
                self.answers.append(answer.json())
                if answer.is_error:  # the gateway ends by itself
                    health = client.get("/health")
                    self.health = health.status_code, health.json()["status"]
                    return
                self.answers.append(client.get("/v1/models").json()["data"][0]["id"])
        os.kill(os.getpid(), signal.SIGTERM)


def test_it_serves_until_a_signal_and_goes_on_with_the_open_session_at_the_next_start(
    folder, tmp_path, capfd, monkeypatch
):
    monkeypatch.syspath_prepend(SPEAKER)
    words = ["--engine", "speaker", "--port", "0", "--open-session", "--sessions", str(tmp_path / "sessions")]
    keys = []
    for start in range(2):
        client = Client(capfd)
        assert main(["serve", str(folder), *words, "--model", "small"]) == 0
        client.thread.join(60)
        assert client.answers[0]["content"][0]["text"].startswith("1 ")
        assert client.answers[1::2] == ["small", "small"]
        keys.append(words_of(client.told)["OPENAI_API_KEY"])
        assert main(["sessions", "list", str(tmp_path / "sessions")]) == 0
        _, *listed = capfd.readouterr().out.splitlines()
        assert len(listed) == 1
        assert f" {2 * (start + 1)} " in listed[0]
    assert keys[0] == keys[1]
    assert (tmp_path / "sessions" / "standing.key").stat().st_mode & 0o777 == 0o600
    export = ["sessions", "export", str(tmp_path / "sessions"), "--to", str(tmp_path / "out.jsonl")]
    assert main(export) == 0
    assert "0 trajectories of 0 sessions" in capfd.readouterr().out


def test_it_ends_when_its_engine_dies_and_tells_clients_no_stack(folder, capfd, monkeypatch):
    monkeypatch.syspath_prepend(SPEAKER)

    async def die(*_):
        raise EngineDiedError("Traceback at /secret/place")

    monkeypatch.setattr(ScriptedEngine, "generate", die)
    client = Client(capfd)
    assert main(["serve", str(folder), "--engine", "speaker", "--port", "0", "--open-session"]) == 2
    client.thread.join(60)
    assert client.answers[0]["error"]["message"] == "the engine has failed; the gateway's log has the reason."
    assert client.health == (503, "engine failed")
    assert "Traceback at /secret/place" in capfd.readouterr().err


def test_it_ends_when_the_process_of_its_engine_dies_without_a_request(folder, capfd, monkeypatch):
    monkeypatch.syspath_prepend(SPEAKER)
    assert hasattr(ProcessEngine, "death")
    monkeypatch.setattr(ScriptedEngine, "death", EngineDiedError("the process of the engine ended"), raising=False)
    assert main(["serve", str(folder), "--engine", "speaker", "--port", "0"]) == 2
    assert "the process of the engine ended" in capfd.readouterr().err
