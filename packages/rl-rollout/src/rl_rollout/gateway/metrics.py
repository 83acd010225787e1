"""The gateway's metrics in Prometheus format."""

import re

from rl_rollout.gateway.service import PolicyService
from rl_rollout.gateway.sessions import Sessions


def metrics_text(service: PolicyService, sessions: Sessions) -> str:
    """Return the metrics in Prometheus text format 0.0.4."""
    lines = ["# TYPE rl_gateway_sessions gauge", f"rl_gateway_sessions {len(sessions)}"]
    lines += ["# TYPE rl_gateway_requests_running gauge"]
    lines += [f"rl_gateway_requests_running {sum(len(session.running) for session in sessions)}"]
    lines += ["# TYPE rl_gateway_events_total counter"]
    for name, number in sorted(service.counts.items()):
        lines.append(f'rl_gateway_events_total{{event="{re.sub("[^a-z_]", "", name)}"}} {number}')
    lines += ["# TYPE rl_gateway_turn_overhead_ms summary"]
    for quantile in (0.5, 0.99):
        lines.append(f'rl_gateway_turn_overhead_ms{{quantile="{quantile}"}} {service.overhead_ms(quantile):.3f}')
    return "\n".join(lines) + "\n"
