"""Steps in verl's console output, such as `(TaskRunner pid=1) step:3 - actor/entropy:0.4 - actor/lr:1e-06`.

The console also has a model's responses, so a line counts only if nothing but log prefixes precedes the step.

Source: `concat_dict_to_str` in verl/utils/logger/aggregate_logger.py.
"""

import re

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RAY_PREFIX = r"\((?:\S+ )?pid=\d+(?:, ip=[^()\s,]+)?\)"
RAY = re.compile(rf"^{RAY_PREFIX} ?")
PREFIX = re.compile(
    "|".join(
        (
            r"\s+",
            RAY_PREFIX,
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

BAR = re.compile(
    r"(?:[^|\r]*\d%\|[^|\r]*\| *)?(?P<step>\d{1,18})(?:/\d+|it) \[[^\r\[\],]*, *[\d.?]+(?:s/it|it/s)"
    r"(?P<postfix>(?:, *[^\r\[\],=]+=[^\r\[\],]*)+)\]"
)
"""A bar of tqdm with metrics after its rate, such as `3/20 [00:30<02:50, 10.0s/it, loss=0.1, kl=0.002]`."""

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
METRIC = re.compile(rf"\s*(\S.*):\s*(?:({NUMBER})|[\w.]+\(({NUMBER})(?:,[^()]*)?\))\s*")
VERL_NAME = re.compile(r"[^\s/]+(?:/[^\s/]+)+")


def step_of_line(line: str) -> tuple[int, dict[str, float]] | None:
    """Return step and values of a complete line, or None without them."""
    line = ESCAPES.sub("", line)
    at = 0
    while found := PREFIX.match(line, at):
        at = found.end()
    return _step(STEP.match(line, at))


def seems_step(line: str) -> bool:
    """Return whether a line has a step of verl, whatever precedes it."""
    return _step(STEP_ANYWHERE.search(ESCAPES.sub("", line))) is not None


def bars_of_line(line: str) -> dict[int, dict[str, float]]:
    """Return the metrics in the progress bars of a line, by the number of finished steps."""
    found: dict[int, dict[str, float]] = {}
    for drawn in ESCAPES.sub("", line).split("\r"):
        bar = BAR.fullmatch(RAY.sub("", drawn).strip())
        if bar is not None:
            pairs = (one.split("=", 1) for one in bar["postfix"].strip(", ").split(","))
            numbers = {name.strip(): value.strip() for name, value in pairs}
            found[int(bar["step"])] = {name: float(v) for name, v in numbers.items() if re.fullmatch(NUMBER, v)}
    return found


def _step(found: re.Match[str] | None) -> tuple[int, dict[str, float]] | None:
    if found is None:
        return None
    parts = (METRIC.fullmatch(part) for part in REPEATED.sub("", found[2]).split(" - "))
    values = {part[1].strip(): float(part[2] or part[3]) for part in parts if part}
    return (int(found[1]), values) if any(map(VERL_NAME.fullmatch, values)) else None
