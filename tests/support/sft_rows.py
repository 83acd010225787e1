"""Conversations of digits, a tokenizer with a chat template for them, and their tokens and masks, written by hand."""

import re
from collections.abc import Sequence
from typing import Any

SPECIAL = ("<pad>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>", "<tools>", "<think>")
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *"0123456789+-=\n"])}
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | map(attribute='name') | join('+') }}<eos>{% endif %}"
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_chat_tokenizer(template: str = TEMPLATE) -> Any:
    """Return a tokenizer with one token per character, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z]+>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.chat_template = template
    return wrapped


def said(*texts: str) -> list[dict[str, str]]:
    """Return a conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


ROWS = [
    said(f"{n}+{n % 3}=", f"{n + n % 3}")
    if n % 3
    else [{"role": "system", "content": f"{n % 7}"}, *said(f"{n}=", f"{n}{n}", f"{n}-", f"{n // 2}")]
    for n in range(22)
]
"""Short ones, and some of two turns after a system message."""


def tokens_of(messages: Sequence[Any]) -> tuple[list[int], list[bool]]:
    """Return a conversation's tokens, and which are trained: what the assistant says, up to its end token."""
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        parts = [f"<{message['role']}>", f"{message['content']}<eos>", "\n"]
        for place, part in enumerate(parts):
            own = [VOCABULARY[token] for token in re.findall(r"<[a-z]+>|[\s\S]", part)]
            ids += own
            mask += [place == 1 and message["role"] == "assistant"] * len(own)
    return ids, mask
