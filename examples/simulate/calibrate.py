"""Fit the costs of the built-in workload to the published table, and print them.

    python examples/simulate/calibrate.py

The script fits ten numbers. Eight are fitted to the synchronous rows: to the three phases of each, and to the step time
in the first hundred steps of runs that became slower. Two are fitted to the asynchronous row of 64:64: to its update
and its step. The simulation predicts all other rows.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from published import PublishedRow, published_rows, simulate_row

from rl_rollout.simulation import Workload, read_workload, simulate_sync

NAMES = ("sigma", "decode_s_at_1024", "update", "update_s", "logprobs", "logprobs_s", "scale_32", "scale_128")
START = (1.0, 0.14, 6e-4, 4.0, 1.5e-4, 50.0, 2.0, 1.3)
STEPS = 12
SEED = 0


def main() -> None:
    """Fit the synchronous rows, then the two numbers of the asynchronous row."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = published_rows()
    sync = [row for row in rows if row.mode == "sync"]
    logs = gauss_newton(lambda logs: sync_residuals(np.exp(logs), sync), np.log(START))
    values = np.exp(logs)
    print("rms error of the synchronous rows:", float(np.sqrt(np.mean(sync_residuals(values, sync) ** 2))))
    workload = with_costs(values)
    row = next(row for row in rows if row.mode == "partial" and row.split.gpus == 128)
    learner = workload.learner
    slowdown = simulate_row(workload, row, num_versions=STEPS, seed=SEED).update_s / row.update_s
    learner = replace(
        learner,
        update_gpu_s_per_token=learner.update_gpu_s_per_token / slowdown,
        update_s=learner.update_s / slowdown,
        colocated_slowdown=slowdown,
    )
    for _ in range(3):  # spread the missing time over the version's four steps
        found = simulate_row(replace(workload, learner=learner), row, num_versions=STEPS, seed=SEED)
        learner = replace(learner, step_s=learner.step_s + (row.step_s - found.step_s) / 4)
    print({name: float(f"{value:.4g}") for name, value in zip(NAMES, values, strict=True)})
    print("learner:", learner)


def with_costs(values: NDArray[np.float64], *, scale: float = 1.0) -> Workload:
    """Return the workload with these costs and with lengths times `scale`, without the asynchronous row's numbers."""
    sigma, at_1024, update, update_s, logprobs, logprobs_s, _, _ = (float(value) for value in values)
    base = read_workload()
    return replace(
        base,
        lengths=replace(base.lengths, sigma=sigma, scale=scale),
        engine=replace(base.engine, decode=(base.engine.decode[0], (1024, at_1024))),
        learner=replace(
            base.learner,
            update_gpu_s_per_token=update,
            update_s=update_s,
            logprobs_gpu_s_per_token=logprobs,
            logprobs_s=logprobs_s,
            step_s=0.0,
            colocated_slowdown=1.0,
        ),
    )


def sync_residuals(values: NDArray[np.float64], rows: Sequence[PublishedRow]) -> NDArray[np.float64]:
    """Return the logarithms of simulated over published seconds."""
    scales = {32: values[6], 64: 1.0, 128: values[7]}
    found = []
    for row in rows:
        gpus = row.split.gpus
        phases = phase_seconds(with_costs(values, scale=float(scales[gpus])), gpus)
        published = (row.gen_s, row.logprobs_s, row.update_s)
        found += [np.log(ours / theirs) for ours, theirs in zip(phases, published, strict=True)]
        if gpus != 64:  # the run on 64 GPUs did not become slower and defines the workload's lengths
            outside_s = row.total_s[-1] / 400 - row.step_s
            other_s = row.step_s - sum(published)
            first_s = row.total_s[0] / 100 - outside_s
            found.append(np.log((sum(phase_seconds(with_costs(values), gpus)) + other_s) / first_s))
    return np.array(found)


def phase_seconds(workload: Workload, gpus: int) -> tuple[float, float, float]:
    """Return the seconds of generation, logprobs and update in a synchronous step."""
    outcome = simulate_sync(workload, gpus=gpus, num_steps=STEPS, seed=SEED)
    return outcome.gen_s, outcome.logprobs_s, outcome.update_s


def gauss_newton(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimize the sum of squares with damped steps (Levenberg-Marquardt)."""
    at, now, damping, width = start, residuals(start), 1e-3, 0.02
    for _ in range(20):
        slopes = np.stack([(residuals(at + width * axis) - now) / width for axis in np.eye(len(at))], axis=1)
        gained = 0.0
        while damping < 1e3 and gained <= 0:
            step = -np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), slopes.T @ now)
            step = np.clip(step, -0.4, 0.4)
            then = residuals(at + step)
            gained = float(now @ now - then @ then)
            damping *= 0.2 if gained > 0 else 5.0
        if gained <= 0:
            break
        at, now = at + step, then
        if gained < 1e-5:
            break
    return at


if __name__ == "__main__":
    main()
