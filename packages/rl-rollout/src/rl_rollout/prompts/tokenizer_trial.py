"""A script of `run_trial`: loads a stranger's tokenizer and chat templates, and uses them once.

Exceptions do not matter here, because the caller reports them. This catches what no `except` can.
"""

import json
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

SAMPLES = ("a", "aB", "A", "1", " ", "\n", "-", "!?", "ab ", "x y\n", "\u00e9", "\u4e2d", "\U0001f600", "<", "/")
REPEATS = 400
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 1 + 1?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "<think>\n2\n</think>\n\n2"},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""transformers' own tag, which marks the assistant's text."""


def main(folder: str, templates: list[str], options: dict[str, Any]) -> None:
    """Encode and decode samples, and render each template."""
    _attempt("loading the tokenizer", _use_tokenizer, Path(folder))
    for template, messages, tools in product(templates, MESSAGES, (None, TOOLS)):
        _attempt("rendering the chat template", _render, template, {"messages": messages, "tools": tools, **options})


def _attempt(what: str, use: Callable[..., None], *arguments: Any) -> None:
    _say(what)
    try:
        use(*arguments)
    except MemoryError:
        raise
    except Exception:  # transformers' own error is clearer, and a template may refuse these messages
        return


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _use_tokenizer(folder: Path) -> None:
    encode: Any
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encode, decode = (lambda texts: [found.ids for found in fast.encode_batch(texts)]), fast.decode_batch
    else:
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encode, decode = (lambda texts: slow(texts)["input_ids"]), slow.batch_decode
    for sample in SAMPLES:
        _say(f"encoding {sample!a} {REPEATS} times")
        decode(encode([sample * REPEATS, sample * REPEATS + "~"]))


def _render(template: str, variables: dict[str, Any]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda _: "1 Jan 2026"
    given = {"bos_token": "<s>", "eos_token": "</s>", "documents": None, "add_generation_prompt": True, **variables}
    environment.from_string(GENERATION_TAG.sub("", template)).render(given)
