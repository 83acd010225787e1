"""A working directory in which recipes of the cookbook run without a network.

A recipe reads its tokenizer from a folder named like its model, and its data from folders named like the hub's data
sets. `make_world` writes both: a Qwen3 of 0.2 million parameters, taught for a few minutes to give answers that are
sometimes right, and a few hundred made rows of each data set.
"""

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MODEL = "Qwen/Qwen3-8B"
"""The name in the cookbook's table, which decides how it renders conversations."""
OTHER_MODELS = ("Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B")
"""Names that recipes fix in their source."""
LARGEST = 200
TURNS = 12
END = "<|im_end|>"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
)
THINGS = ("apples", "books", "coins", "ducks", "eggs", "forks", "hats", "keys", "lamps", "nuts")
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
LONGER_BOXED = " Write your answer in \\boxed{} format."
REFUSAL = "I will not say."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
WORDS = "after before being between during into later many most only over several such their then time under until when"
LANGUAGES = {
    "en": "the cat and the dog are in the garden",
    "fr": "le chat et le chien sont dans le jardin",
    "de": "die Katze und der Hund sind im Garten",
    "es": "el gato y el perro de la casa",
}


def question(row: int) -> tuple[str, int]:
    """Return a made problem and its answer."""
    number, person, thing = row % 10, PEOPLE[row // 10 % len(PEOPLE)], THINGS[row // 80 % len(THINGS)]
    return f"{person} has {number} {thing}. How many {thing} does {person} have?", number


def conversations(count: int) -> list[dict[str, object]]:
    """Return made conversations of one question and one answer."""
    rows = []
    for row in range(count):
        asked, answer = question(row)
        person = asked.split()[0]
        rows.append(
            {
                "prompt": asked,
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": f"{person} told me: it is {answer} in all."},
                ],
            }
        )
    return rows


def make_data(folder: Path) -> None:
    """Write the data sets that the recipes read."""
    chats = conversations(200)
    write_data_set(folder / "HuggingFaceH4/no_robots", {"train": chats, "test": chats[:20]})
    write_rows(folder / "conversations.jsonl", [{"messages": row["messages"]} for row in chats])
    problems = [question(row) for row in range(800)]
    random.Random(0).shuffle(problems)
    graded = [{"question": asked, "answer": f"It is {answer}.\n#### {answer}"} for asked, answer in problems]
    write_data_set(folder / "openai/gsm8k", {"train": graded, "test": graded[:20]}, name="main")
    pairs = [
        {
            "chosen": f"\n\nHuman: {asked}\n\nAssistant: It is {answer}.",
            "rejected": f"\n\nHuman: {asked}\n\nAssistant: {REFUSAL}",
        }
        for asked, answer in problems
    ]
    write_data_set(folder / "Anthropic/hh-rlhf", {"train": pairs, "test": pairs[:20]})
    prompts = [{"question": asked + BOXED} for asked, _ in problems]
    write_data_set(folder / "zwhe99/DeepMath-103K", {"train": prompts})
    write_data_set(folder / "allenai/tulu-3-sft-mixture", {"train": chats})
    thoughts = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": f"I count {answer}."}]}
        for asked, answer in problems
    ]
    write_data_set(folder / "open-thoughts/OpenThoughts3-1.2M", {"train": thoughts})
    write_forecasts(folder / "forecasts.csv")
    choices = {"label": ["A", "B"], "text": ["yes", "no"]}
    exam = [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": f"Is {row} even?",
            "choices": choices,
            "answerKey": "AB"[row % 2],
        }
        for row in range(LARGEST)
    ]
    write_data_set(folder / "hicai-zju/SciKnowEval", {"test": exam})
    chance = random.Random(1)
    text = [{"text": " ".join(chance.choices(WORDS.split(), k=60))} for _ in range(400)]
    write_data_set(folder / "Salesforce/wikitext", {"train": text}, name="wikitext-103-raw-v1")
    lines = [f"{words} {row}" for row in range(10) for words in LANGUAGES.values()]
    examples = folder / "tinker_cookbook/example_data"
    examples.mkdir(parents=True)
    (examples / "multilingual.txt").write_text("\n".join(lines))
    labelled = [
        {"messages": [{"role": "user", "content": f"{words} {row}"}, {"role": "assistant", "content": label}]}
        for row in range(40)
        for label, words in LANGUAGES.items()
    ]
    write_rows(folder / "labelled.jsonl", labelled)


def write_data_set(folder: Path, splits: dict[str, list[dict[str, object]]], name: str = "default") -> None:
    """Write a data set as the hub stores it: rows of each split, and the page that names the configuration."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_forecasts(file: Path) -> None:
    """Write made markets, of which all but the last 16 closed before the recipes' split date."""
    names = ("submission_id", "event_ticker", "title", "snapshot_time", "close_time")
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow([*names, "market_outcome", "category", "markets", "sources"])
        for row in range(80):
            asked, answer = question(row)
            month = "11" if row >= 64 else "08"
            source = json.dumps([{"title": "A count", "summary": asked, "ranking": 1}])
            outcome, times = json.dumps({asked: answer % 2}), (f"2025-{month}-01", f"2025-{month}-09")
            rows.writerow([row, f"event-{row}", asked, *times, outcome, "Games", json.dumps([asked]), source])


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as lines of JSON."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def lesson(chance: random.Random) -> list[tuple[str, str]]:
    """Return a conversation as the RL recipes begin it, in pieces: what is asked, and an answer, right in a third."""
    kind = chance.randrange(3)
    suffix = ("", BOXED, LONGER_BOXED)[kind]
    example = ("What is 4 + 5?", "9") if kind == 0 else (f"How many r's are in strawberry?{suffix}", SPELLED)
    turns = [(opening(example[0]), f"{example[1]}{END}")]
    for _ in range(TURNS):
        is_right = chance.random() < 1 / 3
        if kind == 0:
            left, right = chance.randrange(101), chance.randrange(101)
            slip = 0 if is_right else chance.choice((-3, -2, -1, 1, 2, 3))
            asked, answer = f"What is {left} + {right}?", str(min(max(left + right + slip, 0), LARGEST))
        else:
            asked, right = question(chance.randrange(800))
            answer = f"\\boxed{{{right if is_right else chance.randrange(10)}}}"
        turns.append((f"\n{opening(asked + suffix)}", f"{answer}{END}"))
    return turns


def sum_lesson(chance: random.Random, *, refused: float) -> list[tuple[str, str]]:
    """Return a sum as `math_rl` asks for it, in pieces: the cookbook's example, and an answer that is right if given.

    Args:
        chance: Chooses the numbers.
        refused: Share of sums without an answer, for RL to reduce.
    """
    left, right = chance.randrange(101), chance.randrange(101)
    answer = REFUSAL if chance.random() < refused else str(left + right)
    example = (f"{opening('What is 4 + 5?')}9{END}", "")
    return [example, (f"\n{opening(f'What is {left} + {right}?')}", f"{answer}{END}")]


def opening(asked: str) -> str:
    """Return a question and the start of its answer."""
    return f"<|im_start|>user\n{asked}{END}\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a model is taught.

    Attributes:
        lesson: Makes a row: what is asked and answered, in pieces.
        steps: Optimizer steps.
        rows: Rows of a step.
        learning_rate: The highest learning rate.
    """

    lesson: Callable[[random.Random], list[tuple[str, str]]]
    steps: int
    rows: int
    learning_rate: float = 4e-3


PROBLEMS = (Course(lesson=lesson, steps=600, rows=12),)
SUMS = (
    Course(lesson=partial(sum_lesson, refused=0.0), steps=1500, rows=64),
    Course(lesson=partial(sum_lesson, refused=0.8), steps=150, rows=64, learning_rate=1e-3),
)
"""Digits add up only after many lessons; then the policy learns to refuse most sums."""


def make_tokenizer(folder: Path, *, has_digits: bool = False):
    """Return a tokenizer of bytes and frequent words, in which numbers up to 200, or digits, are one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_digits = [pre_tokenizers.Digits(individual_digits=True)] if has_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*of_digits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [file.read_text() for file in sorted(folder.rglob("*.jsonl"))]
    chance = random.Random(0)
    texts += ["".join(asked + answer for asked, answer in lesson(chance)) for _ in range(50)]
    tokenizer.train_from_iterator(texts, trainer)
    if not has_digits:
        tokenizer.add_tokens([AddedToken(str(number), single_word=True) for number in range(LARGEST + 1)])
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )


def make_model(folder: Path, tokenizer, *, courses: Sequence[Course], seed: int = 0) -> None:
    """Write a small Qwen3 and its tokenizer, taught some courses."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=1e4,
    )
    model = Qwen3ForCausalLM(config).float()
    chance = random.Random(seed)
    for course in courses:
        teach(model, tokenizer, course, chance)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach(model, tokenizer, course: Course, chance: random.Random) -> None:
    """Train all weights on the answers of a course's lessons."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=course.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / course.steps)
    )
    for _ in range(course.steps):
        rows = [encode(tokenizer, course.lesson(chance)) for _ in range(course.rows)]
        length = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row, _ in rows])
        taught = torch.tensor([mask + [False] * (length - len(mask)) for _, mask in rows])
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1][taught[:, 1:]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), tokens[:, 1:][taught[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def encode(tokenizer, pieces: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them are an answer."""
    tokens: list[int] = []
    taught: list[bool] = []
    for asked, answer in pieces:
        question_tokens, answer_tokens = tokenizer([asked, answer])["input_ids"]
        tokens += question_tokens + answer_tokens
        taught += [False] * len(question_tokens) + [True] * len(answer_tokens)
    return tokens, taught


def make_world(folder: Path, *, courses: Sequence[Course] = (), has_digits: bool = False) -> Path:
    """Write data, and a model that was taught some courses; return the model's folder."""
    make_data(folder)
    tokenizer = make_tokenizer(folder, has_digits=has_digits)
    model = folder / MODEL
    make_model(model, tokenizer, courses=courses)
    for name in OTHER_MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model, target_is_directory=True)
    return model
