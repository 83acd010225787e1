"""Metrics of a training client of `rl-service`, from one optimizer step to the next."""

from rl_metrics.definitions.entries import ZERO, seconds, total

SERVICE = (
    seconds("forward_backward", "Forward and backward passes of a client's requests"),
    seconds("optim_step", "Optimizer step of a client"),
    seconds("turns", "Waiting of a client's training requests until the learner runs them"),
    total("service/trained_tokens", "Target tokens with a weight or an advantage.", "tokens"),
    total("service/failed_requests", "Training and sampling requests that failed.", "requests", healthy=ZERO),
    total("service/samples", "Sequences sampled with a client's weights.", "sequences"),
    total("service/sampled_tokens", "Tokens of these sequences.", "tokens"),
)
