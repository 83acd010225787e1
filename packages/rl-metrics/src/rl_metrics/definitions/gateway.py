"""Metrics of the gateway: agents' requests, and those that cannot be trained on."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import BY_DESIGN, THUMB, mean, one, spread

EVENTS = {
    "retries": "Requests that a client's SDK retried by itself",
    "repeated": "Requests equal to an earlier one of their session; only one of the answers trains",
    "replayed": "Requests repeated with the same idempotency key, which got the same answer",
    "disconnected": "Requests whose client disconnected before the answer",
    "probes": "Answers outside the task, such as titles or structured output, which never train",
    "overridden": "Requests whose sampling parameters were replaced by the run's",
    "engine_errors": "Requests that failed in the engine",
    "other_sampling": "Answers sampled with other parameters than the session's, which never train",
    "agent_failed": "Sessions whose program was killed, reached a limit, or exited with a code other than 0",
}
"""Meanings of the counts of requests (or sessions, where stated), by name of the count in a session."""

GATEWAY = (
    *spread("gateway/turns", unit="requests", meaning="Answered requests of a session", over="session"),
    mean(
        "gateway/forks",
        "forks",
        "Turns of a session that several conversations continue: an edited history, or a second line of work.",
        over="session",
    ),
    mean(
        "gateway/roots",
        "conversations",
        "Conversations of a session that continue no sampled turn; 1 if all turns are one conversation.",
        over="session",
    ),
    mean(
        "gateway/new_root_share",
        "1",
        "Share of requests that start a new conversation, excluding the first of each session.",
        over="session",
        healthy=Band(high=0.3, source=THUMB),
    ),
    one(
        "gateway/roots/{reason}",
        "conversations",
        "New conversations, by their first difference from all earlier ones: none (first), the tools, the message of a "
        "role, or a prefix of an earlier one (shorter).",
        reduction="sum",
    ),
    one("gateway/sampled_tokens", "tokens", "Tokens sampled for agents.", reduction="sum"),
    one(
        "gateway/untrained_tokens",
        "tokens",
        "Of these, tokens that do not train: retries, unused choices, probes.",
        reduction="sum",
    ),
    one(
        "gateway/abandoned_tokens",
        "tokens",
        "Tokens sampled for requests that ended without an answer; they do not train.",
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
        one(f"gateway/overhead_ms/{name}", "ms", f"Time of a turn outside the engine, {word} of a step's turns.")
        for name, word in (("p50", "median"), ("p99", "99th percentile"))
    ),
)
