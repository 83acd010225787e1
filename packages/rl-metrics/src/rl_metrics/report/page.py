"""The report's page: one self-contained HTML file."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import count
from typing import Any

STYLES = ("uPlot.min.css", "base.css", "charts.css", "viewer.css")
LIBRARY = "uPlot.iife.min.js"
SCRIPTS = (
    *("dom.js", "format.js", "packed.js", "store.js", "view_state.js"),
    *("table.js", "chart.js", "hang.js", "verdict.js", "step_links.js"),
    *("curves.js", "distributions.js", "step_timeline.js", "times.js", "outcome.js"),
    *("text_chunks.js", "trajectories.js", "filters.js", "text_search.js", "trajectory_list.js"),
    *("token_colors.js", "tokens.js", "turns.js", "conversation.js", "differences.js", "copying.js", "group.js"),
    *("session.js", "trajectory.js", "viewer.js", "generations.js", "validation.js", "worst.js"),
    *("probes.js", "run_info.js", "renewing.js", "main.js"),
)
"""Files of assets/, in the order of their concatenation."""

PLACE = "<!-- data -->"


def page_head(title: str, *, is_live: bool = False) -> bytes:
    """Return the page up to its data.

    Args:
        title: Title of the page; any text.
        is_live: Whether the page may request data from its own server, and from no other.
    """
    head = _asset("page.html").partition(PLACE)[0]
    styles = "\n".join(_asset(name) for name in STYLES)
    for place, text in (
        ("{policy}", _policy(styles, is_live=is_live)),
        ("{title}", html.escape(visible(title))),
        ("{styles}", styles),
    ):
        head = head.replace(place, text, 1)
    return head.encode()


def page_tail(manifest: Mapping[str, Any] | None) -> bytes:
    """Return the rest of the page, from the manifest on.

    Args:
        manifest: JSON of names of packed parts and numbers, without untrusted text. None makes the page request it.
    """
    text = json.dumps(manifest, allow_nan=False).replace("<", "\\u003c")
    described = "" if manifest is None else f'<script type="application/json" id="manifest">{text}</script>\n'
    scripts = "".join(f"<script>{script}</script>\n" for script in _scripts())
    rest = _asset("page.html").partition(PLACE)[2]
    return f"{described}{scripts}{rest}".encode()


def run_names(names: Sequence[str]) -> list[str]:
    """Return unique names for runs whose folders may have equal names."""
    taken, found = set(names), []
    for name in names:
        if names.count(name) > 1:
            name = next(one for number in count(1) if (one := f"{name} ({number})") not in taken)
            taken.add(name)
        found.append(name)
    return found


def visible(text: str) -> str:
    """Replace characters that HTML cannot contain (control characters and lone surrogates) by spaces."""
    return "".join(" " if ord(one) < 32 or 0xD800 <= ord(one) < 0xE000 else one for one in text)


@cache
def _asset(name: str) -> str:
    return files("rl_metrics.report").joinpath("assets", name).read_text("utf-8")


@cache
def _scripts() -> tuple[str, str]:
    """Return the chart library and the page's own script, whose files share one scope."""
    own = "\n".join(_asset(name) for name in SCRIPTS)
    return _asset(LIBRARY), f"(() => {{\n{own}\n}})();"


def _policy(styles: str, *, is_live: bool) -> str:
    """Return the Content-Security-Policy, which allows only these scripts and styles, and no network."""
    scripts = " ".join(map(_digest, _scripts()))
    ask = "connect-src 'self'; " if is_live else ""
    return (
        f"default-src 'none'; {ask}script-src {scripts}; style-src {_digest(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
