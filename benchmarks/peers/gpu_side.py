"""Process of a group in benchmarks/gpu.py: load models, make the measurements, and report each at once.

    python gpu_side.py JOB, a file with the fields of `Job` in JSON
        <- {"row": name} as one begins, then {"row": name, "values": {...}} or {"row": name, "error": "..."}

If loading fails, every row gets the error. The exit status is 0 unless the process itself dies.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Protocol

import torch
from _gpu_plan import BOUND, GIB, WORKLOADS, make_rows, preset_of
from _gpu_policy import (
    OUR_TRAINED_BYTES,
    TRAINED_BYTES,
    activation_bytes,
    free_for_activations,
    num_parameters,
    our_activation_bytes,
    recomputed_modules,
    step_flops,
)
from _learner_protocol import peak_bytes, timed_step
from _learner_workload import Rows
from _protocol import private_stdout, write

from rl_distill.megatron.layers import can_compile

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from cpu_kernels import install_cpu_kernels

Values = dict[str, Any]
ENOUGH_S = 10.0
"""Seconds of timed steps after which no further step is timed."""
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Texts of out-of-memory errors from cuBLAS and the driver, which are not `torch.OutOfMemoryError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a group.

    Attributes:
        kind: Kind of measurement, a key of `KINDS`.
        rows: Names of the measurements.
        config: The policy's config.json; empty without a policy.
        policy: Its folder.
        is_short: Tiny sizes, and one step per measurement.
        peak_flops: Dense bfloat16 peak of the GPU; None if unknown.
    """

    kind: str
    rows: tuple[str, ...]
    config: dict[str, Any]
    policy: str
    is_short: bool
    peak_flops: float | None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Side(Protocol):
    """The loaded models of a kind of group."""

    def measure(self, row: str) -> Values:
        """One measurement."""

    def close(self) -> None:
        """Free it."""


class Trained:
    """Steps of a learner, with as much recomputation in the backward pass as the memory requires."""

    trained_bytes = TRAINED_BYTES

    def __init__(self, job: Job) -> None:
        """Build nothing yet, because the first row determines what is needed."""
        self._job = job
        self._mode = ""
        self._side: Any = None
        self._is_warm = False

    def measure(self, row: str) -> Values:
        """Return the tokens per second and MFU of a workload.

        Raises:
            torch.OutOfMemoryError: It does not fit even with full recomputation.
        """
        for mode, budget in self._ways(row):
            found = self._attempt(row, mode, budget)
            if found is not None:
                return found
            self.close()  # only now, because the error's traceback held tensors
        raise torch.OutOfMemoryError(f"{row} does not fit, even with full recomputation in the backward pass.")

    def _attempt(self, row: str, mode: str, budget: int) -> Values | None:
        try:
            return self._measured(row, mode, budget)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in _OUT_OF_MEMORY):
                raise
            traceback.print_exc()
            return None

    def close(self) -> None:
        """Free the learner."""
        if self._side is not None:
            self._free()
        self._side, self._mode = None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ways(self, row: str) -> list[tuple[str, int]]:
        """Yield recomputation modes and micro-batch tokens that may fit, the best first."""
        config, budget = self._job.config, preset_of(self._job.config, row, is_short=self._job.is_short).budget
        if self._job.device.type == "cpu":
            return [("none", budget)]
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        left = free_for_activations(config, memory_bytes=memory_bytes, trained_bytes=self.trained_bytes)
        longest = int(make_rows(row, config, seed=0, is_short=self._job.is_short).lengths.max())
        ways = [(mode, tokens) for mode, tokens in self._all_ways(budget) if tokens >= longest]
        return [(mode, tokens) for mode, tokens in ways if mode == "full" or self._kept_bytes(mode, tokens) < left]

    def _all_ways(self, budget: int) -> list[tuple[str, int]]:
        return [("none", budget), ("none", budget // 2), ("full", budget)]

    def _kept_bytes(self, mode: str, num_tokens: int) -> float:  # noqa: ARG002 - ours has more modes
        """Estimate the bytes that a micro-batch keeps for its backward pass without full recomputation."""
        return activation_bytes(self._job.config, num_tokens)

    def _measured(self, row: str, mode: str, budget: int) -> Values:
        self._ready(mode)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        found = self._timed(row, self._packing(budget))
        return {**found, "recompute": mode, "micro_batch_tokens": budget, **self._about()}

    def _ready(self, mode: str) -> None:
        if mode != self._mode:
            self.close()
            self._side, self._mode = self._open(mode), mode

    def _timed(self, row: str, step: Callable[[Rows], Any]) -> Values:
        """Return the times of a workload's steps, without the first ones, which compile kernels."""
        num_warm, num_timed = 1 if self._is_warm or self._job.is_short else 2, 1 if self._job.is_short else 3
        config, side = self._job.config, _Stepped(step)
        answers: list[Values] = []
        while len(answers) < num_warm + num_timed and sum(one["step_s"] for one in answers[num_warm:]) < ENOUGH_S:
            rows = make_rows(row, config, seed=len(answers), is_short=self._job.is_short)
            answers.append(timed_step(side, rows))
        self._is_warm = True
        seconds = median(answer["step_s"] for answer in answers[num_warm:])
        peak = self._job.peak_flops
        return {
            "tokens_per_s": rows.input_ids.size / seconds,
            "mfu": None if peak is None else step_flops(config, rows) / seconds / peak,
            "step_s": seconds,
            "steps_s": [answer["step_s"] for answer in answers],
            "num_tokens": rows.input_ids.size,
            "num_computed_tokens": answers[-1]["num_computed_tokens"],
            "losses": [answer["loss"] for answer in answers],
            "grad_norms": [answer["grad_norm"] for answer in answers],
            "peak_memory_gib": peak_bytes() / GIB,
            "num_layers": config["num_hidden_layers"],
            "num_parameters": num_parameters(config),
        }

    def _open(self, mode: str) -> Any:
        raise NotImplementedError

    def _packing(self, budget: int) -> Callable[[Rows], Any]:
        """Return the side's step, with a number of tokens per micro-batch."""
        self._side.budget = budget
        step: Callable[[Rows], Any] = self._side.step
        return step

    def _free(self) -> None:
        """Free the side."""

    def _about(self) -> Values:
        return {}


@dataclass
class _Stepped:
    """Return a step for `timed_step`."""

    step: Callable[[Rows], Any]


class Ours(Trained):
    """Our Megatron learner; in the short form without a GPU, test kernels replace those of the GPU."""

    kernels = "auto"
    trained_bytes = OUR_TRAINED_BYTES

    def _all_ways(self, budget: int) -> list[tuple[str, int]]:
        return [("none", budget), ("selective", budget), ("none", budget // 2), ("full", budget)]

    def _kept_bytes(self, mode: str, num_tokens: int) -> float:
        return our_activation_bytes(self._job.config, num_tokens, is_selective=mode == "selective")

    def _measured(self, row: str, mode: str, budget: int) -> Values:
        """As in `Trained`; with shared prefixes also row by row, or their bound."""
        if row == "bound":
            return {"bound": self._bound(mode, budget)}
        found = super()._measured(row, mode, budget)
        if row == BOUND or WORKLOADS[row].group > 1:
            self._side.repack(tokens=budget, shares=False)
            apart = self._timed(row, self._side.step)
            found["times_as_fast_as_apart"] = found["tokens_per_s"] / apart["tokens_per_s"]
            found["num_computed_tokens_apart"] = apart["num_computed_tokens"]
        return found

    def _bound(self, mode: str, budget: int) -> float:
        self._ready(mode)
        self._side.repack(tokens=budget, shares=False)
        rows = make_rows("bound", self._job.config, seed=0, is_short=self._job.is_short)
        self._side.step(rows)  # compiles, so it is not measured
        bound: float = self._side.bound(rows)
        return bound

    def _open(self, mode: str) -> Any:
        from our_learner import Ours as Learner

        preset = preset_of(self._job.config, "4k", is_short=self._job.is_short)
        kernels = self.kernels
        if self._job.device.type == "cpu":
            install_cpu_kernels()
            kernels = "fused"
        options: dict[str, Any] = {"kernels": kernels, "recompute": mode}
        if mode == "selective":
            options["recompute_modules"] = recomputed_modules(self._job.config)
        return Learner(Path(self._job.policy), preset, **options)

    def _about(self) -> Values:
        """Return whether the fused passes are compiled, and which flash attention runs."""
        named = getattr(torch.nn.attention, "current_flash_attention_impl", None)
        has_gpu = self._job.device.type == "cuda"
        flash = ((named() if named is not None else None) or "FA2") if has_gpu else None
        is_compiled = can_compile(self._job.device.type) and not self._job.is_short
        return {"is_compiled": is_compiled, "flash": flash}

    def _packing(self, budget: int) -> Callable[[Rows], Any]:
        self._side.repack(tokens=budget, shares=True)
        step: Callable[[Rows], Any] = self._side.step
        return step

    def _free(self) -> None:
        self._side.close()


class OursOnTransformerEngine(Ours):
    """Our Megatron learner with Transformer Engine's layers."""

    kernels = "transformer_engine"


class Transformers(Trained):
    """transformers, with flash attention if it is installed."""

    def _kept_bytes(self, mode: str, num_tokens: int) -> float:
        """As in `Trained`, plus torch's float32 copies of norms and rotations."""
        return 1.6 * super()._kept_bytes(mode, num_tokens)

    def _open(self, mode: str) -> Any:
        from transformers_learner import Padded

        def adapted(model: Any) -> Any:
            if mode == "full":
                model.gradient_checkpointing_enable()
            return model

        preset = preset_of(self._job.config, "4k", is_short=self._job.is_short)
        return Padded(Path(self._job.policy), preset, adapted)

    def _about(self) -> Values:
        return {"attention": self._side.attention}


class Megatron(Trained):
    """megatron-core's own model and layers; on a GPU those of Transformer Engine."""

    def _open(self, mode: str) -> Any:
        from megatron_model import MegatronModel

        return MegatronModel(self._job.config, recompute=mode, device=self._job.device)

    def _free(self) -> None:
        self._side.close()

    def _about(self) -> Values:
        return {"layers": self._side.layers}


def parts(name: str) -> Callable[[Job], Side]:
    """Return a kind from `gpu_parts.py`, imported on demand."""

    def opened(job: Job) -> Side:
        import gpu_parts

        side: Side = getattr(gpu_parts, name)(job)
        return side

    return opened


KINDS: dict[str, Callable[[Job], Side]] = {
    "ours": Ours,
    "transformer_engine": OursOnTransformerEngine,
    "transformers": Transformers,
    "megatron": Megatron,
    "weights": parts("Published"),
    "distillation": parts("Distilled"),
    "queue": parts("Queued"),
}


def run_group(job: Job, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Make the measurements; report an error and continue with the next."""
    try:
        side = KINDS[job.kind](job)
    except Exception as error:
        traceback.print_exc()
        for row in job.rows:
            tell({"row": row, "error": _described(error)})
        return
    for row in job.rows:
        tell({"row": row})
        try:
            # Compiling takes longer than the whole short form, and has its own tests.
            with torch.compiler.set_stance("force_eager") if job.is_short else contextlib.nullcontext():
                values = side.measure(row)
        except Exception as error:
            traceback.print_exc()
            tell({"row": row, "error": _described(error)})
        else:
            tell({"row": row, "values": values})
    with contextlib.suppress(Exception):  # results have been reported
        side.close()


def about_machine() -> Values:
    """Return the report's facts about the machine; the GPU's memory determines the sizes."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.empty(1, device="cuda")  # fails if torch does not support the variables
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": list(torch.cuda.get_device_capability()) if has_gpu else None,
    }


def _described(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(said[:3])[:600] or 'no message'}"


def main(words: list[str]) -> NoReturn:
    """Run the job of a file, or describe the machine."""
    answers = private_stdout()
    if words == ["--about"]:
        write(answers, json.dumps(about_machine()))
    else:
        job = Job(**json.loads(Path(words[0]).read_text()))
        run_group(job, lambda row: write(answers, json.dumps(row)))
    for stream in (answers, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # the teardown of CUDA and NCCL may hang


if __name__ == "__main__":
    main(sys.argv[1:])
