"""Roll out an environment of verifiers 0.4 with a scripted engine, in a second, without a model or a network.

python examples/verifiers/run.py    # in a separate environment: see README.md
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core import Prompt
from rl_rollout import (
    GenerateRequest,
    GroupResult,
    PromptTokenizer,
    RewardScorer,
    Rollout,
    SamplingParams,
    quick,
    resolve_loop,
)
from rl_rollout.engines import ScriptedEngine

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of single characters with a chat template, as a substitute for your model's."""
    texts = ["<pad>", "<|start|>", "<|end|>", "\n", *map(chr, range(32, 127))]
    characters = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<|end|>", pad_token="<pad>", additional_special_tokens=["<|start|>"]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))


async def roll_out(folder: Path) -> list[GroupResult]:
    """Run two sessions of three tasks; the model is right at once in the first, and after "Sure?" in the second."""
    save_tokenizer(folder)
    tokenizer = PromptTokenizer.load(folder)

    heard_before: set[str] = set()

    def says(request: GenerateRequest, _index: int) -> Sequence[int]:
        (heard,) = tokenizer.decode([request.input_ids], skip_special_tokens=False)
        left, right = heard.partition("user:")[2][0], heard.partition("+")[2][0]
        is_sure = "Sure?" in heard or heard not in heard_before  # the first session of a task
        heard_before.add(heard)
        return tokenizer.encode([f"{int(left) + int(right) if is_sure else 0}<|end|>"], add_special_tokens=False)[0]

    engine = ScriptedEngine(says, end_token_ids=tokenizer.encode(["<|end|>"], add_special_tokens=False)[0])
    await engine.start()
    options = {
        "tokenizer": str(folder),
        "renderer": {"name": "default"},
        "environment": {"taskset": {"id": "sums"}, "agent": {"runtime": {"type": "subprocess"}}},
    }
    scorer = RewardScorer(quick(lambda _: 0.0))  # unused: verifiers computes the reward
    rollout = Rollout(engine, resolve_loop("verifiers", options), scorer=scorer, decode=tokenizer.decode)
    prompts = [
        Prompt(uid=f"task-{task}", input_ids=np.ones(1, np.int32), columns={"task": task}) for task in (12, 34, 56)
    ]
    try:
        return await rollout.run(prompts, num_sessions=2, sampling=SamplingParams(max_tokens=64), seed=0)
    finally:
        rollout.close()


def main() -> None:
    """Print the trained text of each trajectory."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(Path(__file__).parent))  # verifiers imports a taskset by its id, here sums.py
    with tempfile.TemporaryDirectory() as folder:
        groups = asyncio.run(roll_out(Path(folder)))
        tokenizer = PromptTokenizer.load(Path(folder))
        for group in groups:
            for reason in group.failures:
                raise SystemExit(f"{group.prompt.uid}: {reason}")
            for row in group.trajectories:
                texts = tokenizer.decode([row.input_ids, row.input_ids[row.loss_mask]], skip_special_tokens=False)
                print(f"{group.prompt.uid}  reward {row.reward:g}  trained {texts[1]!r} of {texts[0]!r}")


if __name__ == "__main__":
    main()
