"""A gateway that serves the policy to agents over OpenAI's and Anthropic's APIs. Exactly the sampled tokens train."""

from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits

__all__ = ["Gateway", "GatewayOptions", "ServiceOptions", "Session", "SessionLimits"]
