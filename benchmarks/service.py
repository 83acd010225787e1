"""Measure the training service with its real client: its cost, four clients against one, and the first token.

    nox -s bench -- service [--model 1m] [--engine vllm] [--rounds 5] [--quick] [--json FILE]

Server and clients share this process, so that the learner's and the engine's own times are known; what they cost each
other counts as the service's cost. --quick runs one round with few tokens on the transformers engine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _gateway_workload import MODELS, VOCAB_SIZE, write_chat_policy
from _service_server import RANK, Server

NUM_CLIENTS = 4
FULL = {"rows": 16, "row_tokens": 512, "steps": 2, "samples": 16, "max_tokens": 64}
QUICK = {"rows": 2, "row_tokens": 16, "steps": 1, "samples": 2, "max_tokens": 4}
WANTED = {"overhead": 0.1, "training_ratio": 0.9, "sampling_ratio": 0.9, "beyond_slot_ms": 100.0}
"""Bounds of the medians: at most, but at least for ratios."""


class Clients:
    """Training clients of one session."""

    def __init__(self, server: Server, sizes: dict[str, int]) -> None:
        """Create them, and samplers of their weights."""
        import tinker

        self._types, self._sizes, self._server = tinker.types, sizes, server
        self._client = tinker.ServiceClient(base_url=server.address, api_key=server.key)
        created = [self._client.create_lora_training_client(base_model="policy", rank=RANK) for _ in range(NUM_CLIENTS)]
        self.trainers = [one.result() for one in created]
        rows = np.random.default_rng(0).integers(0, VOCAB_SIZE, (sizes["rows"], sizes["row_tokens"] + 1)).tolist()
        self._data = [
            self._types.Datum(
                model_input=self._types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]}
            )
            for row in rows
        ]
        self.samplers = [one.save_weights_and_get_sampling_client().result() for one in self.trainers]

    def close(self) -> None:
        """End the session."""
        self._client.close("success").result()

    def overhead(self) -> float:
        """Return the cost of a forward_backward beside the learner's own time, as a share of it."""
        before = len(self._server.spent["forward_backward"])
        total = seconds_of(lambda: self.trainers[0].forward_backward(self._data, "cross_entropy").result())
        return total / sum(self._server.spent["forward_backward"][before:]) - 1

    def train(self, trainers: Sequence[Any]) -> None:
        """Take the steps of all clients, by the given ones."""
        steps = NUM_CLIENTS * self._sizes["steps"] // len(trainers)
        asked = []
        for _ in range(steps):
            for one in trainers:
                asked.append(one.forward_backward(self._data, "cross_entropy"))
                asked.append(one.optim_step(self._types.AdamParams(learning_rate=1e-4)))
        for future in asked:
            future.result()

    def sample(self, samplers: Sequence[Any]) -> None:
        """Take the samples of all clients, by the given ones."""
        prompts = [self._types.ModelInput.from_ints([20 + index, 21, 22]) for index in range(self._sizes["samples"])]
        params = self._types.SamplingParams(max_tokens=self._sizes["max_tokens"])
        times = NUM_CLIENTS // len(samplers)
        asked = [one.sample(prompt, 1, params) for _ in range(times) for prompt in prompts for one in samplers]
        for future in asked:
            future.result()

    def first_token(self) -> tuple[float, float]:
        """Return milliseconds from saved weights to the first token, and those of the slot's update in it."""
        prompt, params = self._types.ModelInput.from_ints([20, 21, 22]), self._types.SamplingParams(max_tokens=1)

        def save_and_sample() -> None:
            self.trainers[0].save_weights_and_get_sampling_client().result().sample(prompt, 1, params).result()

        total = seconds_of(save_and_sample)
        return 1e3 * total, 1e3 * self._server.spent["serve"][-1]


def main(words: Sequence[str]) -> int:
    """Run the measurements and return the exit status; targets are only reported."""
    options = parse(words)
    found: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bs-") as folder:
        write_chat_policy(options.model, Path(folder) / "policy")
        with Server(Path(folder), engine=options.engine, is_inline=options.quick) as server:
            clients = Clients(server, QUICK if options.quick else FULL)
            for number in range(options.rounds + 1):
                one_round(clients, found if number else defaultdict(list), is_even=number % 2 == 0)
            clients.close()
    results = [row_of(name, values) for name, values in found.items()]
    environment = {"cores": os.cpu_count(), "load_after": os.getloadavg()[0], "engine": options.engine}
    report = {"benchmark": "service", "date": time.strftime("%Y-%m-%d"), "is_quick": options.quick}
    report |= {"model": options.model, "rounds": options.rounds, "environment": environment, "results": results}
    for row in results:
        say(f"  {row['workload']:20}{row['median']:10.3f}   {row['low']:.3f} to {row['high']:.3f}   {verdict(row)}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- service", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="1m", help="size of the policy")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="the engine that samples")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after a warm-up")
    parser.add_argument("--quick", action="store_true", help="one small round, no vLLM, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.engine = 1, "transformers"
    return options


def one_round(clients: Clients, found: defaultdict[str, list[float]], *, is_even: bool) -> None:
    """Measure everything once; one client and all of them take turns in being first."""
    found["overhead"].append(clients.overhead())
    for name, run, all_of in (
        ("training_ratio", clients.train, clients.trainers),
        ("sampling_ratio", clients.sample, clients.samplers),
    ):
        order = [all_of[:1], all_of] if is_even else [all_of, all_of[:1]]
        spent = {len(some): seconds_of(lambda run=run, some=some: run(some)) for some in order}  # type: ignore[misc]
        found[name].append(spent[1] / spent[NUM_CLIENTS])
    total_ms, slot_ms = clients.first_token()
    found["first_token_ms"].append(total_ms)
    found["slot_ms"].append(slot_ms)
    found["beyond_slot_ms"].append(total_ms - slot_ms)
    say(f"{time.strftime('%H:%M:%S')}  " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items()))


def row_of(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the result of one measurement."""
    wanted, middle = WANTED.get(name), median(values)
    is_met = None if wanted is None else middle >= wanted if name.endswith("ratio") else middle <= wanted
    spread = {"low": min(values), "high": max(values)}
    return {"workload": name, "median": middle, **spread, "wanted": wanted, "is_met": is_met}


def verdict(row: dict[str, Any]) -> str:
    """Met or missed."""
    return "" if row["wanted"] is None else f"wanted {row['wanted']:g}: {'met' if row['is_met'] else 'missed'}"


def seconds_of(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
