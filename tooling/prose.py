"""Check the English of documents, docstrings and messages with Harper, an offline grammar checker.

`python tooling/prose.py [FILE ...]` checks the named files, or all documents and sources of the repository.
tooling/prose contains the accepted words, the phrases to avoid with their replacements, and Harper's rules.
"""

from __future__ import annotations

import ast
import collections
import json
import re
import string
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "tooling" / "prose"
MIN_WORDS = 4
"""Minimum number of words for a string in code to count as prose."""
NAME = re.compile(r"\w*(?:\d|\w_\w|[a-z][A-Z]|[A-Z]{2})\w*|(?<!['\w])[B-HJ-Zb-hj-z]\b|\w*[µᵢⁿ]\w*")
"""Pattern of names in documents, such as vLLM, GRPO or s."""
SYMBOLS = r"[\w./+*=:-]*(?:[_/=*\\<>{}\[\]|@#$%]|\w\.\w)[\w./+*=:()\[\]{}<>|@#$%-]*"
CODE = re.compile(f"{SYMBOLS}|{NAME.pattern}")
"""Pattern of code and names in docstrings."""
FIELD = re.compile(r"^(?:\*{0,2}\w+(?:, \*{0,2}\w+)*|[A-Z]\w+Error)(?: \([^)]*\))?: ")
"""Pattern of the name before an entry of Args, Returns or Raises in a docstring."""
Line = tuple[str, str, int]
"""A text, its file, and its line number there."""


def tracked_files() -> list[str]:
    """Return the Markdown files, Python sources and notebooks to check."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py", "*.ipynb"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [
        file
        for file in files
        if (ROOT / file).exists() and not (file.endswith(".py") and re.search(r"(^|/)(tests|conftest\.py)(/|$)", file))
    ]


def python_lines(file: str, source: str) -> Iterator[Line]:
    """Yield the prose in a Python file, with one paragraph per docstring entry and message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x1" for part in node.values)
            for part in node.values:
                if isinstance(part, ast.Constant):
                    part.value = ""  # ast.walk visits it again
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if is_prose(text):
            for number, line in enumerate(text.splitlines()):
                yield from paragraph_line(line.strip(), file, node.lineno + number)
            yield "", file, node.lineno


def is_prose(text: str) -> bool:
    """Return True for a text of several words, most of them made of letters."""
    words = text.split()
    plain = [word for word in words if re.fullmatch(r"[(\"'`]*[A-Za-z][a-z'-]*[.,;:!?)\"'`]*", word)]
    return len(words) >= MIN_WORDS and len(plain) > len(words) * 0.6


def paragraph_line(line: str, file: str, number: int) -> Iterator[Line]:
    """Yield a docstring's line as Markdown: names become code, and each entry of a section its own paragraph."""
    if line in ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:") or line.startswith(("->", "<-")):
        yield "", file, number
        return
    if entry := FIELD.match(line):
        yield "", file, number
        line = line[entry.end() :]
    yield without_names(line, CODE), file, number


def without_names(line: str, names: re.Pattern[str]) -> str:
    """Replace names in a line with code, so that only words are spell-checked."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part[:1] == "`" else names.sub("`x`", part) for part in parts).replace("`'s", "`")


def document_lines(file: str) -> Iterator[Line]:
    """Yield the prose of a file as lines of Markdown."""
    source = (ROOT / file).read_text()
    if file.endswith(".ipynb"):
        cells = [cell for cell in json.loads(source)["cells"] if cell["cell_type"] == "markdown"]
        source = "\n\n".join("".join(cell["source"]) for cell in cells)
    if file.endswith(".py"):
        yield from python_lines(file, source)
    else:
        for number, line in enumerate(source.splitlines(), start=1):
            ends = line.replace("; ", ". ") if line.startswith("|") else line  # table cells are lists, not sentences
            yield without_names(ends, NAME), file, number
    yield "", file, 0


def phrase_rules(phrases: Mapping[str, str]) -> dict[str, str]:
    """Return a rule in Weir, Harper's rule language, for each phrase; its message is the replacement."""
    return {
        f"Phrase{number}": (
            f'expr main ({phrase})\nlet message "Say: {say}."\nlet description "An odd phrase."\n'
            f'let kind "WordChoice"\nlet becomes "{say}"\n'
        )
        for number, (phrase, say) in enumerate(phrases.items())
    }


def findings(files: Sequence[str]) -> list[tuple[str, int, str, str, str]]:
    """Run Harper on the files and return the file, line, rule, text and message of each finding."""
    settings = tomllib.loads((SETTINGS / "rules.toml").read_text())
    rules = phrase_rules(settings["phrases"])
    documents = [
        [line for file in files if file.endswith(kind) for line in document_lines(file)]
        for kind in ((".md", ".ipynb"), ".py")
    ]
    with tempfile.TemporaryDirectory(prefix="prose-") as folder:
        pack = Path(folder, "phrases.weirpack")
        manifest = dict.fromkeys(("author", "version", "description", "license"), "")
        with zipfile.ZipFile(pack, "w") as archive:
            archive.writestr("manifest.json", json.dumps(manifest))
            for name, rule in rules.items():
                archive.writestr(f"{name}.weir", rule)
        paths = [Path(folder, f"{number}.md") for number in range(len(documents))]
        for path, lines in zip(paths, documents, strict=True):
            path.write_text("\n".join(text for text, _, _ in lines))
        only = ",".join((*settings["rules"], *rules))
        options = ["--quiet", "--format", "json", "--dialect", "british", "--only", only, "--weirpacks", str(pack)]
        command = [sys.executable, "-m", "harper", "lint", *options, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout.startswith("["):
            raise SystemExit(f"Harper failed: {done.stderr}")
        reports = {report["file"]: report["lints"] for report in json.loads(done.stdout)}
    known = set((SETTINGS / "words.txt").read_text().lower().split())
    found = []
    for path, lines in zip(paths, documents, strict=True):
        for lint in reports.get(path.name, []):
            _, file, number = lines[lint["line"] - 1]
            text, rule = " ".join(lint["matched_text"].split()), lint["rule"].rstrip(string.digits)
            words = text.lower().rstrip(".").removesuffix("'s").split()
            if rule != "SpellCheck" or any(word not in known and len(word) > 1 for word in words):
                found.append((file, number, rule, text, lint["message"]))
    return sorted(found)


def main() -> None:
    """Print each finding and exit with 1 if there are any. `--count` prints the number by rule."""
    words = [word for word in sys.argv[1:] if word != "--count"]
    found = findings(words or tracked_files())
    if "--count" in sys.argv:
        for rule, count in collections.Counter(rule for _, _, rule, _, _ in found).most_common():
            print(f"{count:6}  {rule}")
    else:
        for file, number, rule, text, message in found:
            print(f"{file}:{number}: {rule}: {text[:80]!r}. {message}")
    if found:
        raise SystemExit(f"{len(found)} findings. Accepted words and phrases to avoid are in tooling/prose.")


if __name__ == "__main__":
    main()
