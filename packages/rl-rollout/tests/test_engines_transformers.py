"""The transformers engine: conformance with tied and untied heads, and repeatability bit for bit."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_core.errors import EngineError, NotReadyError
from rl_core.weights.transports import SharedFileTransport
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions
from rl_rollout.testing import EngineConformance, begin, generate
from rl_rollout.testing.engine_calls import PROMPT, long_request

OPTIONS = TransformersOptions(max_model_len=128)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started(model_dir: Path, options: TransformersOptions = OPTIONS) -> TransformersEngine:
    engine = TransformersEngine(model_dir, options)
    asyncio.run(engine.start())
    return engine


@pytest.fixture
def engine(tied_model_dir: Path) -> Iterator[TransformersEngine]:
    engine = started(tied_model_dir)
    yield engine
    asyncio.run(engine.close())


class TestTransformersEngine(EngineConformance):
    @pytest.fixture
    def model_dir(self, tied_model_dir: Path) -> Path:
        return tied_model_dir

    @pytest.fixture
    def engine(self, engine: TransformersEngine) -> RolloutEngine:
        return engine


class TestUntiedTransformersEngine(EngineConformance):
    transport = SharedFileTransport

    @pytest.fixture
    def model_dir(self, untied_model_dir: Path) -> Path:
        return untied_model_dir

    @pytest.fixture
    def engine(self, untied_model_dir: Path) -> Iterator[RolloutEngine]:
        engine = started(untied_model_dir)
        yield engine
        asyncio.run(engine.close())


def test_the_same_requests_give_the_same_bits(tied_model_dir: Path) -> None:
    requests = [
        GenerateRequest(input_ids=PROMPT[: 1 + i % 5], sampling=SamplingParams(max_tokens=6 + i, seed=i), num_samples=3)
        for i in range(6)
    ]

    def run() -> list[Generation]:
        engine = started(tied_model_dir)

        async def send_all() -> list[list[Generation]]:
            return list(await asyncio.gather(*map(engine.generate, requests)))

        samples = [sample for group in asyncio.run(send_all()) for sample in group]
        asyncio.run(engine.close())
        return samples

    for first, second in zip(run(), run(), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()


def test_requests_without_seeds_repeat_from_the_engines_seed(tied_model_dir: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        engine = started(tied_model_dir, TransformersOptions(seed=seed))
        samples = generate(engine, num_samples=8)
        asyncio.run(engine.close())
        return [sample.token_ids.tolist() for sample in samples]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_samples_beyond_a_batch_wait_and_are_served(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir, TransformersOptions(max_num_seqs=3))
    wide = started(tied_model_dir)
    narrow_samples = generate(engine, num_samples=8, seed=0)
    wide_samples = generate(wide, num_samples=8, seed=0)
    assert [s.token_ids.tolist() for s in narrow_samples] == [s.token_ids.tolist() for s in wide_samples]


def test_an_update_counts_as_a_restart_of_what_runs(engine: TransformersEngine, tied_model_dir: Path) -> None:
    request = long_request(engine)
    suite = TestTransformersEngine()

    async def update_midway() -> Generation:
        running = await begin(engine, request)
        await suite.publish(engine, load(tied_model_dir), version=1)
        return (await running)[0]

    assert asyncio.run(update_midway()).num_preempted == 1
    assert generate(engine)[0].num_preempted == 0


def load(model_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(model_dir / "model.safetensors")
    return tensors


def test_closing_fails_who_waits_and_may_be_repeated(tied_model_dir: Path) -> None:
    engine = started(tied_model_dir)

    request = long_request(engine)

    async def close_midway() -> BaseException | list[Generation]:
        running = await begin(engine, request)
        await engine.close()
        await engine.close()
        return (await asyncio.gather(running, return_exceptions=True))[0]

    error = asyncio.run(close_midway())
    assert isinstance(error, EngineError)
    assert "closed" in str(error)
    with pytest.raises(NotReadyError, match="closed"):
        generate(engine)


def test_the_code_of_a_model_folder_is_neither_run_nor_asked_about(tied_model_dir, tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    folder = tmp_path / "model"
    shutil.copytree(tied_model_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "stranger",
        "architectures": ["Stranger"],
    }
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    with pytest.raises(EngineError, match="model"):
        started(folder)
    assert asked == []
    assert not (tmp_path / "ran").exists()
