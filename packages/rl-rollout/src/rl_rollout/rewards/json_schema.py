"""Rewards for JSON: that fits a schema, by the jsonschema library in worker processes, or has the right fields."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from rl_core.data import Json
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.record_fields import NonNegativeFloat, PositiveFloat, PositiveInt, settings_record
from rl_rollout.rewards.check_processes import CheckProcesses, main
from rl_rollout.rewards.outputs import cut, preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult

WORKER = "rl_rollout.rewards.json_schema"


@settings_record
class JsonSchemaReward:
    """1 if the response is JSON that the schema accepts, else 0; with is_fractional, partial fits get a share.

    The schema comes from the `schema` option, the row's `column`, or else the ground truth; text is parsed as JSON. The
    response's JSON is its whole text, or else its last fenced block. Components: `parsed`, `valid` and `timed_out`;
    with is_fractional also `fitting`, the share of the schema's top-level properties (`properties` and `required`) that
    are valid, and present if required. References to other documents are not fetched.

    Attributes:
        schema: Schema for all rows.
        column: Column with the schema of each row.
        is_fractional: True gives JSON that does not fit 0.5, plus up to 0.5 for the share that fits, at most 0.99.
        timeout_s: Maximum seconds of one check, because patterns and long lists can take forever; a timeout gives 0.
        num_workers: Number of processes that run the library; they start at the first use.
    """

    schema: Mapping[str, Json] | None = None
    column: str | None = None
    is_fractional: bool = False
    timeout_s: PositiveFloat = 5.0
    num_workers: PositiveInt = 2
    max_concurrency: int = field(init=False, repr=False)
    processes: CheckProcesses = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MissingExtraError: jsonschema is not installed.
            SettingsError: The schema is invalid, or both schema and column are given.
        """
        if self.schema is not None and self.column is not None:
            raise SettingsError("reward 'json_schema' accepts schema or column, not both. Remove one of them.")
        libraries()
        object.__setattr__(self, "max_concurrency", self.num_workers)
        processes = CheckProcesses(WORKER, timeout_s=self.timeout_s, num_processes=self.num_workers)
        object.__setattr__(self, "processes", processes)
        if self.schema is not None:
            try:
                validator_of(self.schema)
            except DataError as error:
                raise SettingsError(f"schema of reward 'json_schema': {error}") from error

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The row has no schema, or an invalid one.
        """
        request = {
            "schema": self._schema_of(given),
            "text": given.final_text,
            "is_fractional": self.is_fractional,
        }
        found = self.processes.check(request)
        is_timed_out = found is None
        found = found or {**WRONG, "reason": "the check took too long or used too much memory"}
        components = {"parsed": found["parsed"], "valid": found["valid"], "timed_out": float(is_timed_out)}
        reward = found["valid"]
        if self.is_fractional:
            components["fitting"] = found["fitting"]
            if found["parsed"] and not found["valid"] and not is_timed_out:
                reward = min(0.5 + 0.5 * found["fitting"], 0.99)
        extras = {} if found["valid"] else {"schema_failure": found["reason"]}
        return RewardResult(reward=reward, components=components, extras=extras)

    def close(self) -> None:
        """Stop the processes. Can be called twice."""
        self.processes.close()

    def _schema_of(self, given: RewardInput) -> Json:
        if self.schema is not None:
            return self.schema
        schema = given.ground_truth if self.column is None else given.columns.get(self.column)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise DataError(
                    f"the schema is not JSON ({error}); found {preview(schema)}. Repair the row."
                ) from error
        if not isinstance(schema, Mapping | bool):
            where = "ground truth" if self.column is None else f"column {self.column!r}"
            raise DataError(f"the {where} must be a JSON schema; found {preview(schema)}. Repair the row.")
        return schema


@settings_record
class JsonFields:
    """Share of the ground truth's fields that the response's JSON object has with equal values.

    The response's JSON is its text after the thinking, or else its last fenced block. Numbers are equal by value, and
    `true` is no 1; texts are equal without spaces at both ends; lists and objects in all their items. Other fields of
    the response do not count. Component: `parsed`. The extras list the wrong fields.

    Attributes:
        fields: Fields to compare; empty compares all of the ground truth.
        is_fractional: False gives 1 only if all fields are equal, else 0.
        relative: Accepted difference of numbers, as a share of the ground truth's.
    """

    fields: tuple[str, ...] = ()
    is_fractional: bool = True
    relative: NonNegativeFloat = 0.0

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The ground truth is not an object with these fields.
        """
        row = given.ground_truth
        with contextlib.suppress(ValueError):
            row = json.loads(row) if isinstance(row, str) else row
        names = self.fields or tuple(row if isinstance(row, Mapping) else ())
        if not names or not isinstance(row, Mapping) or not {*names} <= row.keys():
            wanted = f"JSON with {', '.join(self.fields) or 'fields'}"
            raise DataError(f"the ground truth must be {wanted}; found {preview(given.ground_truth)}. Repair the row.")
        found: Json = None
        with contextlib.suppress(ValueError, RecursionError):
            found = read_json(given.final_text)
        values = found if isinstance(found, dict) else {}
        wrong = [name for name in names if name not in values or not self._is_equal(values[name], row[name])]
        reward = 1.0 - len(wrong) / len(names) if self.is_fractional else float(not wrong)
        components = {"parsed": float(isinstance(found, dict))}
        return RewardResult(reward=reward, components=components, extras={"wrong_fields": wrong} if wrong else {})

    def _is_equal(self, found: Any, expected: Any) -> bool:
        """Compare values of JSON. The ground truth bounds the depth."""
        if all(isinstance(one, int | float) and not isinstance(one, bool) for one in (found, expected)):
            with contextlib.suppress(OverflowError):  # of a number of hundreds of digits
                return bool(found == expected or abs(found - expected) <= self.relative * abs(expected))
        if isinstance(expected, Mapping) and isinstance(found, dict):
            return found.keys() == expected.keys() and all(self._is_equal(found[k], expected[k]) for k in found)
        if isinstance(expected, list | tuple) and isinstance(found, list):
            return len(found) == len(expected) and all(map(self._is_equal, found, expected))
        if isinstance(expected, str) and isinstance(found, str):
            return found.strip() == expected.strip()
        return type(found) is type(expected) and bool(found == expected)


FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_CHARACTERS = 1 << 20
WRONG = {"parsed": 1.0, "valid": 0.0, "fitting": 0.0, "reason": "the response cannot be checked"}


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Read the schema, and return a function that checks the response.

    Raises:
        DataError: The schema is invalid.
    """
    schema, text = request["schema"], request["text"]
    validator = validator_of(schema)
    return lambda: judge(validator, schema, text, is_fractional=request["is_fractional"])


def judge(validator: Any, schema: Json, text: str, *, is_fractional: bool) -> dict[str, Any]:
    """Check whether a text is JSON and valid, and which share of the schema it fits."""
    try:
        found = read_json(text)
    except (ValueError, RecursionError) as error:
        return {**WRONG, "parsed": 0.0, "reason": str(error)[:300]}
    reason = first_error(validator, found)
    fitting = 1.0 if reason is None else fitting_share(validator, schema, found) if is_fractional else 0.0
    return {"parsed": 1.0, "valid": float(reason is None), "fitting": fitting, "reason": reason}


def validator_of(schema: Json) -> Any:
    """Return the validator of a schema.

    Raises:
        DataError: The schema is invalid.
    """
    library, referencing = libraries()
    validator_class = library.validators.validator_for(schema, default=library.Draft202012Validator)
    try:
        validator_class.check_schema(schema)
    except (library.SchemaError, RecursionError) as error:
        fault = cut(str(error).partition("\n")[0], max_characters=300)
        raise DataError(f"not a valid JSON schema ({fault}). Repair it.") from error
    return validator_class(schema, registry=referencing.Registry())  # an empty registry, which fetches nothing


def libraries() -> tuple[Any, Any]:
    """Return jsonschema, and the library that resolves its references."""
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise MissingExtraError(
            "reward 'json_schema' needs jsonschema. Install rl-rollout[json-schema] as the README says."
        ) from error
    return jsonschema, referencing


def read_json(text: str) -> Any:
    """Parse the whole text as JSON, or else its last fenced block.

    Raises:
        ValueError: Neither is JSON, an object has a key twice, or the text is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        blocks = FENCE.findall(text)
        if not blocks:
            raise
    return STRICT.decode(blocks[-1])


def refuse_constant(name: str) -> Json:
    """Reject NaN and Infinity, which only Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


def refuse_double_keys(items: list[tuple[str, Json]]) -> dict[str, Json]:
    """Reject an object that gives a key several values: each reader of JSON would choose another."""
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("an object has a key twice")
    return found


STRICT = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=refuse_double_keys)


def first_error(validator: Any, found: Json) -> str | None:
    """Return where and why the value does not fit; None if it fits.

    A value that a rule cannot be applied to does not fit.

    Raises:
        DataError: The schema refers to another document, or has an invalid pattern.
    """
    library, referencing = libraries()
    try:
        error = library.exceptions.best_match(validator.iter_errors(found))
    except referencing.exceptions.Unresolvable as fault:
        raise DataError(f"the schema has a reference that cannot be resolved ({fault}). Repair the row.") from fault
    except re.error as fault:
        raise DataError(f"the schema has an invalid pattern ({fault}). Repair the row.") from fault
    except Exception as fault:  # such as OverflowError of multipleOf, or RecursionError
        return cut(f"the value cannot be checked ({type(fault).__name__}: {fault})", max_characters=300)
    return None if error is None else cut(f"{error.json_path}: {error.message}", max_characters=300)


def fitting_share(validator: Any, schema: Json, found: Json) -> float:
    """Return the share of the schema's top-level properties that are valid, and present if required."""
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    required = set(schema.get("required", ())) if isinstance(schema, Mapping) else set()
    names = sorted({*properties, *required})
    if not names or not isinstance(found, dict):
        return 0.0
    num_fitting = 0
    for name in names:
        if name in found:
            num_fitting += (
                name not in properties or first_error(validator.evolve(schema=properties[name]), found[name]) is None
            )
        else:
            num_fitting += name not in required
    return num_fitting / len(names)


if __name__ == "__main__":
    libraries()
    main(prepare, WRONG)
