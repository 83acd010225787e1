"""A gateway: agents of any kind talk to the policy over HTTP, and exactly the sampled tokens train."""

from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits

__all__ = ["Gateway", "GatewayOptions", "ServiceOptions", "Session", "SessionLimits"]
