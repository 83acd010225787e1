"""Programs written for the tinker client run unchanged, on a real learner and a real engine."""

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tiny_run

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed (pip install tinker)")

from tinker import types  # noqa: E402 - after importorskip

from rl_core.errors import DiskError  # noqa: E402
from rl_metrics import DEFINITIONS  # noqa: E402
from rl_metrics.cli import main as rl_metrics  # noqa: E402
from rl_metrics.health import judge_run  # noqa: E402
from rl_metrics.run_files import open_run  # noqa: E402
from rl_rollout.engines import ReplicatedEngine, VLLMOptions  # noqa: E402
from rl_service.checkpoints import Checkpoints  # noqa: E402
from rl_service.main import running  # noqa: E402
from rl_service.settings import (  # noqa: E402
    AdapterSettings,
    ClientLimits,
    EngineSettings,
    LearnerSettings,
    ServedPolicy,
    ServerSettings,
    ServiceSettings,
)

NAME = "Qwen/Qwen3-8B"
TOKENS = [3, 4, 5, 6, 7, 8, 9]


class Server:
    """A service in its own thread."""

    def __init__(self, settings):
        self.settings, self._started, self._stop = settings, threading.Event(), None
        self.address = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    async def _serve(self):
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            async with running(self.settings) as self.address:
                self._started.set()
                await self._stop.wait()
        finally:
            self._started.set()

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def client(self):
        key = (self.settings.server.folder / "key").read_text().strip()
        return tinker.ServiceClient(base_url=self.address, api_key=key)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    tiny_run.make_tiny_policy(folder / "policy", tiny_run.example_module("prepare").make_tokenizer())
    return ServiceSettings(
        policy=ServedPolicy(path=folder / "policy", names=(NAME,)),
        server=ServerSettings(folder=folder / "runs", poll_s=5.0),
        lora=AdapterSettings(max_rank=4),
        learner=LearnerSettings(num_threads=1),
        engine=EngineSettings(name="transformers", placement="inline"),
        vllm=VLLMOptions(),
    )


@pytest.fixture(scope="module")
def server(settings):
    server = Server(settings)
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = server.client()
    yield client
    client.close("success").result()


def datum(tokens=TOKENS, **inputs):
    inputs = inputs or {"weights": [0.0, 0.0, *[1.0] * (len(tokens) - 3)]}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def prompt(tokens=TOKENS):
    return types.ModelInput.from_ints(tokens)


def step(trainer, *data, loss="cross_entropy", learning_rate=1e-2):
    passed = trainer.forward_backward(list(data) or [datum()], loss)
    stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    stepped.result()
    return passed.result()


def logprobs_of(result):
    return np.asarray(result.loss_fn_outputs[0]["logprobs"].data)


def folder_of(settings, trainer):
    return settings.server.folder / "clients" / trainer.model_id.replace(":", "_")


def test_a_program_trains_samples_and_saves(settings, client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    assert trainer.get_info().lora_rank == 4
    assert trainer.get_tokenizer().vocab_size > 9
    losses = [step(trainer).metrics["loss:sum"] for _ in range(4)]
    assert losses[3] < 0.5 * losses[0]
    history = open_run(folder_of(settings, trainer)).history
    assert history.finite("actor/loss").tolist() == losses
    sampler = trainer.save_weights_and_get_sampling_client().result()
    learned = trainer.forward([datum()], "cross_entropy").result()
    served = sampler.compute_logprobs(prompt()).result()
    assert served[0] is None
    np.testing.assert_allclose(served[1:], logprobs_of(learned), atol=1e-4)
    assert losses[3] != pytest.approx(learned.metrics["loss:sum"])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=1)
    first, second = (sampler.sample(prompt(), 2, params, topk_prompt_logprobs=3).result() for _ in range(2))
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert first.topk_prompt_logprobs[0] is None
    assert len(first.topk_prompt_logprobs[1]) == 3
    path = trainer.save_state("one").result().path
    step(trainer)
    trainer.load_state_with_optimizer(path).result()
    again = trainer.forward([datum()], "cross_entropy").result()
    assert logprobs_of(again).tolist() == logprobs_of(learned).tolist()


def test_the_base_model_is_sampled_without_any_adapter(client):
    base = client.create_sampling_client(base_model=NAME).result()
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    fresh = trainer.forward([datum()], "cross_entropy").result()
    np.testing.assert_allclose(base.compute_logprobs(prompt()).result()[1:], logprobs_of(fresh), atol=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_raise_what_was_better(client, loss):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    before = logprobs_of(trainer.forward([datum()], "cross_entropy").result())
    advantages = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    step(trainer, datum(logprobs=before.tolist(), advantages=advantages), loss=loss)
    after = logprobs_of(trainer.forward([datum()], "cross_entropy").result())
    assert after[2:].sum() > before[2:].sum()


def test_a_custom_loss_runs_at_the_client(client):
    torch = pytest.importorskip("torch")
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()

    def custom(data, logprobs):
        return -torch.stack([one[2:].sum() for one in logprobs]).sum(), {"rows": float(len(data))}

    custom_pass = trainer.forward_backward_custom([datum()], custom)
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert custom_pass.result().metrics["rows"] == 1.0
    plain = client.create_lora_training_client(base_model=NAME, rank=4).result()
    step(plain)
    results = [logprobs_of(one.forward([datum()], "cross_entropy").result()) for one in (trainer, plain)]
    assert results[0].tolist() == results[1].tolist()


def test_a_custom_loss_of_several_targets_sends_compressed_weights(client):
    torch = pytest.importorskip("torch")
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    targets = torch.arange(6 * 5).reshape(6, 5) % 11
    data = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": targets})

    def custom(data, logprobs):
        return -(logprobs[0][2, 3] + logprobs[0][5, 1]), {}

    found = [trainer.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()]
    assert found[0].shape == targets.shape
    for _ in range(2):
        passed = trainer.forward_backward_custom([data], custom)
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert passed.result().metrics["surrogate_loss:sum"] == pytest.approx(passed.result().metrics["loss:sum"])
        found.append(trainer.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch())
    sums = [float(one[2, 3] + one[5, 1]) for one in found]
    assert sums[0] < sums[1] < sums[2]


def test_a_refused_pass_also_stops_its_step_but_not_the_client(client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    passed = trainer.forward_backward([datum()], "stable_reinforce")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    with pytest.raises(tinker.RequestFailedError, match=r"formula of loss 'stable_reinforce' is not published"):
        passed.result()
    with pytest.raises(tinker.RequestFailedError, match=r"the step was not taken .* because forward_backward 1 failed"):
        stepped.result()
    assert step(trainer).metrics["loss:sum"] > 0


def test_saved_weights_are_listed_and_removed(server, client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    step(trainer)
    path = trainer.save_weights_for_sampler("best").result().path
    state = trainer.save_state("state", user_metadata={"a": "b"}).result().path
    rest = tinker.RestClient(base_url=server.address, api_key=client.holder._api_key)
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [one.tinker_path for one in listed] == [path, state]
    assert rest.get_training_run_by_tinker_path(state).result().last_checkpoint.user_metadata == {"a": "b"}
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    sampler = client.create_sampling_client(model_path=path).result()
    assert len(sampler.compute_logprobs(prompt()).result()) == len(TOKENS)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="no saved weights at"):
        client.create_sampling_client(model_path=path).result()


def test_a_client_has_a_run_folder_that_rl_metrics_reads(settings, server, capsys):
    folders = []
    for rate in (1e-2, 1e-3):
        client = server.client()
        trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
        for _ in range(6):
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sample = sampler.sample(prompt(TOKENS[:3]), 2, types.SamplingParams(max_tokens=4)).result().sequences[0]
            length = len(sample.tokens)
            row = types.Datum(
                model_input=prompt([*TOKENS[:3], *sample.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": [*TOKENS[1:3], *sample.tokens],
                    "logprobs": [0.0, 0.0, *sample.logprobs],
                    "advantages": [0.0, 0.0, *[1.0] * length],
                },
            )
            step(trainer, row, loss="importance_sampling", learning_rate=rate)
        folders.append(folder_of(settings, trainer))
        client.close("success").result()
    history = open_run(folders[0]).history
    assert history.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert history.finite("training/rollout_probs_diff_max").max() < 1e-4
    assert history.finite("service/samples").tolist() == [2.0] * 6
    assert 0 <= history.finite("weights/canary_max_diff").max() < 1e-4
    assert history.finite("timing_s/forward_backward").min() > 0
    assert not [name for name in history.values if name not in DEFINITIONS]
    deadline = time.monotonic() + 60
    while not open_run(folders[1]).is_finished:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    names = [str(folder) for folder in folders]
    assert rl_metrics(["report", names[0]]) == 0
    assert (folders[0] / "report.html").stat().st_size > 10_000
    rl_metrics(["check", names[0]])
    told = capsys.readouterr().out
    assert re.search(r"ok +failed_requests", told)
    assert re.search(r"ok +engine_mismatch", told)
    assert rl_metrics(["compare", *names, "--metric", "actor/grad_norm"]) == 0
    assert "actor/grad_norm" in capsys.readouterr().out


def test_failed_requests_are_a_finding_of_their_client(settings, client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    step(trainer)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="is not published"):
            trainer.forward_backward([datum()], "stable_reinforce").result()
    (finding,) = judge_run(open_run(folder_of(settings, trainer))).findings
    assert (finding.rule, finding.since_step) == ("failed_requests", 1)
    assert "'stable_reinforce' is not published" in finding.evidence[-1].text


def test_weights_are_downloaded_in_peft_format_and_only_with_a_signed_address(server, settings, client, tmp_path):
    peft, transformers, torch = (pytest.importorskip(name) for name in ("peft", "transformers", "torch"))
    trainer = client.create_lora_training_client(base_model=NAME, rank=2, train_mlp=False).result()
    step(trainer)
    learned = logprobs_of(trainer.forward([datum()], "cross_entropy").result())
    path = trainer.save_weights_external("best", ttl_seconds=3600).result().path
    rest = tinker.RestClient(base_url=server.address, api_key=client.holder._api_key)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    newest = rest.list_user_checkpoints(limit=1).result().checkpoints[0]
    assert (newest.tinker_path, newest.checkpoint_type, newest.expires_at) == (path, "external", None)
    assert trainer.model_id in [one.training_run_id for one in rest.list_training_runs().result().training_runs]
    urls = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    for name, url in urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, settings.lora.alpha)
    base = transformers.AutoModelForCausalLM.from_pretrained(settings.policy.path, trust_remote_code=False)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    np.testing.assert_allclose(logprobs[range(len(TOKENS) - 1), TOKENS[1:]].numpy(), learned, atol=1e-5)
    url = urls["adapter_config.json"]
    expires, signature = (url.index(one) for one in ("expires=", "signature="))
    other = url.replace("adapter_config.json", "..%2F..%2Fsaved.json")
    for bad in (url[:-4] + "0000", url[:expires] + "expires=9999999999&" + url[signature:], other):
        with pytest.raises(urllib.error.HTTPError, match=r"401|404"):
            urllib.request.urlopen(bad)
    sampler = trainer.save_weights_for_sampler("sampled").result().path
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(path.replace("best", "worst")).result()
    with pytest.raises(ValueError, match="only accepts external"):
        rest.get_external_weights_urls(sampler).result()


def test_saving_between_a_pass_and_its_step_changes_neither(client):
    trainers = [client.create_lora_training_client(base_model=NAME, rank=4, seed=2).result() for _ in range(3)]
    paths, results = [], []
    for trainer in trainers[:2]:
        trainer.forward_backward([datum()], "cross_entropy").result()
        if trainer is trainers[0]:
            paths = [trainer.save_state("between").result().path, trainer.save_weights_external("all").result().path]
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        results.append(logprobs_of(trainer.forward([datum()], "cross_entropy").result()).tolist())
    assert len(paths) == 2
    assert results[0] == results[1]
    trainers[0].load_state(paths[0]).result()
    before, loaded = (one.forward([datum()], "cross_entropy").result() for one in (trainers[2], trainers[0]))
    assert logprobs_of(before).tolist() == logprobs_of(loaded).tolist()


def test_the_command_of_the_client_downloads(server, client, tmp_path):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    path = trainer.save_state("state").result().path
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path)]
    env = {**os.environ, "TINKER_BASE_URL": server.address, "TINKER_API_KEY": client.holder._api_key}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [*tmp_path.glob("*/adapter_model.safetensors")]


def test_hostile_bodies_are_refused_and_the_service_goes_on(server, client):
    zstandard, messages = pytest.importorskip("zstandard"), tinker.proto.tinker_public_pb2
    key, wire = client.holder._api_key, "application/x-protobuf"

    def sent(path, content, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{server.address}/api/v1/{path}", content, {"X-API-Key": key, **headers})
        try:
            return urllib.request.urlopen(request, timeout=60).status, ""
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    rows = messages.ForwardBackwardRequest(model_id="nobody", data=[messages.Datum()] * 20_000).SerializeToString()
    for path, content, headers, status, told in (
        ("forward_backward", bomb, {"content_encoding": "zstd", "content_type": wire}, 413, "at most 67108864 bytes"),
        ("forward_backward", b"\xff" * 99, {"content_type": wire}, 400, "not a ForwardBackwardRequest"),
        ("forward_backward", rows, {"content_type": wire}, 404, "no training client 'nobody'"),
        ("create_session", b"[" * 100_000, {}, 400, "not a CreateSession"),
        ("create_session", b'{"user_metadata": {"a": "%s"}}' % bytes(b"x" * (2 << 20)), {}, 413, "at most 1048576"),
        ("create_session", b'{"unknown": 1}', {}, 400, "unknown: Extra inputs are not permitted"),
        ("asample", b"{", {}, 400, "not a Sample"),
        (
            "weights_info",
            b'{"tinker_path": "tinker://../../etc/passwd"}',
            {},
            400,
            "path must be tinker://RUN/KIND/NAME",
        ),
        ("create_session", b"{}", {"X-API-Key": "tml-wrong"}, 401, "Set TINKER_API_KEY"),
        ("downloads/a/external_weights/b/c", None, {}, 401, "has expired"),
        ("training_runs?limit=-1", None, {}, 400, "limit and offset must be numbers"),
        ("nothing", b"", {}, 404, "does not have POST /api/v1/nothing"),
    ):
        assert sent(path, content, **headers)[0] == status, path
        assert told in sent(path, content, **headers)[1]
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    many = messages.ForwardBackwardRequest(model_id=trainer.model_id, seq_id=1, data=[messages.Datum()] * 20_000)
    assert sent("forward_backward", many.SerializeToString(), content_type=wire)[0] == 200
    with pytest.raises(tinker.RequestFailedError, match=r"data must be at most 16384; found '20000 rows'"):
        trainer.forward([datum()], "cross_entropy").result()  # it has the same place in the client's order


def test_a_training_request_that_cannot_be_read_fails_in_its_turn(settings, server, client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    message = tinker.proto.tinker_public_pb2.ForwardBackwardRequest(model_id=trainer.model_id, seq_id=1)
    headers = {"X-API-Key": client.holder._api_key, "Content-Type": "application/x-protobuf"}
    content = message.SerializeToString() + bytes(settings.server.max_body_bytes)
    posted = httpx.post(f"{server.address}/api/v1/forward_backward", content=content, headers=headers, timeout=60)
    assert posted.status_code == 200
    told = "the body must have at most 67108864 bytes"
    with pytest.raises(tinker.RequestFailedError, match=told):
        trainer.forward([datum()], "cross_entropy").result()  # it has the same place in the client's order
    with pytest.raises(tinker.RequestFailedError, match=f"because forward_backward 1 failed: {told}"):
        step(trainer)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params.*: Input should be a valid number"):
        step(trainer, learning_rate=float("inf"))
    with pytest.raises(tinker.RequestFailedError, match="a SaveWeightsRequest must have at most 1048576 bytes"):
        trainer.save_state("state", user_metadata={"a": "b" * (2 << 20)}).result()
    assert step(trainer).metrics["loss:sum"] > 0
    assert open_run(folder_of(settings, trainer)).history.finite("service/failed_requests").tolist() == [4.0, 0.0]


def test_the_example_trains_and_samples(server, client, monkeypatch, capsys):
    file = Path(__file__).parents[3] / "examples" / "service" / "train.py"
    spec = importlib.util.spec_from_file_location("service_example", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setenv("TINKER_BASE_URL", server.address)
    monkeypatch.setenv("TINKER_API_KEY", client.holder._api_key)
    assert len(example.main(["--supervised-steps=2", "--rl-steps=2", "--rank=4"])) == 2
    assert "weights to sample from: tinker://" in capsys.readouterr().out


def test_two_clients_at_once_get_what_each_would_get_alone(server):
    def trained(steps, learning_rate, barrier=None):
        client = server.client()
        trainer = client.create_lora_training_client(base_model=NAME, rank=4, seed=int(1e4 * learning_rate)).result()
        found = []
        for _ in range(steps):
            if barrier is not None:
                barrier.wait(60)
            step(trainer, learning_rate=learning_rate)
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sample = sampler.sample(prompt(TOKENS[:3]), 1, types.SamplingParams(max_tokens=6, seed=5)).result()
            found.append((sample.sequences[0].tokens, sample.sequences[0].logprobs))
        client.close("success").result()
        return found

    rates, barrier = (1e-2, 3e-3), threading.Barrier(2)
    alone = [trained(3, rate) for rate in rates]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda rate: trained(3, rate, barrier), rates))
    assert together == alone
    assert alone[0] != alone[1]


def test_a_restarted_server_says_what_was_lost_and_continues_from_what_was_saved(settings, tmp_path):
    settings = settings.model_copy(update={"server": replace(settings.server, folder=tmp_path)})
    server = Server(settings)
    client = server.client()
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    step(trainer)
    path = trainer.save_state("first").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    saved = sampler.compute_logprobs(prompt()).result()
    step(trainer)
    server.close()
    port = int(server.address.rpartition(":")[2])
    server = Server(settings.model_copy(update={"server": replace(settings.server, port=port)}))
    lost = f"the server was restarted after its step 2. Its last saved state is {path}, of step 1"
    with pytest.raises(tinker.BadRequestError, match=re.escape(lost)):
        trainer.forward([datum()], "cross_entropy").result()
    assert sampler.compute_logprobs(prompt()).result() == saved
    again = client.create_training_client_from_state_with_optimizer(path).result()
    np.testing.assert_allclose(logprobs_of(again.forward([datum()], "cross_entropy").result()), saved[1:], atol=1e-4)
    assert again.optim_step(types.AdamParams()).result().metrics["optim_step"] == 2.0
    client.close("success").result()
    server.close()


def test_a_client_without_a_sign_of_life_is_saved_and_unloaded(settings, tmp_path):
    own = {"server": replace(settings.server, folder=tmp_path), "limits": ClientLimits(lapse_s=1e-9)}
    server = Server(settings.model_copy(update=own))
    client = server.client()
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    path = f"tinker://{trainer.model_id}/weights/lapsed"
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("checkpoints/*/weights/lapsed/saved.json")):
        assert time.monotonic() < deadline
        trainer.holder.run_coroutine_threadsafe(asyncio.sleep(0.05)).result()
    with pytest.raises(tinker.BadRequestError, match=f"no sign of life .* Its last saved state is {path}"):
        trainer.forward([datum()], "cross_entropy").result()
    server.close()


def test_a_client_that_cannot_be_saved_is_unloaded_too(settings, tmp_path, monkeypatch):
    def fails(*_):
        raise DiskError("the file cannot be written.")

    monkeypatch.setattr(Checkpoints, "save", fails)
    own = {"server": replace(settings.server, folder=tmp_path), "limits": ClientLimits(lapse_s=1e-9)}
    server = Server(settings.model_copy(update=own))
    client = server.client()
    trainer = client.create_lora_training_client(base_model=NAME, rank=4).result()
    events = tmp_path / "clients" / trainer.model_id.replace(":", "_") / "events.jsonl"
    deadline = time.monotonic() + 60
    while "run_stopped" not in events.read_text():
        assert time.monotonic() < deadline
        trainer.holder.run_coroutine_threadsafe(asyncio.sleep(0.05)).result()
    told = r"no sign of life .* could not be saved: the file cannot be written\. It saved no state"
    with pytest.raises(tinker.BadRequestError, match=told):
        trainer.forward([datum()], "cross_entropy").result()
    server.close()


def test_samples_end_with_their_session_or_when_their_client_cancels_them(server):
    client = server.client()
    client.create_sampling_client(base_model=NAME).compute_logprobs(prompt()).result()
    session, key = client.holder._session_id, client.holder._api_key

    def post(route, **body):
        found = httpx.post(f"{server.address}/api/v1/{route}", json=body, headers={"X-API-Key": key}, timeout=60)
        assert found.status_code == 200
        return found.json()

    def asked(number):
        chunks = [{"type": "encoded_text", "tokens": [3]}]
        params = {"max_tokens": 60, "stop": [0]}
        more = {"prompt": {"chunks": chunks}, "sampling_params": params, "num_samples": 1024}
        return post("asample", sampling_session_id=f"{session}:sample:0", seq_id=900 + number, **more)["request_id"]

    cancelled, running = asked(0), asked(1)
    post("cancel_future", request_id=cancelled)
    post(f"sessions/{session}/finish", reason={"type": "done"})
    told = [post("retrieve_future", request_id=one)["error"] for one in (cancelled, running)]
    assert told[0] == "the request was aborted: its client cancelled it."
    assert told[1] == "the request was aborted: its session has ended, because its client finished it (done)."


def test_a_client_that_disconnects_in_the_middle_of_a_request_costs_nothing(server, client, caplog):
    address = server.address.removeprefix("http://").split(":")
    head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-API-Key: {client.holder._api_key}\r\n"
    for body in ("Content-Length: 1000\r\n\r\n{", 'Content-Length: 26\r\n\r\n{"sdk_version": "0.38.0"}  '):
        with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
            connection.sendall((head + body).encode())
    assert client.create_sampling_client(base_model=NAME).compute_logprobs(prompt()).result()
    assert not [one for one in caplog.records if one.name.startswith(("uvicorn", "asyncio"))]


def test_all_weights_train_for_one_client_at_a_time(settings, tmp_path):
    own = {"server": replace(settings.server, folder=tmp_path), "lora": AdapterSettings(max_rank=0)}
    server = Server(settings.model_copy(update=own))
    client = server.client()
    trainer = client.create_lora_training_client(base_model=NAME, rank=32).result()
    assert not trainer.get_info().is_lora
    before = trainer.forward([datum()], "cross_entropy").result()
    base = client.create_sampling_client(base_model=NAME).result()
    step(trainer, learning_rate=1e-3)
    after = trainer.forward([datum()], "cross_entropy").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for served, wanted in ((sampler, after), (base, before)):
        np.testing.assert_allclose(served.compute_logprobs(prompt()).result()[1:], logprobs_of(wanted), atol=1e-4)
    path, download = trainer.save_state("state").result().path, trainer.save_weights_external("all").result().path
    step(trainer, learning_rate=1e-3)
    trainer.load_state_with_optimizer(path).result()
    again = trainer.forward([datum()], "cross_entropy").result()
    assert logprobs_of(again).tolist() == logprobs_of(after).tolist()
    rest = tinker.RestClient(base_url=server.address, api_key=client.holder._api_key)
    assert {"config.json", "model.safetensors"} <= rest.get_external_weights_urls(download).result().urls.keys()
    with pytest.raises(tinker.RequestFailedError, match="trains all weights, so nobody else can"):
        client.create_lora_training_client(base_model=NAME, rank=32).result()
    client.close("success").result()
    loaded, fresh = server.client(), server.client()
    trainer = loaded.create_training_client_from_state(path).result()
    assert logprobs_of(trainer.forward([datum()], "cross_entropy").result()).tolist() == logprobs_of(after).tolist()
    loaded.close("success").result()
    trainer = fresh.create_lora_training_client(base_model=NAME, rank=32).result()
    assert logprobs_of(trainer.forward([datum()], "cross_entropy").result()).tolist() == logprobs_of(before).tolist()
    fresh.close("success").result()
    server.close()


def test_adapters_of_lower_rank_and_weights_without_their_optimizer(server, client):
    trainer = client.create_lora_training_client(base_model=NAME, rank=2, train_mlp=False).result()
    assert trainer.get_info().lora_rank == 2
    step(trainer)
    path = trainer.save_state("state").result().path
    wanted = logprobs_of(trainer.forward([datum()], "cross_entropy").result()).tolist()
    other = client.create_training_client_from_state(path).result()
    assert other.get_info().lora_rank == 2
    assert logprobs_of(other.forward([datum()], "cross_entropy").result()).tolist() == wanted
    assert other.optim_step(types.AdamParams()).result().metrics["optim_step"] == 1.0
    rest = tinker.RestClient(base_url=server.address, api_key=client.holder._api_key)
    info = rest.get_weights_info_by_tinker_path(other.save_state("state").result().path).result()
    assert (info.lora_rank, info.train_mlp, info.train_attn) == (2, False, True)
    for rank, trains in ((4, {"train_mlp": False}), (2, {"train_attn": False}), (2, {})):
        unlike = client.create_lora_training_client(base_model=NAME, rank=rank, **trains).result()
        with pytest.raises(tinker.RequestFailedError, match="has rank 2, train_mlp = False, train_attn = True; this"):
            unlike.load_state(path).result()
    with pytest.raises(tinker.RequestFailedError, match=r"lora_config.rank must be 1 to lora.max_rank = 4; found 32"):
        client.create_lora_training_client(base_model=NAME).result()
    with pytest.raises(tinker.RequestFailedError, match="must have train_mlp or train_attn"):
        client.create_lora_training_client(base_model=NAME, rank=2, train_mlp=False, train_attn=False).result()


def test_a_service_without_engines_is_not_healthy(server, monkeypatch):
    health = f"{server.address}/api/v1/healthz"
    assert httpx.get(health, timeout=60).json() == {"status": "ok"}
    monkeypatch.setattr(ReplicatedEngine, "loads", lambda _: [SimpleNamespace(state="dead")])
    refused = httpx.get(health, timeout=60)
    assert refused.status_code == 503
    assert "all engines died more often than engine.restarts" in refused.text


def test_a_training_client_too_many_may_be_tried_again(server, client):
    def created(number):
        own = {"session_id": client.holder._session_id, "model_seq_id": number}
        body = {**own, "base_model": NAME, "lora_config": {"rank": 4}}
        headers = {"X-API-Key": client.holder._api_key}
        return httpx.post(f"{server.address}/api/v1/create_model", json=body, headers=headers, timeout=60)

    client.create_sampling_client(base_model=NAME).result()
    answers = [created(number) for number in (-1, *range(17))]
    assert [one.status_code for one in answers] == [400, *[200] * 16, 429]
    assert "model_seq_id, from 0, are required" in answers[0].text
    assert "limits.max_training_clients = 16 already. Finish a session" in answers[-1].text


def test_a_wrong_key_and_a_wrong_model_are_refused_by_name(server, client):
    with pytest.raises(tinker.AuthenticationError, match="needs its key"):
        tinker.ServiceClient(base_url=server.address, api_key=f"tml-{'x' * 40}").create_sampling_client(
            base_model=NAME
        ).result()
    with pytest.raises(tinker.RequestFailedError, match=r"base_model must be one of Qwen/Qwen3-8B"):
        client.create_lora_training_client(base_model="Qwen/Other", rank=4).result()
