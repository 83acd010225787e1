"""Prepare the images example: pictures, a tokenizer, and a small policy that sees, warmed up on demonstrations.

Everything is written to `prepared/` beside this file, and kept until this file, task.py or the version of a library
changes. The learner that later runs GRPO also trains the initial policy, with its vision tower.
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import task

if TYPE_CHECKING:
    from rl_core import Batch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
FOLDER = Path(__file__).resolve().parent
PREPARED = FOLDER / "prepared"
MADE_WITH = ("torch", "megatron-core", "transformers", "tokenizers", "pyarrow", "pillow", "rl-distill")

STEPS = 200
PICTURES_PER_STEP = 32
HASTY_SHARE = 0.75
"""Share of the last demonstrations that count squares of any colour; the others describe the picture, and are right.

The share grows from 0, because seeing is harder to learn. The warm policy knows both ways, and its greedy answers are
hasty. GRPO learns to describe the picture."""

TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
PAD_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_end|>"
WORDS = (
    "How",
    " many",
    *(f" {colour}" for colour in task.COLOURS),
    f" {task.EMPTY}",
    " squares",
    "?",
    ":",
    *"01234",
    "\n",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
)
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
"""The processor's settings: a patch has 8 x 8 pixels, and a token a cell of 16 x 16."""


SPREAD = 0.06
"""Standard deviation of the initial weights. With transformers' 0.02, a model this narrow takes longer to see."""


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per word of the questions and per character of the answers."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD_TOKEN, END_TOKEN, *TOKENS.values())
    vocabulary = {token: index for index, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|.|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=END_TOKEN, extra_special_tokens=TOKENS
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model_folder(folder: Path, seed: int = 0) -> None:
    """Write configuration, processor, tokenizer and random weights of a Qwen2.5-VL of two million parameters."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tokenizer()
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(TOKENS.values()))
    text = {
        "vocab_size": 32,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": IMAGES["patch_size"],
        "spatial_merge_size": IMAGES["merge_size"],
        "temporal_patch_size": IMAGES["temporal_patch_size"],
        "window_size": 32,
        "fullatt_block_indexes": [2],
        "out_hidden_size": text["hidden_size"],
        "initializer_range": SPREAD,
    }
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=2))


def fingerprint() -> str:
    """Hash of everything that the prepared folder depends on."""
    digest = hashlib.sha256()
    for file in (FOLDER / "task.py", Path(__file__)):
        digest.update(file.read_bytes())
    for package in MADE_WITH:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()


def is_prepared() -> bool:
    """Return True if the folder exists, is complete and is up to date."""
    try:
        made: dict[str, str] = json.loads((PREPARED / "fingerprint.json").read_text())
    except (OSError, ValueError):
        return False
    return made.get("fingerprint") == fingerprint()


def prepare(seed: int = 0, steps: int = STEPS) -> None:
    """Write a temporary folder and rename it, so that an interrupted preparation leaves no incomplete folder.

    Args:
        seed: Seed of the random weights and of the demonstrations' order. The problems do not depend on it.
        steps: Steps of the warm-up.
    """
    started = time.perf_counter()
    say(f"images: preparing pictures, tokenizer and warm policy in {PREPARED} (once; about 2 minutes on two cores)")
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    problems = task.split_problems()
    for split, members in problems.items():
        write_prompts(part / f"{split}.parquet", members)
    make_model_folder(part / "untrained", seed)
    warm_up(part, problems["train"], seed, steps)
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    say(f"images: prepared in {time.perf_counter() - started:.0f} s")


def write_prompts(file: Path, problems: Sequence[task.Problem]) -> None:
    """Write problems as Parquet: chat messages with `<image>`, and a column of encoded images."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rl_core.images import encode_image

    rows = [
        {
            "data_source": "images",
            "prompt": [{"role": "user", "content": f"<image>{problem.question}"}],
            "images": [{"bytes": encode_image(problem.picture())}],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "colour": problem.colour},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def warm_up(part: Path, problems: Sequence[task.Problem], seed: int, steps: int) -> None:
    """Train all weights on demonstrations with supervised learning, and write the policy's folder."""
    from rl_core.images import ImageStore
    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    store = ImageStore(part / "images")
    options = LearnerOptions(
        learning_rate=1e-3,
        warmup_steps=min(20, steps - 1),
        decay_steps=steps,
        betas=(0.9, 0.99),
        micro_batch_tokens=8192,
        shared_prefix_tokens=4,  # the picture, which precedes all of its questions
        num_threads=2,
        image_folder=store.folder,
        trains_vision=True,
    )
    hasty, described = demonstrations(problems, store, part / "untrained")
    learner = MegatronLearner(part / "untrained", options)
    random = np.random.default_rng(seed)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        result = learner.train_step(draw(hasty, described, HASTY_SHARE * step / steps, random), supervised_objective)
        if step % 25 == 0:
            took = time.perf_counter() - started
            rest = took / step * (steps - step)
            say(f"  warm-up {step}/{steps}, loss {result.loss:.3f}, {took:.0f} s, {rest:.0f} s to go")
    (part / "checkpoint").mkdir()
    learner.save(part / "checkpoint")
    learner.close()
    (part / "checkpoint" / "policy").rename(part / "policy")
    for made in ("checkpoint", "untrained", "images"):
        shutil.rmtree(part / made)


def demonstrations(problems: Sequence[task.Problem], store: Any, policy: Path) -> tuple["Batch", "Batch"]:
    """Return demonstrations with hasty and with described answers, as trajectories that train only the answer.

    Each has a row for each picture and colour, in this order, so that a picture is computed once for all its questions.

    Args:
        problems: The problems.
        store: Gets their pictures.
        policy: A folder with the tokenizer and the image processor.
    """
    from rl_core import Batch, Trajectory
    from rl_core.images import ImageProcessor, encode_image

    tokenizer, processor = make_tokenizer(), ImageProcessor.load(policy)
    found: tuple[list[Trajectory], list[Trajectory]] = ([], [])
    for index, picture in enumerate(problems):
        image = encode_image(picture.picture())
        digest = store.put(image)
        for session, colour in enumerate(task.COLOURS):
            problem = replace(picture, colour=colour)
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": problem.question}]}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            question = np.asarray(tokenizer(processor.expanded(text, [image])).input_ids, dtype=np.int32)
            for rows, answer in zip(found, (problem.hasty_answer, problem.described_answer), strict=True):
                tokens = np.append(question, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]).astype(np.int32)
                rows.append(
                    Trajectory(
                        prompt_uid=str(index),
                        session_index=session,
                        input_ids=tokens,
                        loss_mask=np.arange(len(tokens)) >= len(question),
                        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
                        policy_versions=np.full(len(tokens), -1, dtype=np.int32),
                        images=processor.spans(question, [digest], [image]),
                    )
                )
    return Batch.from_trajectories(found[0]), Batch.from_trajectories(found[1])


def draw(hasty: "Batch", described: "Batch", share: float, random: np.random.Generator) -> "Batch":
    """Draw the demonstrations of one step: all questions about some pictures, each answered in one of the two ways."""
    from rl_core import Batch
    from rl_distill.objectives import with_loss_weights

    questions = np.arange(len(task.COLOURS))
    num_pictures = len(hasty) // len(questions)
    pictures = random.choice(num_pictures, size=min(PICTURES_PER_STEP, num_pictures), replace=False)
    rows = (pictures[:, None] * len(questions) + questions).reshape(-1)
    is_hasty = random.random(len(rows)) < share
    parts = [hasty.select(rows[is_hasty]), described.select(rows[~is_hasty])]
    batch = Batch.concat([part for part in parts if len(part)])
    return with_loss_weights(batch, aggregation="token-mean")


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


def main() -> None:
    """Prepare the example if it is missing or out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="prepare again even if nothing has changed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the warm policy; to change it, add --force")
    options = parser.parse_args()
    if options.force or not is_prepared():
        prepare(options.seed)
    else:
        say(f"images: {PREPARED} is up to date")


if __name__ == "__main__":
    main()
