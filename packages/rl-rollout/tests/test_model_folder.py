"""What is read from a model's folder without loading it."""

import json

import pytest

from rl_rollout.engines.model_folder import end_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 2}, (3, 4)),
        ({}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": None}, ()),
        (None, {}, ()),
    ],
)
def test_end_tokens_are_generation_configs_else_configs_or_none(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path) == expected
