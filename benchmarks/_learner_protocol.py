"""How benchmarks/learner.py talks to the process of a side: lines of JSON, one answer to each request.

    -> (started)                             <- "ready"
    -> {"operation": "step", "workload": name, "seed": n}
                                             <- {"step_s", "loss", "grad_norm", "num_tokens", "num_computed_tokens"}
    -> {"operation": "bound", "workload": name, "seed": n}
                                             <- {"bound"}, of our side that shares nothing, as _learner_bound.py
    -> {"operation": "experts", "rounds": n}
                                             <- {"experts"}, of our side, as _learner_experts.py
    -> {"operation": "about"}                <- {"peak_bytes", "start_bytes", "device", "threads", "versions"}
    -> {"operation": "quit"}, or end of input    <- (ends with status 0)

A request that fails is answered {"error": "..."}, and the process ends with status 1.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from _learner_workload import PRESETS, Preset, Rows, make_rows
from _protocol import private_stdout, write


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of an optimizer step.

    Attributes:
        loss: Mean cross entropy over the batch's response tokens.
        grad_norm: Gradient norm before clipping.
        num_computed_tokens: Tokens computed by the layers, including padding.
    """

    loss: float
    grad_norm: float
    num_computed_tokens: int


class Side(Protocol):
    """A policy and its optimizer, to be measured."""

    def step(self, rows: Rows) -> Outcome:
        """Run one optimizer step on a batch, from rows on the host to updated weights."""


class Ours(Side, Protocol):
    """A side that also measures the bound of sharing and experts."""

    def bound(self, rows: Rows) -> float:
        """Return the maximum speed-up of a step."""

    def experts(self, preset: str, *, rounds: int) -> list[dict[str, Any]]:
        """Measure a layer's experts, computed in several ways."""


Opened = Callable[[Path, Preset], Side]
"""Opens a side for a policy's folder."""


def serve(opened: Opened, *, packages: tuple[str, ...]) -> int:
    """Open the side, answer requests until there are no more, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True)
    options = parser.parse_args()
    preset = replace(PRESETS[options.preset], budget=options.budget)
    answers = private_stdout()
    torch.set_num_threads(options.threads)
    try:
        start_bytes = peak_bytes()
        side = opened(options.policy, preset)
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            match request["operation"]:
                case "step":
                    answer = timed_step(side, make_rows(preset, request["workload"], seed=request["seed"]))
                case "bound":
                    rows = make_rows(preset, request["workload"], seed=request["seed"])
                    answer = {"bound": cast("Ours", side).bound(rows)}
                case "experts":
                    answer = {"experts": cast("Ours", side).experts(options.preset, rounds=request["rounds"])}
                case "about":
                    answer = about(packages, start_bytes)
                case _:
                    break
            write(answers, json.dumps(answer))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def timed_step(side: Side, rows: Rows) -> dict[str, Any]:
    """Return a step's time and result."""
    wait_for_device()
    started = time.perf_counter()
    outcome = side.step(rows)
    wait_for_device()
    return {
        "step_s": time.perf_counter() - started,
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "num_tokens": len(rows.input_ids),
        "num_computed_tokens": outcome.num_computed_tokens,
    }


def about(packages: tuple[str, ...], start_bytes: int) -> dict[str, Any]:
    """Return the side's device, versions and memory."""
    has_gpu = torch.cuda.is_available()
    return {
        "peak_bytes": peak_bytes(),
        "start_bytes": start_bytes,
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in packages},
    }


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Return this process's peak memory in bytes: that of tensors on a GPU, else resident memory.

    getrusage would include the parent's memory before exec.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) * 1024
