"""One side of benchmarks/distillation.py, which answers requests in lines of JSON.

    -> (started)                            <- "ready"
    -> {"operation": "step", "seed": n}     <- {"step_s", "peak_bytes", "start_bytes", "loss", "grad_norm_hidden", ...}
    -> {"operation": "quit"}, or end of input    <- (ends with status 0)

A request that fails is answered {"error": "..."}, and the process ends with status 1.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _distillation_workload import PRESETS, Step, make_matrix, make_step
from _protocol import private_stdout, write
from torch import Tensor

from rl_distill.megatron.head import logits_at_once
from rl_distill.objectives import (
    DivergenceOptions,
    LogitDivergence,
    TeacherTokens,
    VocabularyPart,
    chunked_head_divergence,
)


def ours(step: Step, matrix: Tensor) -> Tensor:
    """Compute the loss as the Megatron learner does for pure distillation, including its metrics."""
    teacher = TeacherTokens(
        logprobs=torch.cat([step.logprobs[:, :1], step.logprobs], 1),
        ids=torch.cat([step.ids[:, :1], step.ids], 1),
        index=torch.zeros(len(step.ids), dtype=torch.int64, device=step.ids.device),
    )
    divergence = LogitDivergence(options=DivergenceOptions(), part=VocabularyPart(len(matrix)))
    found = chunked_head_divergence(
        step.hidden,
        matrix,
        weights=step.weights,
        teacher=teacher,
        divergence=divergence,
        targets=teacher.ids[:, 0],
        chunk_logits=logits_at_once(step.hidden.device, is_alone=True),
    )
    return found.weighted.sum()


def full_softmax(step: Step, matrix: Tensor) -> Tensor:
    """Compute the log-softmax of all logits, and compare the top k and the remaining mass."""
    log_q = torch.log_softmax((step.hidden @ matrix.T).float(), -1).gather(-1, step.ids)
    log_p = step.logprobs
    top = (log_p.exp() * (log_p - log_q)).sum(-1)
    p_tail, q_tail = (1.0 - of.exp().sum(-1) for of in (log_p, log_q))
    return (step.weights * (top + p_tail * (p_tail.log() - q_tail.log()))).sum()


SIDES: dict[str, Callable[[Step, Tensor], Tensor]] = {"ours": ours, "full_softmax": full_softmax}


def main() -> int:
    """Answer requests until there are no more, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=list(SIDES), required=True)
    parser.add_argument("--preset", choices=list(PRESETS), required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answers = private_stdout()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        preset = PRESETS[options.preset]
        matrix = make_matrix(preset, device).requires_grad_()
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            if request["operation"] != "step":
                break
            step = make_step(preset, seed=request["seed"], device=device)
            write(answers, json.dumps(timed_step(SIDES[options.side], step, matrix)))
    except Exception as error:
        traceback.print_exc()
        write(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def timed_step(loss_of: Callable[[Step, Tensor], Tensor], step: Step, matrix: Tensor) -> dict[str, Any]:
    """Run forward and backward to the gradients of hidden states and matrix; measure time and memory."""
    step.hidden.requires_grad_()
    matrix.grad = None
    start_bytes = begin_peak()
    started = time.perf_counter()
    loss = loss_of(step, matrix)
    loss.backward()  # type: ignore[no-untyped-call]
    wait_for_device()
    step_s = time.perf_counter() - started
    return {
        "step_s": step_s,
        "peak_bytes": peak_bytes() - start_bytes,
        "start_bytes": start_bytes,
        "loss": float(loss.detach()),
        "grad_norm_hidden": gradient_norm(step.hidden),
        "grad_norm_weight": gradient_norm(matrix),
        "num_tokens": len(step.ids),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def gradient_norm(tensor: Tensor) -> float:
    """Return the norm of the gradient."""
    if tensor.grad is None:
        raise RuntimeError("there is no gradient")
    return float(tensor.grad.float().norm())


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def begin_peak() -> int:
    """Reset the peak memory; return the bytes in use."""
    wait_for_device()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak since then: that of tensors on a GPU, else resident memory."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """Return a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
