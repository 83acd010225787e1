"""A checkpoint is refused if its learner.json is missing, of another release, or of another kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch_learner import TorchLearner

from rl_core.errors import CheckpointError
from rl_distill.learner import LearnerOptions

OPTIONS = LearnerOptions(num_threads=1)


@pytest.fixture
def copied(tied_policy: Path, tmp_path: Path) -> Path:
    TorchLearner(tied_policy, OPTIONS).save(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": 99}, "has format_version 99; this release reads 3"),
        ({"format_version": 2}, "reads 3. Resume with the release that wrote it, .* a new run from .*copy/policy"),
        ({"format_version": "3"}, r"learner.json is damaged: Expected `int`, got `str` - at `\$.format_version`"),
        ({"step": True}, r"is damaged: Expected `int`, got `bool` - at `\$.step`"),
        ({"config_digest": None}, r"is damaged: .* at `\$.config_digest`"),
        ({"options": {}}, "is damaged: Object missing required field `dtype`"),
        ({"options": "dtype"}, r"is damaged: .* at `\$.options`"),
    ],
)
def test_a_header_of_another_kind_is_refused(changes: dict[str, Any], says: str, copied: Path, tied_policy: Path):
    path = copied / "learner.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=says):
        TorchLearner(tied_policy, OPTIONS).load(copied)


@pytest.mark.parametrize("content", ["[1]", "null", "{}", "[" * 100_000, '{"step": ' + "9" * 10_000 + "}", "\xff"])
def test_a_header_that_is_none_is_refused(content: str, copied: Path, tied_policy: Path):
    (copied / "learner.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"learner\.json"):
        TorchLearner(tied_policy, OPTIONS).load(copied)
