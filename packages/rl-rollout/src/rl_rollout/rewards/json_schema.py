"""Reward for JSON that fits a schema, by the jsonschema library."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_rollout.rewards.outputs import cut, shown
from rl_rollout.rewards.protocol import RewardInput, RewardResult

FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JsonSchemaReward:
    """1 when the response is JSON that the schema accepts, else 0; with is_fractional, what share of it fits.

    The schema is the option, or the row's column, or else the ground truth; a text is read as JSON. A response
    is JSON as it stands, or its last fenced block is. Components: `parsed` and `valid`; with is_fractional
    `fitting`, the share of the schema's top-level properties (its `properties` and `required`) that are there
    where required, and valid. References to other documents are not fetched.

    Attributes:
        schema: The same schema for all rows.
        column: Column of the row that has it.
        is_fractional: True gives 0.5 for JSON that parses, and up to 0.5 more for the share that fits, while it
            is not wholly valid: at most 0.99.
    """

    schema: Mapping[str, Json] | None = None
    column: str | None = None
    is_fractional: bool = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MissingExtraError: jsonschema is not installed.
            SettingsError: The schema is none, or there is a column too.
        """
        if self.schema is not None and self.column is not None:
            raise SettingsError("reward 'json_schema' takes a schema or a column; found both.")
        _library()
        if self.schema is not None:
            try:
                _validator(self.schema)
            except DataError as error:
                raise SettingsError(f"schema of reward 'json_schema': {error}") from error

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The row has no schema, or one that is none.
        """
        schema = self._schema_of(given)
        validator = _validator(schema)
        try:
            found = _read_json(given.response_text)
        except (ValueError, RecursionError) as error:
            parts = {"parsed": 0.0, "valid": 0.0, **({"fitting": 0.0} if self.is_fractional else {})}
            return RewardResult(reward=0.0, components=parts, extras={"schema_failure": str(error)[:300]})
        reason = _first_error(validator, found)
        components = {"parsed": 1.0, "valid": float(reason is None)}
        reward = components["valid"]
        if self.is_fractional:
            components["fitting"] = 1.0 if reason is None else _fitting(validator, schema, found)
            reward = 1.0 if reason is None else min(0.5 + 0.5 * components["fitting"], 0.99)
        extras = {} if reason is None else {"schema_failure": reason}
        return RewardResult(reward=reward, components=components, extras=extras)

    def _schema_of(self, given: RewardInput) -> Json:
        if self.schema is not None:
            return self.schema
        schema = given.ground_truth if self.column is None else given.columns.get(self.column)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise DataError(f"the schema is not JSON ({error}); found {shown(schema)}. Repair the row.") from error
        if not isinstance(schema, Mapping | bool):
            where = "ground truth" if self.column is None else f"column {self.column!r}"
            raise DataError(f"the {where} must be a JSON schema; found {shown(schema)}. Repair the row.")
        return schema


def _validator(schema: Json) -> Any:
    library, referencing = _library()
    validator_class = library.validators.validator_for(schema, default=library.Draft202012Validator)
    try:
        validator_class.check_schema(schema)
    except (library.SchemaError, RecursionError) as error:
        raise DataError(f"it is no JSON schema ({cut(str(error), max_characters=300)}).") from error
    return validator_class(schema, registry=referencing.Registry())  # one that has no document and fetches none


def _library() -> tuple[Any, Any]:
    """The library, and the one that it resolves references with."""
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise MissingExtraError(
            "reward 'json_schema' needs jsonschema. Install rl-rollout[json-schema] as the README says."
        ) from error
    return jsonschema, referencing


def _read_json(text: str) -> Json:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        blocks = FENCE.findall(text)
        if not blocks:
            raise
    return json.loads(blocks[-1], parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _first_error(validator: Any, found: Json) -> str | None:
    """Where the value does not fit, None when it does.

    Raises:
        DataError: The schema refers to another document.
    """
    library, referencing = _library()
    try:
        error = library.exceptions.best_match(validator.iter_errors(found))
    except RecursionError:
        return "it is nested too deeply"
    except referencing.exceptions.Unresolvable as unresolved:
        raise DataError(f"the schema refers to what it does not have ({unresolved}). Repair the row.") from unresolved
    return None if error is None else cut(f"{error.json_path}: {error.message}", max_characters=300)


def _fitting(validator: Any, schema: Json, found: Json) -> float:
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    required = set(schema.get("required", ())) if isinstance(schema, Mapping) else set()
    names = sorted({*properties, *required})
    if not names or not isinstance(found, dict):
        return 0.0
    num_fitting = 0
    for name in names:
        if name in found:
            num_fitting += (
                name not in properties or _first_error(validator.evolve(schema=properties[name]), found[name]) is None
            )
        else:
            num_fitting += name not in required
    return num_fitting / len(names)
