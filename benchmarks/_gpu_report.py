"""Report of benchmarks/gpu.py: written after every measurement and resumed by the next start; table and advice."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _gpu_plan import BOUND, Group

Row = dict[str, Any]

WANTED = (
    ("Qwen3-4B, 8k packs: MFU", "ours-4b/4k", "mfu", 0.45),
    ("Qwen3-4B: tokens/s, of transformers'", "ours-4b/4k", "times_as_fast_as_transformers", 1.3),
    ("30B-A3B of 8 layers: MFU", "ours-30b-a3b/4k", "mfu", 0.30),
    ("publish and prove 8 GB: seconds at most", "weights-4b/publish_and_prove", "wall_s", 1.0),
    ("shared_512_16: share of the bound", "ours-4b/bound", "share_of_bound", 0.85),
)
"""Targets for one H200: title, measurement, field, wanted value."""
_AT_MOST = ("wall_s",)
SAME = ("device", "torch", "is_quick")
"""Fields that must be unchanged to resume a report."""
AGREEMENT = 3e-2
"""Maximum relative difference of the sides' losses and gradient norms, in bfloat16."""
COMPARED = "/4k"
"""Suffix of the workload with which all sides start, from the same weights."""

ADVICE = (
    (("OutOfMemory", "out of memory"), "it does not fit: end what else uses the GPU (`nvidia-smi`), then start again"),
    (("MissingExtra", "No module named", "is not installed"), "install what locks/gpu.md names, then start again"),
    (("no kernel image", "not compatible with the current PyTorch"), "this torch has no code for the GPU: install one "
     "that was built for it (python -c 'import torch; print(torch.cuda.get_arch_list())')"),
    (("C compiler", "triton", "inductor", "gcc"), "torch.compile needs a C compiler and triton: install gcc, or set "
     "TORCHDYNAMO_DISABLE=1"),
    (("signal 9",), "the host's memory ran out, or someone ended it: free memory (30 GB are enough)"),
    (("No space left", "needs room"), "make room in /dev/shm or set TMPDIR to a larger folder"),
    (("no answer",), "it took longer than was left; give more with --minutes, or choose with --only"),
    (("illegal memory access", "device-side assert", "CUDA error"), "a kernel failed; run again with --only GROUP "
     "and CUDA_LAUNCH_BLOCKING=1 to see which"),
)  # fmt: skip
"""Parts of error messages, and advice for each."""


def advice_for(error: str) -> str:
    """Return advice for an error."""
    for words, advice in ADVICE:
        if any(word in error for word in words):
            return advice
    return "see the log; run it alone with --only GROUP"


class Report:
    """All results, saved after every change.

    Attributes:
        content: Content of the file.
        file: Path of the report.
    """

    def __init__(self, file: Path, known: Mapping[str, Any], *, is_fresh: bool) -> None:
        """Resume the file's report, or start a new one.

        Args:
            file: Path of the JSON file.
            known: Facts about machine and program, with the names in `SAME`.
            is_fresh: Start over even if the file exists.

        Raises:
            ValueError: The file is not a report, or from another machine or torch.
        """
        self.file = file
        self.content: dict[str, Any] = {
            "benchmark": "gpu",
            **known,
            "results": [],
            "failures": [],
            "not_reached": [],
            "skipped": {},
            "targets": [],
        }
        if file.exists() and not is_fresh:
            self.content = _continued(file, self.content)

    @property
    def done(self) -> set[str]:
        """Return the names of finished measurements."""
        return {row["name"] for row in self.content["results"]}

    def forget(self, groups: Sequence[Group]) -> None:
        """Discard the measurements of these groups, so that they are repeated."""
        begins = tuple(f"{group.name}/" for group in groups)
        self.content["results"] = [row for row in self.content["results"] if not row["name"].startswith(begins)]

    def add(self, group: Group, told: Mapping[str, Any]) -> None:
        """Store a side's result of a row."""
        name = f"{group.name}/{told['row']}"
        if "values" in told:
            workload = "/".join(filter(None, (group.shape, told["row"])))
            key = {"name": name, "system": group.kind, "workload": workload, "sources": self.content["sources"]}
            self.content["results"].append({**key, **told["values"]})
        elif "error" in told:
            self._fail(name, told["error"], advice_for(told["error"]))
        self.write()

    def finish(self, groups: Sequence[Group], skipped: Mapping[str, str]) -> None:
        """Add what was not reached, and the results for the targets."""
        compare(self.content["results"])
        for row in self.content["results"]:
            if not row.get("difference", 0.0) <= AGREEMENT:
                error = f"losses or gradient norms differ by {row['difference']:.2g} from transformers'"
                self._fail(row["name"], error, "one of the two computes something else; compare no speeds")
        failed = {row["name"] for row in self.content["failures"]}
        names = [f"{group.name}/{row}" for group in groups for row in group.rows if group.name not in skipped]
        self.content["not_reached"] = [name for name in names if name not in self.done | failed]
        self.content["skipped"] = dict(skipped)
        self.content["targets"] = targets([] if self.content["is_quick"] else self.content["results"])
        self.write()

    def _fail(self, name: str, error: str, advice: str) -> None:
        self.content["failures"].append({"name": name, "error": error, "advice": advice})

    def write(self) -> None:
        """Replace the file atomically."""
        part = self.file.with_name(self.file.name + ".part")
        part.write_text(json.dumps(self.content, indent=2) + "\n")
        part.replace(self.file)


def _continued(file: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        differences = [f"{name} {found[name]!r}, now {fresh[name]!r}" for name in SAME if found[name] != fresh[name]]
        rows = found["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no report of this program ({error}); choose another --json, or --fresh.") from None
    if differences:
        raise ValueError(f"{file} was measured with {'; '.join(differences)}. Start over with --fresh.")
    return {**fresh, "results": rows}


def compare(rows: Sequence[Row]) -> None:
    """Add to each of our rows its ratio to transformers, to megatron and to its bound on the same workload."""
    by_name = {row["name"]: row for row in rows}
    for name, row in by_name.items():
        shared = by_name.get(name.replace("/bound", f"/{BOUND}"))
        if name.endswith("/bound") and shared is not None:
            row["share_of_bound"] = shared["times_as_fast_as_apart"] / row["bound"]
    by_key = {(row["system"], row["workload"]): row for row in rows}
    for row in rows:
        if row["system"] not in ("ours", "transformer_engine"):
            continue
        for peer in ("transformers", "megatron"):
            other = by_key.get((peer, row["workload"]))
            if other is None or other["num_layers"] != row.get("num_layers"):
                continue
            row[f"times_as_fast_as_{peer}"] = row["tokens_per_s"] / other["tokens_per_s"]
            if peer == "transformers" and row["workload"].endswith(COMPARED):  # megatron has other weights
                pairs = [(row[name][0], other[name][0]) for name in ("losses", "grad_norms")]
                row["difference"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def targets(rows: Sequence[Row]) -> list[Row]:
    """Return each target with the result; None if not measured."""
    found = []
    by_name = {row["name"]: row for row in rows}
    for what, name, field, wanted in WANTED:
        value = by_name.get(name, {}).get(field)
        is_met = None if value is None else (value <= wanted if field in _AT_MOST else value >= wanted)
        found.append({"what": what, "wanted": wanted, "found": value, "is_met": is_met})
    return found


def table(content: Mapping[str, Any]) -> list[str]:
    """Return the lines to print at the end."""
    noted = () if content["is_quick"] else _NOTED
    lines = [
        f"  {'measurement':36}{'tokens/s':>11}{'MFU':>7}{'GB/s':>8}{'seconds':>9}{'GiB':>7}  notes",
        *(_line(row, noted) for row in content["results"]),
        *(f"  {row['name']:36}FAILED  {row['error']}\n      {row['advice']}" for row in content["failures"]),
    ]
    lines += [f"  {name:36}skipped: {reason}" for name, reason in content["skipped"].items()]
    if content["not_reached"]:
        lines.append(f"  not reached, start again to go on: {', '.join(content['not_reached'])}")
    made_by = sorted({row["sources"] for row in content["results"]})
    if len(made_by) > 1:
        lines.append(f"  made by several states of the sources (`sources` of each row): {', '.join(made_by)}")
    if content["is_quick"]:
        return [*lines, "  tiny sizes: the figures say nothing of speed"]
    lines.append("wanted of one H200")
    for target in content["targets"]:
        verdict = {None: "not measured", True: "met", False: "missed"}[target["is_met"]]
        value = "-" if target["found"] is None else f"{target['found']:.3g}"
        lines.append(f"  {target['what']:44}{target['wanted']:>6g}  found {value}: {verdict}")
    return lines


def _line(row: Row, noted: Sequence[str]) -> str:
    cells = [
        _cell(row.get("tokens_per_s"), 11, ",.0f"),
        _cell(row.get("mfu"), 7, ".3f"),
        _cell(row.get("gb_per_s"), 8, ".2f"),
        _cell(row.get("step_s", row.get("wall_s")), 9, ".3f"),
        _cell(row.get("peak_memory_gib"), 7, ".1f"),
    ]
    notes = [f"{name.replace('_', ' ')} {row[name]:.3g}" for name in noted if isinstance(row.get(name), float)]
    notes += [f"recompute {row['recompute']}"] if row.get("recompute", "none") != "none" else []
    notes += [f"{row['num_layers']} layers"] if "num_layers" in row else []
    return f"  {row['name']:36}{''.join(cells)}  {', '.join(notes)}"


_NOTED = (
    "times_as_fast_as_transformers",
    "times_as_fast_as_megatron",
    "times_as_fast_as_apart",
    "share_of_bound",
    "times_as_fast_as_full_softmax",
    "memory_of_full_softmax",
)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
