"""Notes about inputs that work, but probably not as intended."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_trainer_parts.rollouts.inputs import input_notes


@pytest.mark.parametrize(("named", "num_notes"), [([7], 1), ([7, 9], 0)])
def test_different_end_tokens_of_model_and_tokenizer_are_told(tmp_path: Path, named: list[int], num_notes: int) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    settings: Any = SimpleNamespace(
        policy=SimpleNamespace(path=tmp_path),
        rollout=SimpleNamespace(loop="single_turn", loop_options={}),
        prompts=SimpleNamespace(template_options={}),
    )
    inputs: Any = SimpleNamespace(
        train=[SimpleNamespace(messages=())],
        tokenizer=SimpleNamespace(has_chat_template=False, eos_token_id=9, sees_images=False),
    )
    notes = list(input_notes(settings, inputs))
    assert len(notes) == num_notes
    assert all("at token 7, and its tokenizer at token 9; responses end at all of them" in note for note in notes)
