"""Metrics of the gateway: agents' requests, and those that cannot be trained on."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import BY_DESIGN, THUMB, mean, one, spread

EVENTS = {
    "retries": "Requests that a client's SDK made again by itself",
    "repeated": "Requests equal to an earlier one of their session; one of the answers trains",
    "replayed": "Requests that came again with their idempotency key, and got the same answer",
    "disconnected": "Requests whose client went before the answer",
    "probes": "Answers outside of the task, such as titles or structured output, which never train",
    "overridden": "Requests that asked for other sampling than the run's, and got the run's",
    "engine_errors": "Requests that the engine failed",
    "other_sampling": "Answers that a client had drawn otherwise than the session draws, which never train",
    "agent_failed": "Sessions whose program was killed, reached a limit, or exited with another code than 0",
}
"""Counts of requests (and of sessions, where it says so), by their name in a session."""

GATEWAY = (
    *spread("gateway/turns", unit="requests", meaning="Requests of a session that were answered", over="session"),
    mean(
        "gateway/forks",
        "forks",
        "Turns of a session from which another conversation goes on too: an edited history, or a second line of work.",
        over="session",
    ),
    mean(
        "gateway/roots",
        "conversations",
        "Conversations of a session that go on from nothing that was sampled; 1 where all turns are one conversation.",
        over="session",
    ),
    mean(
        "gateway/new_root_share",
        "1",
        "Share of requests that start a new conversation, without the first request of each session.",
        over="session",
        healthy=Band(high=0.3, source=THUMB),
    ),
    one(
        "gateway/roots/{reason}",
        "conversations",
        "New conversations, by the first difference from all earlier ones: none (first), the tools, the message "
        "of a role, or that they are a beginning of one (shorter).",
        reduction="sum",
    ),
    one("gateway/sampled_tokens", "tokens", "Tokens sampled for agents.", reduction="sum"),
    one(
        "gateway/untrained_tokens",
        "tokens",
        "Of these, tokens that train nothing: retries, choices that were not used, probes.",
        reduction="sum",
    ),
    one(
        "gateway/abandoned_tokens",
        "tokens",
        "Tokens sampled for requests that ended without an answer; they train nothing.",
        reduction="sum",
    ),
    *(
        one(
            f"gateway/{name}",
            "sessions" if name == "agent_failed" else "requests",
            f"{meaning}.",
            reduction="sum",
            healthy=Band(high=0.0, source=BY_DESIGN) if name == "engine_errors" else None,
        )
        for name, meaning in EVENTS.items()
    ),
    *(
        one(f"gateway/overhead_ms/{name}", "ms", f"Time of a turn beside the engine's, {word} of a step's turns.")
        for name, word in (("p50", "median"), ("p99", "99th percentile"))
    ),
)
