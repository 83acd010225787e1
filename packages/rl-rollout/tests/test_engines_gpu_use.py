"""Engines report the use of their GPUs, from a fake device."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fake_gpu import USE, fake_gpu
from scripted_replicas import Held

from rl_core.gpus import GpuUse
from rl_rollout.engines import process
from rl_rollout.engines.process import EngineServer
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.stepped import SteppedEngine


class IdleStepper:
    """A stepper that computes in this process."""

    traits = EngineTraits(name="idle", max_model_len=8, vocab_size=8)

    def close(self) -> None:
        pass


class RankedStepper(IdleStepper):
    """A stepper whose ranks compute in other processes, as vLLM's workers."""

    def gpu_use(self) -> list[GpuUse]:
        return [USE, USE]


def asked(*engines: Any) -> list[GpuUse]:
    """Return the use of these replicas' GPUs."""

    async def go() -> list[GpuUse]:
        engine = ReplicatedEngine(engines)
        await engine.start()
        try:
            return await engine.gpu_use()
        finally:
            await engine.close()

    return asyncio.run(go())


def stepped(stepper: type[IdleStepper]) -> Any:
    make: Any = stepper
    return SteppedEngine(make, in_thread=False)


def test_replicas_report_the_gpu_of_their_process_or_of_their_ranks() -> None:
    with fake_gpu():
        assert asked(stepped(IdleStepper), stepped(RankedStepper)) == [USE] * 3
    assert asked(stepped(IdleStepper)) == []


def test_an_engine_that_does_not_report_has_no_figures() -> None:
    assert asked(Held(1).engine) == []


@pytest.mark.parametrize(("stepper", "expected"), [(IdleStepper, [USE]), (RankedStepper, [USE, USE])])
def test_an_engine_in_its_own_process_reports(
    stepper: type[IdleStepper], expected: Sequence[GpuUse], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "engine_class", lambda _: lambda *_: stepped(stepper))

    async def go() -> list[GpuUse]:
        hosted = EngineServer("idle", None, None)  # type: ignore[arg-type]
        await hosted.start()
        found = await hosted.gpu_use()
        await hosted.close()
        return found

    with fake_gpu():
        assert asyncio.run(go()) == expected
