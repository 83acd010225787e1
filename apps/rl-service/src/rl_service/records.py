"""The folder of a training client, which `rl-metrics` reads like that of a trainer's run."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from rl_core import Batch, Ragged
from rl_core.files import write_durably
from rl_core.weights import PublishReport
from rl_distill.learner import OptimStepResult
from rl_metrics.reductions import Recorder, summarize_mismatch
from rl_metrics.run_files import EventLog
from rl_metrics.trackers import Fanout, JsonlTracker
from rl_service.sampling import Sampled

MAX_ERROR_CHARS = 1000


class ClientRecord:
    """Records what a training client does. Each optimizer step ends a line of metrics. Any thread may call it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, step: int) -> None:
        """Begin the record of a client.

        Args:
            folder: Its folder.
            settings: What it trains, as tables.
            step: Optimizer steps of its weights.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "settings.toml", tomli_w.dumps(settings).encode())
        self._events = EventLog(folder / "events.jsonl")
        self._trackers = Fanout({"jsonl": JsonlTracker(folder / "metrics.jsonl")}, kept=("jsonl",))
        self._lock, self._recorder = threading.Lock(), Recorder()
        self._step, self._loss, self._num_failed = step, 0.0, 0
        self._served_step: int | None = None
        self._began = time.monotonic()
        self._events.write("run_started", step=step)
        self._trackers.log(step, {"training/global_step": step})

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add values to the next line."""
        with self._lock:
            self._recorder.record_all(metrics)

    def passed(self, batch: Batch, logprobs: Ragged, loss: float) -> None:
        """Add a pass with gradients: its loss, its size, and what the sampled tokens tell about engine and learner.

        Engine and learner are compared only while the client's newest sampler weights are those that it trains.
        """
        weights = batch.ragged("advantages" if "advantages" in batch.names else "loss_weights")
        mask = Ragged(batch.ragged("loss_mask").values & (weights.values != 0), weights.offsets)
        num_trained = int(mask.values.sum())
        found: dict[str, float] = {}
        if num_trained and "advantages" in batch.names:
            values = weights.values[mask.values]
            found = {f"critic/advantages/{name}": float(getattr(values, name)()) for name in ("mean", "max", "min")}
            if self._served_step == self._step:
                columns = {"loss_mask": mask, "old_logprobs": logprobs, "rollout_logprobs": batch["rollout_logprobs"]}
                found |= summarize_mismatch(Batch(batch.keys, columns))
        with self._lock:
            self._loss += loss
            self._recorder.record_all(found, weight=num_trained)
            self._recorder.record_all(
                {
                    "rollout/num_trajectories": len(batch),
                    "perf/total_num_tokens": len(mask.values),
                    "service/trained_tokens": num_trained,
                }
            )

    def sampled(self, samples: Sequence[Sampled], *, num_prompt: int) -> None:
        """Add sequences that were sampled with the client's weights."""
        with self._lock:
            for one in samples:
                length = len(one.tokens)
                for name, value in (("prompt_length", num_prompt), ("response_length", length)):
                    self._recorder.record_all({f"{name}/{which}": value for which in ("mean", "max", "min")})
                self._recorder.record("response_length/clip_ratio", one.is_cut)
                self._recorder.record_all({"service/samples": 1, "service/sampled_tokens": length})

    def published(self, report: PublishReport) -> None:
        """Add the proof of weights of this client that the engine now serves."""
        diffs = {"probe_max_diff": report.probe_max_diff, "canary_max_diff": report.canary_max_diff}
        self.note({f"weights/{name}": value for name, value in diffs.items()})

    def served(self) -> None:
        """Note that the client's sampler weights are now those that it trains."""
        self._served_step = self._step

    def failed(self, error: Exception) -> None:
        """Add a failed request to the line of the last step; of many, only each doubling is written."""
        with self._lock:
            self._num_failed += 1
            if self._num_failed & (self._num_failed - 1) == 0:
                self._trackers.log_late(self._step, {"service/failed_requests": self._num_failed})
                told = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
                self._events.write("request_failed", level="warning", step=self._step, error=told)

    def stepped(self, result: OptimStepResult) -> None:
        """Write the line of a step."""
        now = time.monotonic()
        with self._lock:
            self._recorder.record_all(
                {
                    "training/global_step": result.step,
                    "actor/loss": self._loss,
                    "actor/grad_norm": result.grad_norm,
                    "actor/lr": result.learning_rate,
                    "timing_s/step": now - self._began,
                    "service/failed_requests": 0,
                }
            )
            self._trackers.log(result.step, self._recorder.reduce())
            self._recorder, self._loss, self._num_failed = Recorder(), 0.0, 0
            self._step, self._began = result.step, now

    def restart(self, step: int) -> None:
        """Continue from weights with other optimizer steps; gradients that wait for a step are dropped."""
        with self._lock:
            self._recorder, self._loss, self._step, self._served_step = Recorder(), 0.0, step, None
            self._events.write("weights_loaded", step=step)

    def close(self, event: str, why: str | None) -> None:
        """End the record with an event that ends a run, such as "run_finished"."""
        self._events.write(event, step=self._step, error=why)
        self._events.close()
        self._trackers.close()
