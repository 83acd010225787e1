"""Training requests of the client: losses and gradients of the API's documentation, and those of our own trainers."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest
import tiny_run
import torch

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed (pip install tinker)")

from tinker import types  # noqa: E402 - after importorskip
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_proto_response  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rl_core import Batch, Prompt  # noqa: E402
from rl_distill import LearnerOptions, LoraOptions  # noqa: E402
from rl_distill.megatron.learner import MegatronLearner  # noqa: E402
from rl_distill.objectives import DistillationObjective, DistillationObjectiveOptions, with_loss_weights  # noqa: E402
from rl_distill.teacher import TextOptions, trajectories_from_texts  # noqa: E402
from rl_service.backend import LearnerBackend  # noqa: E402
from rl_service.checkpoints import Checkpoints  # noqa: E402
from rl_service.clients import Clients  # noqa: E402
from rl_service.requests import AdamParams, CreateModel, LoraConfig, OptimStep  # noqa: E402
from rl_service.settings import (  # noqa: E402
    AdapterSettings,
    LearnerSettings,
    ServedPolicy,
    ServerSettings,
    ServiceSettings,
)
from rl_service.training import TrainingRequests  # noqa: E402
from rl_service.wire import read_forward_backward  # noqa: E402

NAME, SEED, RANK = "made", 5, 4
LENGTHS = (7, 3, 12, 5, 1, 9)
SCALE = 1e9
AS_GRADIENT = {"learning_rate": SCALE, "eps": SCALE, "beta1": 0.0, "beta2": 0.0}
"""A step by nearly the gradient itself."""


class Trained:
    """A training client without a server: requests arrive as the client sends them."""

    def __init__(self, settings):
        self.backend = LearnerBackend(settings)
        folder = settings.server.folder
        folder.mkdir()
        asyncio.run(self.backend.start(folder))
        self._clients = Clients(folder)
        self._requests = TrainingRequests(settings, self.backend, self._clients, Checkpoints(folder / "checkpoints"))
        session = self._clients.open_session(user_metadata=None, display_name=None).session_id
        self._client = self._clients.open_training(session, 0, base_model=NAME, rank=RANK, user_metadata=None)
        lora = LoraConfig(rank=RANK, seed=SEED)
        self._run(CreateModel(session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora))

    def _run(self, request):
        run = partial(self._requests.run, self._client, request, arrived_at=time.monotonic())
        return asyncio.run(self.backend.call(run))

    def forward_backward(self, *data, loss="cross_entropy", options=None, forward_only=False):
        given = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=options)
        request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=self._client.model_id, seq_id=1)
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        answer = self._run(read_forward_backward(message.SerializeToString()))
        return deserialize_proto_response(answer.content, types.ForwardBackwardOutput)

    def optim_step(self, **params):
        self._run(OptimStep(model_id=self._client.model_id, seq_id=2, adam_params=AdamParams(**params)))

    @property
    def learner(self):
        return self.backend.of(self._client.model_id)

    def close(self):
        asyncio.run(self.backend.close())
        self._clients.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "policy"
    tiny_run.make_tiny_policy(folder, tiny_run.example_module("prepare").make_tokenizer())
    return folder


@pytest.fixture
def build(policy, tmp_path):
    made = []

    def build(rank):
        settings = ServiceSettings(
            policy=ServedPolicy(path=policy, names=(NAME,)),
            server=ServerSettings(folder=tmp_path / "service"),
            lora=AdapterSettings(max_rank=rank),
            learner=LearnerSettings(num_threads=1, micro_batch_tokens=16),
        )
        made.append(Trained(settings))
        return made[-1]

    yield build
    for one in made:
        one.close()


def importance(row):
    return -(torch.exp(row["target"] - row["sampling"]) * row["advantages"]).sum()


def ppo(row, low=0.8, high=1.2):
    ratio = torch.exp(row["target"] - row["sampling"])
    return -torch.minimum(ratio * row["advantages"], ratio.clamp(low, high) * row["advantages"]).sum()


def cispo(row, low=0.8, high=1.2):
    weight = torch.exp(row["target"] - row["sampling"]).clamp(low, high).detach()
    return -(weight * row["target"] * row["advantages"]).sum()


def dro(row, beta=0.05):
    penalty = (row["target"] - row["sampling"]) ** 2
    return -(row["target"] * row["advantages"] - 0.5 * beta * penalty).sum()


def gspo(row, low=0.9, high=1.1):
    mean = (row["target"].detach() - row["sampling"])[row["selection"] > 0].mean()
    ratio = torch.exp(mean + row["target"] - row["target"].detach())
    return -torch.minimum(ratio * row["advantages"], ratio.clamp(low, high) * row["advantages"]).sum()


def cross_entropy(row):
    return -(row["target"] * row["weights"]).sum()


LOSSES = {
    "importance_sampling": importance,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "cross_entropy": cross_entropy,
    "importance_sampling, other targets": importance,
    "dro, other targets": dro,
    "gspo, other targets": gspo,
    "cross_entropy, other targets": cross_entropy,
    "cross_entropy, soft targets": cross_entropy,
}
OPTIONS = {"gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}


def target_logprobs(model, row):
    found = model(row["tokens"][None]).logits[0].log_softmax(-1)
    targets = row["targets"].reshape(len(row["tokens"]), -1)
    return found.gather(-1, targets).reshape(row["targets"].shape)


def made_rows(model, name, vocab_size):
    """Return rows whose ratios are inside and outside of the clips, small enough for float32."""
    draw = torch.Generator().manual_seed(3)
    shape = (3,) if "soft" in name else ()
    rows = []
    for length in LENGTHS:
        ids = torch.randint(1, vocab_size, (length + 1,), generator=draw)  # the embedding of padding is 0
        other = torch.randint(0, vocab_size, (length, *shape), generator=draw)
        if shape:
            other[:, 2] = other[:, 0]
        row = {"tokens": ids[:-1], "targets": other if "targets" in name else ids[1:]}
        with torch.no_grad():
            row["sampling"] = target_logprobs(model, row) + 0.2 * torch.randn(row["targets"].shape, generator=draw)
        row["advantages"], row["weights"] = (0.02 * torch.randn(2, *row["targets"].shape, generator=draw)).double()
        row["selection"] = (torch.rand(length, generator=draw) < 0.7).double()
        row["selection"][0] = 1.0
        rows.append({key: of.float().double() if of.is_floating_point() else of for key, of in row.items()})
    return rows


def datum(row, loss):
    names = {"weights": "weights"}
    if loss != "cross_entropy":
        names = {"sampling": "logprobs", "advantages": "advantages"}
        names |= {"selection": "sequence_ratio_mask"} if loss == "gspo" else {}
    inputs = {name: row[key].float() for key, name in names.items()}
    tokens = types.ModelInput.from_ints(row["tokens"].tolist())
    return types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": row["targets"], **inputs})


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_the_documentation(name, build, policy):
    loss, formula = name.partition(",")[0], LOSSES[name]
    trained = build(rank=0)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, trust_remote_code=False).double()
    rows = made_rows(model, name, trained.backend.vocab_size)
    targets = [target_logprobs(model, row) for row in rows]
    expected = sum(formula({**row, "target": target}) for row, target in zip(rows, targets, strict=True))
    expected.backward()

    before = {name: tensor.clone() for name, tensor in trained.learner.export_weights().items()}
    data = [datum(row, loss) for row in rows]
    result = trained.forward_backward(*data, loss=loss, options=OPTIONS.get(loss))
    trained.optim_step(**AS_GRADIENT)
    after = trained.learner.export_weights()

    assert result.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    for target, output in zip(targets, result.loss_fn_outputs, strict=True):
        found = output["logprobs"].to_torch()
        assert found.shape == target.shape
        torch.testing.assert_close(found.double(), target.detach(), rtol=0, atol=1e-5)
    for parameter, tensor in model.named_parameters():
        found = before[parameter] - after[parameter]
        torch.testing.assert_close(found.double(), tensor.grad, rtol=0, atol=1e-6)


def test_logprobs_without_gradients_are_those_of_a_pass(build, policy):
    trained = build(rank=RANK)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, trust_remote_code=False).double()
    rows = made_rows(model, "cross_entropy, soft targets", trained.backend.vocab_size)
    data = [datum(row, "cross_entropy") for row in rows]
    first = trained.forward_backward(*data, forward_only=True)
    second = trained.forward_backward(*data)
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], abs=1e-6)
    for row, one, other in zip(rows, first.loss_fn_outputs, second.loss_fn_outputs, strict=True):
        assert one["logprobs"].shape == list(row["targets"].shape)
        assert one["logprobs"].data == pytest.approx(other["logprobs"].data, abs=1e-6)


def test_texts_train_as_in_the_trainers(build, policy):
    """The trainers' off-policy distillation of texts, and the same tokens and weights of a client."""
    trained = build(rank=RANK)
    texts = [[[3, 4, 5, 6], [7, 8]], [[9, 3, 3]], [[4] * 9]]
    prompts = [
        Prompt(uid=str(index), input_ids=np.arange(3, 5 + index, dtype=np.int32), columns={"texts": ["a"] * len(of)})
        for index, of in enumerate(texts)
    ]
    options = TextOptions(column="texts", end_token_id=2, max_response_tokens=16)
    trajectories = trajectories_from_texts(prompts, options, encode=lambda _: [ids for of in texts for ids in of])
    batch = with_loss_weights(Batch.from_trajectories(trajectories))
    adam = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0}
    learner = MegatronLearner(
        policy,
        LearnerOptions(num_threads=1, micro_batch_tokens=16, **adam),
        lora=LoraOptions(rank=RANK, alpha=trained.backend._lora().alpha),
        name="trainer",
    )
    learner.add_adapter("client", seed=SEED, rank=RANK)
    objective = DistillationObjective(DistillationObjectiveOptions(loss="nll"))
    data = []
    for ids, weights in zip(batch.ragged("input_ids"), batch.ragged("loss_weights"), strict=True):
        inputs = {"target_tokens": ids[1:].astype(np.int64), "weights": np.asarray(weights[1:])}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    params = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    losses = []
    for _ in range(4):
        expected = learner.train_step(batch, objective)
        losses.append(trained.forward_backward(*data).metrics["loss:sum"])
        trained.optim_step(**params, grad_clip_norm=1.0)
        assert losses[-1] == pytest.approx(expected.loss, rel=1e-5)
        found = trained.learner.export_adapter()
        for name, tensor in learner.export_adapter().items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    assert losses == sorted(set(losses), reverse=True)
    learner.close()
