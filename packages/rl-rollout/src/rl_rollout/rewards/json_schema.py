"""Reward for JSON that fits a schema, using the jsonschema library."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.data import Json
from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards.check_processes import CheckProcesses
from rl_rollout.rewards.json_worker import WRONG, libraries, validator_of
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult

WORKER = "rl_rollout.rewards.json_worker"


@dataclass(frozen=True, kw_only=True)
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
    timeout_s: float = 5.0
    num_workers: int = 2
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
