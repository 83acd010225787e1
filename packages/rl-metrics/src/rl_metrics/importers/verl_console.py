"""Steps in verl's console output, such as `(TaskRunner pid=1) step:3 - actor/entropy:0.4 - actor/lr:1e-06`.

The console also has a model's responses, so a line counts only if nothing but log prefixes precedes the step.

Source: `concat_dict_to_str` in verl/utils/logger/aggregate_logger.py.
"""

import re

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(
    "|".join(
        (
            r"\s+",
            r"\((?:\S+ )?pid=\d+(?:, ip=[^()\s,]+)?\)",  # of Ray
            r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?",
            r"[^|\r]*\d%\|[^|\r]*\|[^|\r\[\]]*\[[^\r\[\]]*\]",  # a bar of tqdm
            r"[^|\r]*\d%\|[^\r]*\r",  # the same, overwritten before it was complete
            r"\d+it \[[^\r\[\]]*\]",  # a bar without an end
        )
    )
)
STEP = re.compile(r"step:(\d{1,18}) - (\S.*)")
STEP_ANYWHERE = re.compile(rf"(?:^|[\s)\]]){STEP.pattern}")
REPEATED = re.compile(r"\[repeated \d+x across cluster\].*")

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
METRIC = re.compile(rf"\s*(\S.*):\s*(?:({NUMBER})|[\w.]+\(({NUMBER})(?:,[^()]*)?\))\s*")
VERL_NAME = re.compile(r"[^\s/]+(?:/[^\s/]+)+")


def step_of_line(line: str) -> tuple[int, dict[str, float]] | None:
    """Return step and values of a complete line, or None without them."""
    line = ESCAPES.sub("", line)
    start = 0
    while prefix := PREFIX.match(line, start):
        start = prefix.end()
    return _step(STEP.match(line, start))


def seems_step(line: str) -> bool:
    """Return whether a line has a step of verl, whatever precedes it."""
    return _step(STEP_ANYWHERE.search(ESCAPES.sub("", line))) is not None


def _step(match: re.Match[str] | None) -> tuple[int, dict[str, float]] | None:
    if match is None:
        return None
    parts = (METRIC.fullmatch(part) for part in REPEATED.sub("", match[2]).split(" - "))
    values = {part[1].strip(): float(part[2] or part[3]) for part in parts if part}
    return (int(match[1]), values) if any(map(VERL_NAME.fullmatch, values)) else None
