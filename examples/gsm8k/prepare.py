"""Convert local GSM8K files to prompts: `python examples/gsm8k/prepare.py --train FILE --test FILE`.

The files are JSONL, Parquet or a saved Hugging Face dataset, with `question` and an `answer` that ends in `#### 18`.
Some training problems become the validation problems.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.errors import DataError, RLError
from rl_rollout.prompts import Rows, open_rows

PREPARED = Path(__file__).parent / "prepared"
INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def final_answer(answer: str, *, where: str) -> str:
    """Return the number after `####`, without thousands separators.

    Raises:
        DataError: The answer does not end with `####` and a number.
    """
    found = FINAL_ANSWER.search(answer)
    if found is None:
        raise DataError(f"{where}, field `answer`: expected an end like '#### 18', found {answer[-40:]!r}.")
    return found.group(1).replace(",", "")


def make_row(row: dict[str, Any], *, where: str, split: str, index: int) -> dict[str, Any]:
    """Return one problem as messages, ground truth and source.

    Raises:
        DataError: `question` or `answer` is missing or not text.
    """
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise DataError(f"{where}, field `{field}`: expected text, found {row.get(field)!r}.")
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question'].strip()}\n\n{INSTRUCTION}"}],
        "reward_model": {"style": "rule", "ground_truth": final_answer(row["answer"], where=where)},
        "extra_info": {"split": split, "index": index, "question": row["question"], "answer": row["answer"]},
    }


def make_rows(rows: Rows, *, split: str) -> list[dict[str, Any]]:
    """Return all problems of a file."""
    return [make_row(row, where=rows.locate(i), split=split, index=i) for i, row in enumerate(rows)]


def prepare(train: Path, test: Path, *, out: Path = PREPARED, num_validation: int = 512, seed: int = 0) -> None:
    """Write train.parquet, validation.parquet and test.parquet into a folder.

    Args:
        train: Source of training and validation problems.
        test: Source of test problems.
        out: Output folder; created if missing.
        num_validation: Number of training problems held out for validation.
        seed: Seed of their choice.

    Raises:
        DataError: A file or row cannot be used, or there are too few training problems.
    """
    problems = make_rows(open_rows(train), split="train")
    if not 0 < num_validation < len(problems):
        raise DataError(
            f"{train} has {len(problems)} problems, and {num_validation} are requested for validation; expected at "
            "least one on each side. Set --num-validation."
        )
    order = np.random.default_rng(seed).permutation(len(problems))
    held_out, kept = sorted(order[:num_validation].tolist()), sorted(order[num_validation:].tolist())
    splits = {
        "train": [problems[i] for i in kept],
        "validation": [problems[i] for i in held_out],
        "test": make_rows(open_rows(test), split="test"),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, members in splits.items():
        part = out / f".{name}.parquet.part"
        pq.write_table(pa.Table.from_pylist(members), part)
        part.rename(out / f"{name}.parquet")
        print(f"gsm8k: {len(members)} problems in {out / name}.parquet")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return 2 if a file cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's training problems")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K's test problems")
    parser.add_argument("--out", type=Path, default=PREPARED, help="folder to write (%(default)s)")
    parser.add_argument("--num-validation", type=int, default=512, help="problems held out (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out problems (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        prepare(given.train, given.test, out=given.out, num_validation=given.num_validation, seed=given.seed)
    except RLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
