"""Metrics of the asynchronous trainer: waits, staleness and losses."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import BY_DESIGN, THUMB, mean, one, seconds

PERCENTILES = ("tp50", "tp95", "tp99")

ASYNC = (
    mean(
        "fully_async/trainer/idle_ratio",
        "1",
        "Share of the time since the step before in which the learner did not work on a step: waiting for rollouts, "
        "packing weights, waiting for the publication before, a checkpoint, a validation that the step waits for.",
        over="step",
        healthy=Band(high=0.1, source=THUMB),
    ),
    mean(
        "fully_async/rollouter/idle_ratio",
        "1",
        "Share of the engines' time since the step before in which they had nothing to generate, weight updates "
        "included.",
        over="step",
        healthy=Band(high=0.2, source=THUMB),
    ),
    one(
        "fully_async/count/stale_trajectory_processed",
        "trajectories",
        "Trajectories with a token of older weights than those that they trained, in this launch.",
    ),
    one("fully_async/count/current_param_version", "versions", "Weight updates published so far."),
    one(
        "fully_async/count/total_generated_samples",
        "trajectories",
        "Trajectories that engines, or a skip cache, gave in this launch; those of refused groups too.",
    ),
    one(
        "fully_async/count/dropped_stale_samples",
        "groups",
        "Groups dropped in this launch as they were too stale.",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "fully_async/count/staleness_samples",
        "groups",
        "Groups that were started and are not trained: in flight or ready.",
    ),
    one(
        "fully_async/count/dropped/{reason}",
        "groups",
        "Groups dropped in this launch for this reason: stale, failed, refused, or lost with the rollouter.",
    ),
    one(
        "fully_async/partial/total_partial_num",
        "trajectories",
        "Trajectories of the step whose tokens have more than one version: generation went on under new weights.",
        reduction="sum",
    ),
    mean("fully_async/partial/partial_ratio", "1", "Share of the step's trajectories that are so.", over="trajectory"),
    one(
        "fully_async/partial/max_partial_span",
        "versions",
        "Newest minus oldest version in a trajectory, largest.",
        reduction="max",
    ),
    mean(
        "fully_async/partial/mean_partial_span",
        "versions",
        "Newest minus oldest version in a trajectory of several versions, mean; 0 without one.",
        over="step",
    ),
    mean(
        "fully_async/processing_time/avg",
        "s",
        "From a group's start of generation until it can train, mean.",
        over="group",
    ),
    one("fully_async/processing_time/max", "s", "The same, largest.", reduction="max"),
    one("fully_async/processing_time/min", "s", "The same, smallest.", reduction="min"),
    *(one(f"fully_async/processing_time/{p}", "s", f"The same, percentile {p[2:]}.") for p in PERCENTILES),
    mean(
        "fully_async/staleness/mean",
        "versions",
        "Version of the weights that a group trains minus that of its oldest token, mean.",
        over="group",
    ),
    one("fully_async/staleness/max", "versions", "The same, largest; at most max_staleness.", reduction="max"),
    one("fully_async/staleness/p50", "versions", "The same, percentile 50."),
    one("fully_async/staleness/p95", "versions", "The same, percentile 95."),
    one("fully_async/queue/ready_groups", "groups", "Groups that can train and wait for the learner."),
    one("fully_async/queue/inflight_groups", "groups", "Groups that are being generated."),
    one("fully_async/queue/issued_groups", "groups", "Groups issued that no engine has begun."),
    one("fully_async/queue/rows", "rows", "Rows that the queue holds."),
    one("fully_async/queue/bytes", "bytes", "Memory that the queue's rows take."),
    one(
        "fully_async/weight_update/stall_s",
        "s",
        "In which engines did not generate for weight updates of the step, the longest of them.",
        reduction="sum",
    ),
    one("fully_async/weight_update/pack_s", "s", "In which the learner packed its weights.", reduction="sum"),
    one("fully_async/weight_update/update_s", "s", "In which engines received and loaded them.", reduction="sum"),
    one("fully_async/weight_update/proof_s", "s", "In which the update was proved.", reduction="sum"),
    one(
        "fully_async/weight_update/drain_s",
        "s",
        "In which whole rollouts were waited for, or partial ones paused, before updates.",
        reduction="sum",
    ),
    one(
        "fully_async/restarts/{role}",
        "times",
        "How often this role died and was started again in this launch: rollouter, learner, teachers.",
    ),
    one(
        "fully_async/restarts/engines",
        "times",
        "How often the engines that there are died and were started again since their rollouter started, together.",
    ),
    one("fully_async/engines/serving", "engines", "Engines that serve the current weights."),
    one("fully_async/engines/total", "engines", "Engines that there are."),
    one("perf/rollouter_tokens_per_s", "tokens/s", "Tokens generated a second since the step before, by all engines."),
    one("perf/trainer_tokens_per_s", "tokens/s", "Tokens trained by the second of work on the step, without waiting."),
    one("perf/teacher_tokens_per_s", "tokens/s", "Tokens scored a second since the step before, by all teachers."),
    seconds("wait_rollouts", "Waiting for the groups of the step and their scores, or for the end of a broadcast"),
)
