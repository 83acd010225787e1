"""Metrics of the gateway: agents' requests, and those that cannot be trained on."""

from rl_metrics.definitions.entries import ZERO, at_most, newest, session_mean, spread, total

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
    *spread("gateway/turns", "Answered requests of a session", "requests", over="session"),
    session_mean(
        "gateway/forks",
        "Turns of a session that several conversations continue: an edited history, or a second line of work.",
        "forks",
    ),
    session_mean(
        "gateway/roots",
        "Conversations of a session that continue no sampled turn; 1 if all turns are one conversation.",
        "conversations",
    ),
    session_mean(
        "gateway/new_root_share",
        "Share of requests that start a new conversation, excluding the first of each session.",
        healthy=at_most(0.3),
    ),
    total(
        "gateway/roots/{reason}",
        "New conversations, by their first difference from all earlier ones: none (first), the tools, the message of a "
        "role, or a prefix of an earlier one (shorter).",
        "conversations",
    ),
    total("gateway/sampled_tokens", "Tokens sampled for agents.", "tokens"),
    total("gateway/untrained_tokens", "Of these, tokens that do not train: retries, unused choices, probes.", "tokens"),
    total(
        "gateway/abandoned_tokens",
        "Tokens sampled for requests that ended without an answer; they do not train.",
        "tokens",
    ),
    *(
        total(
            f"gateway/{name}",
            f"{meaning}.",
            "sessions" if name == "agent_failed" else "requests",
            healthy=ZERO if name == "engine_errors" else None,
        )
        for name, meaning in EVENTS.items()
    ),
    *(
        newest(f"gateway/overhead_ms/{name}", f"Time of a turn outside the engine, {word} of a step's turns.", "ms")
        for name, word in (("p50", "median"), ("p99", "99th percentile"))
    ),
)
