"""Servers, engines and clients that are killed: what was saved stays, and others notice nothing."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tiny_run
from service_process import NAME, ServiceProcess, children_of

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed (pip install tinker)")

from tinker import types  # noqa: E402 - after importorskip

PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])
ROWS = [[3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3]]
LONG = types.SamplingParams(max_tokens=400, seed=3, stop=[0])
FLOOD = """
import tinker
from tinker import types
client = tinker.ServiceClient()
trainer = client.create_lora_training_client(base_model="{name}", rank=4).result()
sampler = trainer.save_weights_and_get_sampling_client().result()
prompt, params = types.ModelInput.from_ints([3]), types.SamplingParams(max_tokens=300, stop=[0])
asked = [sampler.sample(prompt, 2, params) for _ in range(8)]
row = types.Datum(model_input=prompt, loss_fn_inputs={{"target_tokens": [4]}})
passes = [trainer.forward_backward([row], "cross_entropy") for _ in range(8)]
passes[0].result()
print("asked", flush=True)
asked[-1].result()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    tokenizer = tiny_run.example_module("prepare").make_tokenizer()
    tiny_run.make_tiny_policy(folder / "policy", tokenizer, max_positions=2048)
    service = ServiceProcess(folder, lora__max_rank=4, engine__max_adapters=2, server__poll_s=1)
    yield service
    if service.is_running:
        service.kill()


@pytest.fixture
def service(running):
    if not running.is_running:
        running.start()
    return running


@pytest.fixture
def client(service):
    client = service.client()
    yield client
    if service.is_running:
        client.close("success").result()


def data():
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
        for row in ROWS
    ]


def steps(trainer, number):
    """Train; return the loss before each step, bit for bit."""
    passes = []
    for _ in range(number):
        passes.append(trainer.forward_backward(data(), "cross_entropy"))
        trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    return [one.result().metrics["loss:sum"] for one in passes]


def trainer_of(client, seed=1):
    return client.create_lora_training_client(base_model=NAME, rank=4, seed=seed).result()


def tokens_of(sampled):
    return [one.tokens for one in sampled.result().sequences]


def test_a_killed_server_continues_with_all_that_was_saved(service, client):
    whole = steps(trainer_of(client), 5)
    trainer = trainer_of(client)
    assert steps(trainer, 3) == whole[:3]
    path = trainer.save_state("third").result().path
    named = client.create_sampling_client(model_path=trainer.save_weights_for_sampler("named").result().path)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    wanted = tokens_of(sampler.sample(PROMPT, 2, LONG))
    steps(trainer, 1)
    sampled = sampler.sample(PROMPT, 2, LONG)
    passes = [trainer.forward_backward(data(), "cross_entropy") for _ in range(20)]
    passes[0].result()
    service.kill()
    service.start()
    assert tokens_of(sampled) == wanted
    lost = f"restarted after its step 4. Its last saved state is {path}, of step 3"
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=lost):
        passes[-1].result()
    with pytest.raises(tinker.BadRequestError, match=lost):
        trainer.forward_backward(data(), "cross_entropy").result()
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert steps(again, 2) == whole[3:]
    assert tokens_of(sampler.sample(PROMPT, 2, LONG)) == tokens_of(named.sample(PROMPT, 2, LONG)) == wanted


def test_a_killed_engine_serves_the_same_weights_again_although_their_path_was_removed(service, client):
    trainer = trainer_of(client)
    steps(trainer, 2)
    path = trainer.save_weights_for_sampler("gone").result().path
    sampler = client.create_sampling_client(model_path=path)
    base = client.create_sampling_client(base_model=NAME)
    wanted, of_base = (tokens_of(one.sample(PROMPT, 2, LONG)) for one in (sampler, base))
    assert wanted != of_base
    scores = sampler.compute_logprobs(PROMPT).result()
    engine = max(children_of(service.pid))
    os.kill(engine, signal.SIGSTOP)  # it answers nothing of what follows
    sampled = [one.sample(PROMPT, 2, LONG) for one in (sampler, base)]
    trainer.forward(data(), "cross_entropy").result()
    client.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    os.kill(engine, signal.SIGKILL)
    assert [tokens_of(one) for one in sampled] == [wanted, of_base]
    assert max(children_of(service.pid)) != engine
    with pytest.raises(tinker.RequestFailedError, match=f"no saved weights at {path}"):
        sampler.sample(PROMPT, 1, LONG).result()
    same = trainer.save_weights_and_get_sampling_client().result()
    assert same.compute_logprobs(PROMPT).result() == scores


def test_others_get_what_they_would_get_alone_while_a_client_is_killed(service, client):
    def train_and_sample(trainer):
        found = steps(trainer, 2)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        return found, tokens_of(sampler.sample(PROMPT, 2, LONG)), sampler.compute_logprobs(PROMPT).result()

    trainer = trainer_of(client)
    alone = [train_and_sample(trainer) for _ in range(2)]
    trainer, together = trainer_of(client), []
    program = [sys.executable, "-c", FLOOD.format(name=NAME)]
    with subprocess.Popen(program, env=os.environ | service.environment(), stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout.readline() == "asked\n"
        together.append(train_and_sample(trainer))
        killed.kill()
    together.append(train_and_sample(trainer))
    assert together == alone


def test_a_stopped_server_answers_clients_that_wait_and_says_one_line(service, client):
    def post(route, **body):
        key = service.environment()["TINKER_API_KEY"]
        return httpx.post(f"{service.url}/api/v1/{route}", json=body, headers={"X-API-Key": key}, timeout=60).json()

    trainer = trainer_of(client)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    steps(trainer, 1)
    path = trainer.save_state("last").result().path
    wanted = tokens_of(sampler.sample(PROMPT, 2, LONG))
    before = len(service.output.read_text().splitlines())
    waits = post("save_weights", model_id=trainer.model_id, seq_id=99, path="after-others")["request_id"]
    with ThreadPoolExecutor() as pool:
        polled = pool.submit(post, "retrieve_future", request_id=waits)
        sampled = sampler.sample(PROMPT, 2, LONG)
        service.process.send_signal(signal.SIGTERM)
        assert f"server was stopped after its step 1. Its last saved state is {path}" in polled.result()["error"]
    assert service.wait() == 0
    said = [line for line in service.output.read_text().splitlines()[before:] if line]
    assert said == ["Stopping. A running training request finishes first; Ctrl-C or SIGTERM again ends at once."]
    service.start()
    assert tokens_of(sampled) == wanted
