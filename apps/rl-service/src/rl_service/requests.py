"""What clients ask for: the request types of the package `tinker`, which refuse unknown fields.

Only this file and wire.py know that package. Requests of a training client have a `seq_id` from 1 and run in its order.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from rl_core.errors import MissingExtraError
from rl_rollout.gateway import RefusedError

try:
    from tinker import types
except ImportError as error:
    raise MissingExtraError(
        f"the service needs tinker's messages: {error}. Install rl-service[service] as the README says."
    ) from error

AdamParams = types.AdamParams
ClientConfig = types.ClientConfigRequest
CreateModel = types.CreateModelRequest
CreateSamplingSession = types.CreateSamplingSessionRequest
CreateSession = types.CreateSessionRequest
Heartbeat = types.SessionHeartbeatRequest
LoadWeights = types.LoadWeightsRequest
LoraConfig = types.LoraConfig
OfModel = types.GetInfoRequest
OptimStep = types.OptimStepRequest
RetrieveFuture = types.FutureRetrieveRequest
SaveWeights = types.SaveWeightsRequest
SaveWeightsExternal = types.SaveWeightsExternalRequest
SaveWeightsForSampler = types.SaveWeightsForSamplerRequest
TextChunk = types.EncodedTextChunk

MAX_SHOWN = 5
"""Number of wrong fields that a refusal names."""
RequestT = TypeVar("RequestT", bound=BaseModel)


class Own(BaseModel):
    """A request that `tinker` has no type for, or a laxer one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TimeToLive(Own):
    """Sets how long saved weights are kept; None is forever."""

    ttl_seconds: int | None = None


class SamplingParams(types.SamplingParams, Own):
    """How to sample."""


class Sample(types.SampleRequest):
    """Samples from a sampling client, or scores its prompt."""

    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: int


class CancelFuture(Own):
    """Says that a result is no longer needed."""

    request_id: str


class WeightsPath(Own):
    """Names saved weights."""

    tinker_path: str


class FinishSession(Own):
    """Ends a session."""

    reason: dict[str, Any] = {}
    detail: str | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the order of a training client.

    Attributes:
        model_id: The training client.
        seq_id: Position in its order.
    """

    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A request that cannot run; it still takes its place in the client's order, so that later ones do not wait for it.

    Attributes:
        model_id: The training client.
        seq_id: Position in its order.
        problem: Why it cannot run.
    """

    model_id: str
    seq_id: int
    problem: RefusedError


def read_place(body: bytes) -> Place | None:
    """Return the position of a training request in JSON, or None if it has none."""
    try:
        return msgspec.json.decode(body, type=Place)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def read_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Read a request in JSON.

    Raises:
        RefusedError: A field is wrong, missing or unknown; the message names it.
    """
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise RefusedError(f"the body is not a {kind.__name__}: {'; '.join(wrong[:MAX_SHOWN])}.") from None
