"""A gateway that serves the policy to agents over OpenAI's and Anthropic's APIs. Exactly the sampled tokens train.

The parts of its server that other servers share are here too.
"""

from rl_rollout.gateway.server import Gateway, GatewayOptions  # first, because it names a missing extra

# isort: split
from rl_rollout.gateway.listening import Listener
from rl_rollout.gateway.refusals import FaultLog, RefusedError, refused_field
from rl_rollout.gateway.requests import BodyReader, ErrorsInFormat, secret_of
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.gateway.sessions import Session, SessionLimits

__all__ = [
    "BodyReader",
    "ErrorsInFormat",
    "FaultLog",
    "Gateway",
    "GatewayOptions",
    "Listener",
    "RefusedError",
    "ServiceOptions",
    "Session",
    "SessionLimits",
    "refused_field",
    "secret_of",
]
