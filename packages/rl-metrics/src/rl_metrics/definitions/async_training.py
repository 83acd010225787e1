"""Metrics of the asynchronous trainer: waits, staleness and losses."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import BY_DESIGN, GUIDE, THUMB, mean, one, seconds

PERCENTILES = ("tp50", "tp95", "tp99")

ASYNC = (
    mean(
        "fully_async/trainer/idle_ratio",
        "1",
        "Share of the time since the previous step that the learner did not work on a step: waiting for rollouts, "
        "packing weights, the previous publication, a checkpoint, or a validation that blocks the step.",
        over="step",
        healthy=Band(high=0.5, source=GUIDE),
    ),
    mean(
        "fully_async/rollouter/idle_ratio",
        "1",
        "Share of the engines' time since the previous step without generation, weight updates included.",
        over="step",
        healthy=Band(high=0.8, source=THUMB),
    ),
    one(
        "fully_async/count/stale_trajectory_processed",
        "trajectories",
        "Trajectories trained in this launch with a token sampled by older weights than the learner's.",
    ),
    one("fully_async/count/current_param_version", "versions", "Weight updates published so far."),
    one(
        "fully_async/count/total_generated_samples",
        "trajectories",
        "Trajectories from engines or a skip cache in this launch, including those of refused groups.",
    ),
    one(
        "fully_async/count/dropped_stale_samples",
        "groups",
        "Groups dropped in this launch because they were too stale.",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "fully_async/count/staleness_samples",
        "groups",
        "Groups started and not yet trained: in flight or ready.",
    ),
    one(
        "fully_async/count/dropped/{reason}",
        "groups",
        "Groups dropped in this launch for this reason: stale, failed, refused, or lost with the rollouter.",
    ),
    one(
        "fully_async/partial/total_partial_num",
        "trajectories",
        "Trajectories of the step with tokens of several versions, because generation continued under new weights.",
        reduction="sum",
    ),
    mean(
        "fully_async/partial/partial_ratio",
        "1",
        "Share of the step's trajectories with tokens of several versions.",
        over="trajectory",
    ),
    one(
        "fully_async/partial/max_partial_span",
        "versions",
        "Newest minus oldest version in a trajectory, maximum.",
        reduction="max",
    ),
    mean(
        "fully_async/partial/mean_partial_span",
        "versions",
        "Newest minus oldest version in a trajectory of several versions, mean; 0 if there is none.",
        over="step",
    ),
    mean(
        "fully_async/processing_time/avg",
        "s",
        "Time from the start of a group's generation until it can train, mean.",
        over="group",
    ),
    one("fully_async/processing_time/max", "s", "Time until a group can train, maximum.", reduction="max"),
    one("fully_async/processing_time/min", "s", "Time until a group can train, minimum.", reduction="min"),
    *(
        one(f"fully_async/processing_time/{p}", "s", f"Time until a group can train, percentile {p[2:]}.")
        for p in PERCENTILES
    ),
    mean(
        "fully_async/staleness/mean",
        "versions",
        "The learner's policy version when a group trains minus that of the group's oldest token, mean.",
        over="group",
    ),
    one(
        "fully_async/staleness/max",
        "versions",
        "Staleness of a group, maximum; at most max_staleness.",
        reduction="max",
    ),
    one("fully_async/staleness/p50", "versions", "Staleness of a group, percentile 50."),
    one("fully_async/staleness/p95", "versions", "Staleness of a group, percentile 95."),
    one("fully_async/queue/ready_groups", "groups", "Groups that are ready and wait for the learner."),
    one("fully_async/queue/inflight_groups", "groups", "Groups in generation."),
    one("fully_async/queue/issued_groups", "groups", "Groups issued that no engine has started."),
    one("fully_async/queue/rows", "rows", "Rows in the queue."),
    one("fully_async/queue/bytes", "bytes", "Memory of the queue's rows."),
    one(
        "fully_async/weight_update/stall_s",
        "s",
        "Time that the step's weight updates stopped generation, of the engine stopped longest.",
        reduction="sum",
    ),
    one("fully_async/weight_update/pack_s", "s", "Time to pack the learner's weights.", reduction="sum"),
    one(
        "fully_async/weight_update/update_s",
        "s",
        "Time for the engines to receive and load the weights.",
        reduction="sum",
    ),
    one("fully_async/weight_update/proof_s", "s", "Time of the weight proof.", reduction="sum"),
    one(
        "fully_async/weight_update/drain_s",
        "s",
        "Time before updates to wait for complete rollouts, or to pause partial ones.",
        reduction="sum",
    ),
    one(
        "fully_async/restarts/{role}",
        "times",
        "Restarts of this role (rollouter, learner, teachers) after it died, in this launch.",
    ),
    one(
        "fully_async/restarts/engines",
        "times",
        "Restarts of the present engines after they died, since their rollouter started, in total.",
    ),
    one("fully_async/engines/serving", "engines", "Engines that serve the current weights."),
    one("fully_async/engines/total", "engines", "Engines in total."),
    one(
        "perf/rollouter_tokens_per_s", "tokens/s", "Tokens generated per second by all engines since the previous step."
    ),
    one("perf/trainer_tokens_per_s", "tokens/s", "Tokens trained per second of work on the step, without waiting."),
    one("perf/teacher_tokens_per_s", "tokens/s", "Tokens scored per second by all teachers since the previous step."),
    seconds("wait_rollouts", "Waiting for the step's groups and their scores, or for the end of a broadcast"),
)
