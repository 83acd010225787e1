"""An engine from another package: its responses have the number of the turn and a unique text."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

from rl_rollout import PromptTokenizer
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine

END = "<|im_end|>"
TURN_S = 0.02
"""Delay of a turn, so that some turns are running whenever the engine is killed."""


class SpeakerEngine(ScriptedEngine):
    def __init__(self, folder: Path, _options: dict[str, Any]) -> None:
        tokenizer = PromptTokenizer.load(folder)

        async def say(request: Any, _index: int) -> list[int]:
            await asyncio.sleep(TURN_S)
            (heard,) = tokenizer.decode([request.input_ids], skip_special_tokens=False)
            text = f"{heard.count('assistant')} {secrets.token_hex(8)}{END}"
            return list(tokenizer.encode([text], add_special_tokens=False)[0])

        traits = EngineTraits(name="speaker", max_model_len=1 << 16, vocab_size=1 << 16)
        super().__init__(say, end_token_ids=[tokenizer.token_id(END)], traits=traits)
