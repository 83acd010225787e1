"""Prepare the mixture example: the arithmetic example's prompts and tokenizer, and a small mixture of experts.

Everything is written to `prepared/` beside this file, and kept until this file, the arithmetic example's preparation or
the version of a library changes. The warm-up is also that of the arithmetic example.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path += [str(FOLDER.parent), str(FOLDER.parent / "arithmetic")]  # its files import each other
SOURCE: Any = importlib.import_module("arithmetic.prepare")


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def make_mixture(folder: Path, seed: int) -> None:
    """Write the arithmetic example's untrained model, with a mixture of experts in each layer."""
    import torch
    from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

    SOURCE.make_model_folder(folder)
    dense = Qwen3Config.from_pretrained(folder).to_dict()
    sizes = {name: value for name, value in dense.items() if name not in ("architectures", "model_type", "layer_types")}
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS)).save_pretrained(folder)


MIXTURE: Any = SOURCE.Preparation(
    name="mixture",
    folder=FOLDER / "prepared",
    script=Path(__file__),
    make_model=make_mixture,
    steps=300,
    learning_rate=4e-3,
    duration="about a minute on two cores",
)

if __name__ == "__main__":
    SOURCE.main(MIXTURE, __doc__)
