"""Metrics of the asynchronous trainer: waits, staleness and losses."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import (
    GUIDE,
    ZERO,
    at_most,
    group_mean,
    highest,
    lowest,
    newest,
    seconds,
    step_mean,
    total,
    trajectory_mean,
)

PERCENTILES = ("tp50", "tp95", "tp99")

ASYNC = (
    step_mean(
        "fully_async/trainer/idle_ratio",
        "Share of the time since the previous step that the learner did not work on a step: waiting for rollouts, "
        "packing weights, the previous publication, a checkpoint, or a validation that blocks the step.",
        healthy=Band(high=0.5, source=GUIDE),
    ),
    step_mean(
        "fully_async/rollouter/idle_ratio",
        "Share of the engines' time since the previous step without generation, weight updates included.",
        healthy=at_most(0.8),
    ),
    newest(
        "fully_async/count/stale_trajectory_processed",
        "Trajectories trained in this launch with a token sampled by older weights than the learner's.",
        "trajectories",
    ),
    newest("fully_async/count/current_param_version", "Weight updates published so far.", "versions"),
    newest(
        "fully_async/count/total_generated_samples",
        "Trajectories from engines or a skip cache in this launch, including those of refused groups.",
        "trajectories",
    ),
    newest(
        "fully_async/count/dropped_stale_samples",
        "Groups dropped in this launch because they were too stale.",
        "groups",
        healthy=ZERO,
    ),
    newest("fully_async/count/staleness_samples", "Groups started and not yet trained: in flight or ready.", "groups"),
    newest(
        "fully_async/count/dropped/{reason}",
        "Groups dropped in this launch for this reason: stale, failed, refused, or lost with the rollouter.",
        "groups",
    ),
    total(
        "fully_async/partial/total_partial_num",
        "Trajectories of the step with tokens of several versions, because generation continued under new weights.",
        "trajectories",
    ),
    trajectory_mean(
        "fully_async/partial/partial_ratio", "Share of the step's trajectories with tokens of several versions."
    ),
    highest(
        "fully_async/partial/max_partial_span", "Newest minus oldest version in a trajectory, maximum.", "versions"
    ),
    step_mean(
        "fully_async/partial/mean_partial_span",
        "Newest minus oldest version in a trajectory of several versions, mean; 0 if there is none.",
        "versions",
    ),
    group_mean(
        "fully_async/processing_time/avg", "Time from the start of a group's generation until it can train, mean.", "s"
    ),
    highest("fully_async/processing_time/max", "Time until a group can train, maximum.", "s"),
    lowest("fully_async/processing_time/min", "Time until a group can train, minimum.", "s"),
    *(
        newest(f"fully_async/processing_time/{p}", f"Time until a group can train, percentile {p[2:]}.", "s")
        for p in PERCENTILES
    ),
    group_mean(
        "fully_async/staleness/mean",
        "The learner's policy version when a group trains minus that of the group's oldest token, mean.",
        "versions",
    ),
    highest("fully_async/staleness/max", "Staleness of a group, maximum; at most max_staleness.", "versions"),
    newest("fully_async/staleness/p50", "Staleness of a group, percentile 50.", "versions"),
    newest("fully_async/staleness/p95", "Staleness of a group, percentile 95.", "versions"),
    newest("fully_async/queue/ready_groups", "Groups that are ready and wait for the learner.", "groups"),
    newest("fully_async/queue/inflight_groups", "Groups in generation.", "groups"),
    newest("fully_async/queue/issued_groups", "Groups issued that no engine has started.", "groups"),
    newest("fully_async/queue/rows", "Rows in the queue.", "rows"),
    newest("fully_async/queue/bytes", "Memory of the queue's rows.", "bytes"),
    total(
        "fully_async/weight_update/stall_s",
        "Time that the step's weight updates stopped generation, of the engine stopped longest.",
        "s",
    ),
    total("fully_async/weight_update/pack_s", "Time to pack the learner's weights.", "s"),
    total("fully_async/weight_update/update_s", "Time for the engines to receive and load the weights.", "s"),
    total("fully_async/weight_update/proof_s", "Time of the weight proof.", "s"),
    total(
        "fully_async/weight_update/drain_s",
        "Time before updates to wait for complete rollouts, or to pause partial ones.",
        "s",
    ),
    newest(
        "fully_async/restarts/{role}",
        "Restarts of this role (rollouter, learner, teachers) after it died, in this launch.",
        "times",
    ),
    newest(
        "fully_async/restarts/engines",
        "Restarts of the present engines after they died, since their rollouter started, in total.",
        "times",
    ),
    newest("fully_async/engines/serving", "Engines that serve the current weights.", "engines"),
    newest("fully_async/engines/total", "Engines in total.", "engines"),
    newest(
        "perf/rollouter_tokens_per_s", "Tokens generated per second by all engines since the previous step.", "tokens/s"
    ),
    newest("perf/trainer_tokens_per_s", "Tokens trained per second of work on the step, without waiting.", "tokens/s"),
    newest(
        "perf/teacher_tokens_per_s", "Tokens scored per second by all teachers since the previous step.", "tokens/s"
    ),
    seconds("wait_rollouts", "Waiting for the step's groups and their scores, or for the end of a broadcast"),
)
