"""Decides between the sampling parameters of the run and of the client."""

import json
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal

from rl_core.data import Json
from rl_core.record_fields import record
from rl_rollout.engines.protocol import SamplingParams, Structure
from rl_rollout.gateway.refusals import refused_field

DecidedBy = Literal["run", "client"]

MAX_SEED = 2**52
DRAWING = ("temperature", "top_p", "top_k", "seed")
"""Request fields that change the sampling distribution or its random seed."""
NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "n": (int, 1, 16),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, 1, 2**52 - 1),
    "seed": (int, -(2**63), 2**64 - 1),
}
"""Type, minimum and maximum of numbers in requests."""


@record
class RequestedSampling:
    """Sampling parameters that a client asks for.

    Attributes:
        max_tokens: Maximum number of tokens of a response; None if not given.
        drawing: The given fields among `DRAWING`.
        stop: Strings that end a response.
        stop_token_ids: Tokens that end a response.
        structure: Structure that the response must follow.
        structure_field: Name of the field of the structure.
        without_effect: Names of given fields that the gateway ignores.
    """

    max_tokens: int | None = None
    drawing: Mapping[str, Json] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    structure: Structure | None = None
    structure_field: str = "response_format"
    without_effect: tuple[str, ...] = ()

    def ignoring(self, name: str) -> "RequestedSampling":
        """Return the parameters with one more field that the gateway ignores."""
        return replace(self, without_effect=(*self.without_effect, name))


def decide(
    requested: RequestedSampling, own: SamplingParams, *, decided_by: DecidedBy, room: int
) -> tuple[SamplingParams, dict[str, str]]:
    """Return a turn's sampling parameters, and the changes to the client's fields, such as "0.2->1.0" or "ignored".

    Training needs the run's distribution: with "run", the client decides only lengths, stops and structure.

    Args:
        requested: The client's parameters.
        own: The run's parameters, or the gateway's defaults.
        decided_by: Whether the run or the client decides on the fields of `DRAWING`.
        room: Number of tokens left in the model's context.
    """
    chosen: dict[str, Any] = {}
    overridden = dict.fromkeys(requested.without_effect, "ignored")
    for name, wish in requested.drawing.items():
        if decided_by == "client":
            chosen[name] = wish % MAX_SEED if name == "seed" else wish  # engines accept no others
        elif getattr(own, name) != wish:
            overridden[name] = f"{wish}->{getattr(own, name)}"
    longest = min(own.max_tokens, room)
    if requested.max_tokens is not None and requested.max_tokens > longest:
        overridden["max_tokens"] = f"{requested.max_tokens}->{longest}"
    max_tokens = longest if requested.max_tokens is None else min(requested.max_tokens, longest)
    stops = tuple(dict.fromkeys((*own.stop, *requested.stop)))
    ends = tuple(dict.fromkeys((*own.stop_token_ids, *requested.stop_token_ids)))
    chosen |= {"max_tokens": max_tokens, "stop": stops, "stop_token_ids": ends, "structure": requested.structure}
    return replace(own, **chosen), overridden


def read_sampling(
    body: Mapping[str, Json],
    *,
    max_tokens: str,
    stop: str,
    without_effect: tuple[str, ...],
    schema: Json = None,
    schema_field: str = "response_format",
) -> RequestedSampling:
    """Read the sampling parameters of a request.

    Args:
        body: The request.
        max_tokens: Name of the field for the maximum number of tokens.
        stop: Name of the field for stop strings.
        without_effect: Names of fields that the gateway ignores.
        schema: JSON schema that the response must follow, already extracted from the request.
        schema_field: Name of the field of the schema.

    Raises:
        RefusedError: A field has an invalid value.
    """
    for name, (kind, least, most) in {max_tokens: (int, 1, 2**63 - 1), **NUMBERS}.items():
        value = body.get(name)
        if value is not None and not (type(value) in (int, kind) and least <= value <= most):
            expected = "an integer" if kind is int else "a number"
            raise refused_field(name, value, f"{expected} from {least} to {most}")
    stops = [] if body.get(stop) in (None, "") else body[stop]
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(one, str) and one for one in stops):
        raise refused_field(stop, stops, "a string or a list of at most 16 strings")
    ends = [] if body.get("stop_token_ids") is None else body["stop_token_ids"]
    if not isinstance(ends, list) or len(ends) > 1024 or not all(type(one) is int and one >= 0 for one in ends):
        raise refused_field("stop_token_ids", ends, "a list of token ids")
    return RequestedSampling(
        max_tokens=body.get(max_tokens),
        stop_token_ids=tuple(ends),
        drawing={name: body[name] for name in DRAWING if body.get(name) is not None},
        stop=tuple(stops),
        structure=None if schema is None else Structure(json_schema=json.dumps(schema)),
        structure_field=schema_field,
        without_effect=tuple(name for name in without_effect if body.get(name) is not None),
    )
