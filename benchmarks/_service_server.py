"""A training service in a thread, whose learner and engine are timed."""

import asyncio
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_distill.megatron.learner import MegatronLearner
from rl_rollout.engines import VLLMOptions
from rl_service.backend import EngineBackend
from rl_service.main import running
from rl_service.settings import (
    AdapterSettings,
    EngineSettings,
    LearnerSettings,
    ServedPolicy,
    ServerSettings,
    ServiceSettings,
)

RANK, START_S = 16, 600.0


class Server:
    """A service in a thread of its own, and the seconds of the learner's and the engine's calls."""

    def __init__(self, folder: Path, *, engine: str, is_inline: bool) -> None:
        """Serve the policy in a folder with an engine, in this process or another one."""
        placement = "inline" if is_inline else "process"
        self._settings = ServiceSettings(
            policy=ServedPolicy(path=folder / "policy"),
            server=ServerSettings(folder=folder / "runs"),
            lora=AdapterSettings(max_rank=RANK),
            learner=LearnerSettings(num_threads=1),
            engine=EngineSettings(name=engine, placement=placement),  # type: ignore[arg-type]
            vllm=VLLMOptions(max_model_len=1024, kv_cache_gib=0.5, num_threads=1),
        )
        self.spent: defaultdict[str, list[float]] = defaultdict(list)
        for owner, name in ((MegatronLearner, "forward_backward"), (EngineBackend, "serve")):
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        self._started, self.address, self.key = threading.Event(), "", ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        if not self._started.wait(START_S) or not self.address:
            raise SystemExit("error: the service did not start.")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        with suppress(asyncio.CancelledError):
            try:
                async with running(self._settings) as self.address:
                    self.key = self._settings.server.own_key_file.read_text().strip()
                    self._started.set()
                    await self._stop.wait()
            finally:
                self._started.set()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def waiting(started: float, answer: Any) -> Any:
            found = await answer
            self.spent[name].append(time.perf_counter() - started)
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            answer = call(*args, **kwargs)
            if inspect.isawaitable(answer):
                return waiting(started, answer)
            self.spent[name].append(time.perf_counter() - started)
            return answer

        return timed
