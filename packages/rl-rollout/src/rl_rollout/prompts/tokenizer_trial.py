"""A script for a child process: loads an untrusted tokenizer and chat template, and uses them once.

Exceptions do not matter here, because the caller reports them. This catches crashes that no `except` can.
"""

import json
import sys
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
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def main() -> None:
    """Read `{"folder": ..., "templates": [...], "options": {...}}` from standard input; print "passed" on success."""
    request = json.load(sys.stdin)
    try:
        _say("loading the tokenizer")
        _try_tokenizer(Path(request["folder"]))
        for template in request["templates"]:
            _say("rendering the chat template")
            _try_template(template, request["options"])
    except MemoryError:
        _say("it needs more memory than the trial allows")
    except BaseException as error:  # a Rust panic is not an Exception
        _say(f"{type(error).__name__}: {error}".partition("\n")[0])
    else:
        _say("passed")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _try_tokenizer(folder: Path) -> None:
    try:
        encode, decode = _loaded(folder)
        for sample in SAMPLES:
            _say(f"encoding {sample!a} {REPEATS} times")
            decode(encode([sample * REPEATS, sample * REPEATS + "~"]))
    except MemoryError:
        raise
    except Exception:  # transformers' own error is clearer
        return


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Return the functions that encode texts and decode ids."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return (lambda texts: [found.ids for found in fast.encode_batch(texts)]), fast.decode_batch
    from transformers import AutoTokenizer

    slow: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return (lambda texts: slow(texts)["input_ids"]), slow.batch_decode


def _try_template(template: str, options: dict[str, Any]) -> None:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """transformers' own tag, which marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

        def parse(self, parser: Any) -> Any:
            """Skip the tag."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

        def _pass(self, caller: Any) -> str:
            return str(caller())

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "1 Jan 2026"}
    for messages in MESSAGES:
        for tools in (None, [TOOL]):
            given = {"bos_token": "<s>", "eos_token": "</s>", "documents": None, "tools": tools, **options}
            try:
                environment.from_string(template).render(messages=messages, add_generation_prompt=True, **given)
            except MemoryError:
                raise
            except Exception:  # noqa: S112 - a template may refuse these messages
                continue


if __name__ == "__main__":
    main()
