"""vLLM and the Megatron learner in one process: updates, their proof, and errors that stop a run."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_run import make_tiny_run

from rl_core import Batch, InProcessQueue, Ragged, RowKey
from rl_core.errors import WeightProofError
from rl_core.weights.transports import TensorTransport
from rl_core.weights.update import InProcess, WeightUpdate
from rl_distill.skipping import SkippedUpdates
from rl_rollout.prompts import PromptSource
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_sync_trainer.loop import publish, train_step
from rl_trainer_parts.learning.start_learners import start_learners
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.reporting.step_metrics import make_memory_watch
from rl_trainer_parts.rollouts.engines import make_engine
from rl_trainer_parts.rollouts.inputs import read_inputs
from rl_trainer_parts.rollouts.setup import open_rollout, queue_tasks
from rl_trainer_parts.rollouts.skip_cache import SkipCacheReplay
from rl_trainer_parts.run.stopping import StopSignal
from rl_trainer_parts.settings.sources import load_settings

pytest.importorskip("vllm")

LAST_NAME = "model.layers.1.mlp.down_proj.weight"


def refuse(*_: object) -> None:
    raise AssertionError("the loop's single steps neither log nor save")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """The parts of the training loop with real engines; the module has one vLLM engine."""
    run = make_tiny_run(tmp_path_factory.mktemp("vllm"))
    words = ["--rollout.engine=vllm", "--rollout.group_size=8", "--optimizer.learning_rate=1e-2"]
    settings = load_settings(run.settings_file, words, {})
    inputs = read_inputs(settings)
    with ExitStack() as stack:
        learners = start_learners(settings, log_directory=tmp_path_factory.mktemp("logs"))
        stack.callback(learners.close)
        engine = make_engine(settings, settings.policy.path)
        stack.callback(lambda: asyncio.run(engine.close()))
        asyncio.run(engine.start())
        queue = InProcessQueue(queue_tasks(settings, order="issue"))
        stack.callback(queue.close)
        folder = tmp_path_factory.mktemp("run")
        quiet = SimpleNamespace(phase=lambda *_, **__: nullcontext())
        unlogged = SimpleNamespace(log=refuse, log_generations=refuse, log_histograms=lambda *_: None)
        lifecycle: Any = SimpleNamespace(
            say=lambda event, **fields: None,
            console=quiet,
            trackers=unlogged,
            rollouts=RolloutWriter(folder / "rollouts.jsonl", inputs.tokenizer),
        )
        yield Parts(
            settings=settings,
            inputs=inputs,
            learners=learners,
            engine=engine,
            rollout=stack.enter_context(open_rollout(settings, inputs.tokenizer, engine)),
            replay=SkipCacheReplay(settings, inputs.tokenizer, say=lambda event, **fields: None),
            source=PromptSource(inputs.train, seed=0),
            queue=queue,
            teachers=None,
            transport=TensorTransport(),
            skipped=SkippedUpdates(most=0, directory=tmp_path_factory.mktemp("skipped")),
            stop=None,  # type: ignore[arg-type] - each event loop gets its own
            lifecycle=lifecycle,
            on_state=refuse,
            save_checkpoint=refuse,
            memory=make_memory_watch(settings, "trainer"),
        )


def run_with(parts: Parts, work: Callable[[Parts], Awaitable[TrainerState]]) -> TrainerState:
    async def main() -> TrainerState:
        with StopSignal() as stop:
            return await work(replace(parts, stop=stop))

    return asyncio.run(main())


def train_steps(parts: Parts, count: int) -> TrainerState:
    """Publish the weights, then train some steps; versions continue from the learner's step."""

    async def work(parts: Parts) -> TrainerState:
        state = TrainerState(step=parts.learners.policy.step, policy_version=parts.learners.policy.step)
        await publish(parts, state.policy_version)
        for _ in range(count):
            state = await train_step(parts, state)
        return state

    return run_with(parts, work)


def sequences() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 18, size=length).astype(np.int32) for length in (2, 3, 9, 16, 16, 16, 11, 5)]


def learner_logprobs(parts: Parts) -> list[np.ndarray]:
    keys = [RowKey(f"sequence-{index}", 0, 0) for index in range(len(sequences()))]
    batch = Batch(keys, {"input_ids": Ragged.from_rows(sequences(), dtype="int32")})
    return [row.copy() for row in parts.learners.policy.logprobs(batch)]


def engine_logprobs(parts: Parts) -> list[np.ndarray]:
    return [one.token_logprobs for one in asyncio.run(parts.engine.score(sequences()))]


def largest_difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def test_engine_and_learner_agree_after_five_updates(parts: Parts) -> None:
    before = learner_logprobs(parts)
    state = train_steps(parts, 5)
    assert (state.step, state.policy_version, parts.learners.policy.step) == (5, 5, 5)
    after = learner_logprobs(parts)
    assert largest_difference(before, after) > 0.1, "five updates must move the policy, or the test says nothing"
    assert largest_difference(engine_logprobs(parts), after) < 1e-4


def test_what_a_step_says(parts: Parts) -> None:
    metrics: Mapping[str, float] = train_steps(parts, 1).unlogged or {}
    assert metrics["actor/grad_norm"] > 0
    assert metrics["weights/num_tensors"] == 25  # 11 per layer, the embedding, the norm, and the tied head
    assert metrics["weights/canary_max_diff"] < 1e-4
    assert metrics["weights/probe_max_diff"] < 1e-4
    assert metrics["training/staleness/max"] == 0
    assert abs(metrics["actor/ppo_kl"]) < 1e-4  # with one update per step, the logprobs are equal
    assert metrics["rollout/failed_sessions"] == 0


class CorruptingTransport(TensorTransport):
    """Changes one element of a tensor after its digest is computed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def pack(self, tensors: Mapping[str, object], *, version: int, tied: Mapping[str, str]) -> WeightUpdate:
        update = super().pack(tensors, version=version, tied=tied)  # type: ignore[arg-type]
        damaged = update.location.tensors[self._name].clone()
        damaged.view(-1)[7] += 1e-6
        return replace(update, location=InProcess(tensors={**update.location.tensors, self._name: damaged}))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", LAST_NAME])
def test_a_tensor_corrupted_on_its_way_is_named(parts: Parts, name: str) -> None:
    with pytest.raises(WeightProofError, match="was changed in transit to the engine") as raised:
        train_steps(replace(parts, transport=CorruptingTransport(name)), 1)
    assert raised.value.tensor == name


def test_a_stale_tied_head_is_named(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    train_steps(parts, 1)
    monkeypatch.setattr("rl_rollout.engines.vllm.worker.repack_output_head", lambda model: None)
    with pytest.raises(WeightProofError, match="the engine serves something else") as raised:
        train_steps(parts, 1)
    assert raised.value.tensor == "lm_head.weight"


def test_the_engine_serves_the_learner_again_after_all_that(parts: Parts) -> None:
    train_steps(parts, 1)
    assert largest_difference(engine_logprobs(parts), learner_logprobs(parts)) < 1e-4
