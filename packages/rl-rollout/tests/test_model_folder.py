"""Facts read from a model's folder without loading it."""

import json
import os

import pytest

from rl_core.errors import EngineError
from rl_rollout.engines.model_folder import end_token_ids, max_positions, require_model_folder


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


@pytest.mark.parametrize(
    "config",
    [
        '{"num_hidden_layers": 10000000}',
        '{"text_config": {"num_experts": 100000000}}',
        '{"head_dim": Infinity}',
        '{"hidden_size": "64"}',
        '{"num_labels": 1000000000}',
        '{"attn_implementation": "kernels-community/anything"}',
        '{"text_config": {"_attn_implementation": {"": "paged|owner/name@main:function"}}}',
        "[1]",
        "[" * 200_000,
    ],
)
def test_a_model_that_no_library_should_build_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(EngineError, match=r"config\.json"):
        require_model_folder(tmp_path)


@pytest.mark.parametrize("eos", ['"</s>"', "[[1]]", "1.5", "{}", "true"])
def test_end_tokens_are_numbers(tmp_path, eos):
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {eos}}}')
    with pytest.raises(EngineError, match="eos_token_id"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize("config", ['{"text_config": 5}', '{"max_position_embeddings": Infinity}', "{}"])
def test_positions_are_a_number(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EngineError, match="max_position_embeddings"):
        max_positions(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_no_configuration(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(EngineError, match="must be a regular file"):
        end_token_ids(tmp_path)


PLACES = {
    "decoder": {
        "tokenizer_config.json": {
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"9": {"content": "<end>"}},
        }
    },
    "added token": {
        "tokenizer_config.json": {"eos_token": "<end>"},
        "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<end>"}]},
    },
    "word": {
        "special_tokens_map.json": {"eos_token": {"content": "<end>"}},
        "tokenizer.json": {"model": {"vocab": {"a": 0, "<end>": 9}}},
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("named", "expected"), [(7, (7, 9)), ([7, 9], (7, 9)), (None, ())])
def test_responses_end_at_the_end_token_of_the_tokenizer_too(tmp_path, named, expected, place):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    for name, content in PLACES[place].items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_token_ids(tmp_path) == expected
