"""Efficiency rules of GPUs: their memory and their utilization."""

from rl_metrics.definitions.entries import GUIDE, THUMB
from rl_metrics.health.rules import Cause, Rule, Threshold, condition

OWNERS = ("perf", "engine", "teacher")
JUDGED_BUSY = ("perf", "engine")
"""Teachers work only while groups arrive, so their utilization alone is no problem."""

GPU = (
    Rule(
        name="gpu_memory_full",
        side="efficiency",
        title="the GPU's memory has room",
        what="The peak of the GPU's memory is close to the card's size.",
        conditions=tuple(
            condition(
                "level",
                f"{owner}/max_memory_reserved_gb",
                f"{owner}/memory_total_gb",
                says="{metric} is {value:share} of the card (at most {max:share} is safe)",
            )
            for owner in OWNERS
        ),
        thresholds=(Threshold("max", 0.95, "peak reserved memory, share of the card", THUMB),),
        window=3,
        causes=(
            Cause("micro-batches too large", "lower learner.micro_batch_tokens, or recompute activations"),
            Cause(
                "engine and learner share the card",
                "lower engine.gpu_memory_utilization, or set trainer.offload",
            ),
            Cause("responses become longer", "look at response_length/max"),
        ),
    ),
    Rule(
        name="gpu_memory_jump",
        side="efficiency",
        title="no jumps of the GPU's peak memory",
        what="The peak of the GPU's memory jumped, as from 20 to 30 GiB.",
        conditions=tuple(
            condition(
                "jumps",
                f"{owner}/max_memory_allocated_gb",
                says="{metric}: {value} of the last {window} steps were more than {times} times the median before them",
            )
            for owner in OWNERS
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
    Rule(
        name="gpu_idle",
        side="efficiency",
        title="the GPUs are busy (above 50 % is good, 70 % very good)",
        what="The GPUs are busy less than 30 % of the time.",
        conditions=tuple(
            condition(
                "mean_level",
                f"{owner}/gpu_utilization",
                says="{metric}: {value:share} of the time (at least {min:share} is healthy)",
            )
            for owner in JUDGED_BUSY
        ),
        thresholds=(Threshold("min", 0.3, "share of the time; below it, the cards wait", GUIDE),),
        window=20,
        causes=(
            Cause("slow reward: the cards wait for it", "see the finding reward_slow", rule="reward_slow"),
            Cause(
                "learner and engines wait for each other",
                "let them share the cards (trainer.offload), or use the asynchronous trainer",
            ),
            Cause("micro-batches too small", "raise learner.micro_batch_tokens"),
            Cause("too few concurrent requests", "raise engine.max_num_seqs, or use fewer engines"),
        ),
    ),
)
