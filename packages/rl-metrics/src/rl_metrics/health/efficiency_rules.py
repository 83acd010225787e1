"""Efficiency rules: use of time, memory and GPUs."""

from functools import partial

from rl_metrics.definitions.entries import GUIDE, THUMB
from rl_metrics.health import common_rules as common
from rl_metrics.health.rules import Cause, Rule, Threshold, condition

OF_STEP = "{metric} is {value:share} of the step's time (at most {max:share} is healthy)"
OF_TIME = common.share_of("time")

SLOW_REWARD = Cause("the reward takes most of the time", "see the finding reward_slow", rule="reward_slow")
LEAK = Cause(
    "memory runs short: the machine swaps, or garbage collection runs", "see the finding memory", rule="memory"
)
OTHERS = Cause("something else on the machine", "look at the machine's other processes")
STEP = ("timing_s/step", "perf/time_per_step")
REWARD_QUEUE = condition(
    "level", "timing_s/reward_wait", STEP, says=common.share_of("step's time", "sessions wait for the reward for ")
)

GPU_OWNERS = ("perf", "engine", "teacher")
BUSY_OWNERS = ("perf", "engine")
"""Teachers work only while groups arrive, so their utilization alone is no problem."""

rule = partial(Rule, side="efficiency")

EFFICIENCY = (
    rule(
        name="memory",
        title="memory is steady",
        what="Memory grows from step to step.",
        severity="critical",
        conditions=tuple(
            condition(
                "grows",
                name,
                window=window,
                says="{metric} grew by {value:share} within {window} measurements, from {before} {unit}",
                max="max",
                by="by",
                skip=10,  # pools and caches fill up
            )
            for name in (
                "memory/*",
                "perf/process_memory_gb",
                *(f"{owner}/max_memory_allocated_gb" for owner in GPU_OWNERS),
            )
            for window in (0, 400, common.OVER_RUN)  # slow leaks grow little within the rule's own window
        ),
        thresholds=(
            Threshold("max", 0.2, "growth over the window, share of its start", THUMB),
            Threshold("by", 0.05, "growth over the window, GiB", THUMB),
        ),
        window=40,
        min_steps=50,
        causes=(
            Cause(
                "a leak in the owner that grows: objects of every step are kept",
                "run rl-metrics doctor, and set metrics.trace_memory: memory_lines events name lines of code",
            ),
            Cause("a queue or cache without a bound", "look at queue/* and at the caches' limits"),
            Cause("responses become longer", "look at response_length/mean"),
        ),
    ),
    rule(
        name="reward_slow",
        title="reward's share of the step's time",
        what="The reward function takes a large part of the step.",
        conditions=(
            condition("level", "timing_s/reward", STEP, says=OF_STEP),
            REWARD_QUEUE,
            condition("level", "agent_loop/slowest/compute_score", STEP, says=OF_STEP),
        ),
        thresholds=(Threshold("max", 0.25, "share of the step's time", THUMB),),
        min_steps=5,
        causes=(
            Cause(
                "slow reward: sessions wait for a free slot",
                "profile the reward function; run more calls at once (reward.max_concurrency), or cache its answers",
                sign=REWARD_QUEUE,
            ),
            Cause("slow reward: each call takes long", "profile the reward function, or cache its answers"),
            Cause(
                "the service called by the reward is slow, or refuses requests and is retried",
                "look at reward.max_calls_per_s, reward.retries and the service",
            ),
        ),
    ),
    rule(
        name="tools_slow",
        title="tools' share of the step's time",
        what="Tools take a large part of the step.",
        conditions=(condition("level", "agent_loop/slowest/tool_calls", STEP, says=OF_STEP),),
        thresholds=(Threshold("max", 0.5, "share of the step's time", THUMB),),
        min_steps=5,
        causes=(Cause("slow tools", "look at the slowest sessions, and set time limits for tools"),),
    ),
    rule(
        name="step_time_jump",
        title="no threefold jumps of the step time",
        what="Some steps take several times as long as earlier ones.",
        conditions=(
            condition(
                "jumps",
                ("perf/time_per_step", "timing_s/step"),
                says="{value} of the last {window} steps took more than {times} times the usual {before} s",
            ),
        ),
        thresholds=(
            Threshold("times", 3.0, "minimum jump, over the median before", GUIDE),
            Threshold("count", 2.0, "allowed jumps", THUMB),
        ),
        window=50,
        causes=(
            SLOW_REWARD,
            LEAK,
            Cause("a few very long responses", "look at response_length/max, and allow partial rollouts"),
            Cause("preemptions in the engine", "look at agent_loop/num_preempted/max; give the engine more memory"),
            OTHERS,
        ),
    ),
    rule(
        name="step_time_drift",
        title="time per token does not drift",
        what="Tokens take much longer than before.",
        conditions=(
            condition("fall", "perf/throughput", says="{metric} is {value:share} below its best of {before} tokens/s"),
        ),
        thresholds=(Threshold("max", 0.5, "maximum loss, share of the best speed", THUMB),),
        window=20,
        min_steps=40,
        causes=(
            SLOW_REWARD,
            LEAK,
            Cause("longer responses cost more per token", "look at response_length/mean"),
            OTHERS,
        ),
    ),
    rule(
        name="learner_idle",
        title="the learner works (utilization above 50 %)",
        what="The learner is idle most of the time.",
        conditions=(condition("mean_level", "fully_async/trainer/idle_ratio", says=OF_TIME),),
        thresholds=(Threshold("max", 0.5, "share of the time", GUIDE),),
        window=20,
        causes=(
            SLOW_REWARD,
            Cause("too few engines", "add engines (rl-async-trainer scale), or raise the staleness by one"),
            Cause("long waits for checkpoints or validation", "write and validate concurrently with training"),
        ),
    ),
    rule(
        name="engines_idle",
        title="the engines work",
        what="The engines are idle most of the time.",
        conditions=(condition("mean_level", "fully_async/rollouter/idle_ratio", says=OF_TIME),),
        thresholds=(Threshold("max", 0.8, "share of the time; engines are often idle half of it by design", THUMB),),
        window=20,
        causes=(
            SLOW_REWARD,
            Cause("too many engines for this learner", "remove engines (rl-async-trainer scale)"),
            Cause("the staleness bound holds them back", "raise schedule.max_staleness"),
        ),
    ),
    rule(
        name="mfu",
        title="model FLOPs utilization",
        what="The learner uses little of its devices' compute.",
        conditions=(
            condition("level", "perf/mfu/*", says="{metric} is at {value:share} (at least {min:share} is healthy)"),
        ),
        thresholds=(Threshold("min", 0.2, "share of the devices' peak", THUMB),),
        causes=(
            Cause("micro-batches too small", "raise the tokens of a micro-batch"),
            Cause("padding or recomputation", "pack sequences, and recompute less"),
            Cause("too many ranks for the model", "lower tensor and pipeline parallelism"),
        ),
    ),
    rule(
        name="gpu_memory_full",
        title="the GPU's memory has room",
        what="The peak of the GPU's memory is close to the card's size.",
        conditions=tuple(
            condition(
                "level",
                f"{owner}/max_memory_reserved_gb",
                f"{owner}/memory_total_gb",
                says="{metric} is {value:share} of the card (at most {max:share} is safe)",
            )
            for owner in GPU_OWNERS
        ),
        thresholds=(Threshold("max", 0.95, "peak reserved memory, share of the card", THUMB),),
        window=3,
        causes=(
            Cause("micro-batches too large", "lower optimizer.micro_batch_tokens, or recompute activations"),
            Cause(
                "engine and learner share the card", "lower vllm.gpu_memory_utilization, or set trainer.offload_learner"
            ),
            Cause("responses become longer", "look at response_length/max"),
        ),
    ),
    rule(
        name="gpu_memory_jump",
        title="no jumps of the GPU's peak memory",
        what="The peak of the GPU's memory jumped, as from 20 to 30 GiB.",
        conditions=tuple(
            condition(
                "jumps",
                f"{owner}/max_memory_allocated_gb",
                says="{metric}: {value} of the last {window} steps were more than {times} times the median before them",
            )
            for owner in GPU_OWNERS
        ),
        thresholds=(
            Threshold("times", 1.4, "minimum jump, over the median before; 20 to 30 GiB is 1.5", GUIDE),
            Threshold("least", 4.0, "peaks below this many GiB are not judged", THUMB),
            Threshold("count", 0.0, "allowed jumps", THUMB),
        ),
        window=50,
        causes=(
            Cause("responses or prompts became longer", "look at response_length/max and prompt_length/max"),
            Cause(
                "a step kept what it should have freed",
                "compare with memory/* and weights/size_gb, and look at the events of that step",
            ),
        ),
    ),
    rule(
        name="gpu_idle",
        title="the GPUs are busy (above 50 % is good, 70 % very good)",
        what="The GPUs are busy less than 30 % of the time.",
        conditions=tuple(
            condition(
                "mean_level", f"{owner}/gpu_utilization", says=common.share_of("time", bound="at least {min:share}")
            )
            for owner in BUSY_OWNERS
        ),
        thresholds=(Threshold("min", 0.3, "share of the time; below it, the cards wait", GUIDE),),
        window=20,
        causes=(
            Cause("slow reward: the cards wait for it", "see the finding reward_slow", rule="reward_slow"),
            Cause(
                "learner and engines wait for each other",
                "let them share the cards (trainer.offload_learner), or use the asynchronous trainer",
            ),
            Cause("micro-batches too small", "raise optimizer.micro_batch_tokens"),
            Cause("too few concurrent requests", "raise vllm.max_num_seqs, or use fewer engines"),
        ),
    ),
)
