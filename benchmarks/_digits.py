"""A tokenizer of ten digits, for policies whose responses mean nothing."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END_TOKEN = 1
FIRST_DIGIT = 2
"""Token of "0"."""


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer into a policy's folder."""
    digits = {str(digit): FIRST_DIGIT + digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": END_TOKEN, **digits}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = folder / "config.json"
    if not config.exists():  # for runs without a model
        config.write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": END_TOKEN}))
