"""Writes reports of running and finished runs to one file."""

import glob
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.cluster.processes.guard import is_running
from rl_core.errors import SettingsError
from rl_core.files import sync_file, sync_folder
from rl_core.images import ImageStore
from rl_core.record_fields import converts_arguments
from rl_metrics.report.outcome import describe_outcome
from rl_metrics.report.packing import BlobSink, pack, page_blobs
from rl_metrics.report.page import page_head, page_tail, run_names
from rl_metrics.report.row_blobs import pack_generations, pack_rollouts
from rl_metrics.report.run_parts import (
    SESSION_PLACE,
    describe_hang,
    describe_health,
    flat_settings,
    notable_events,
    pack_curves,
    pack_distributions,
    pack_probes,
    slowest_sessions,
)
from rl_metrics.run_files.rollout_log import RolloutRow
from rl_metrics.run_files.run_record import RunRecord

MAX_TRAJECTORIES = 50_000
"""Default maximum number of trajectories per run in a report; larger runs are sampled."""

WORST_SHARE = 0.25
"""Maximum share of kept trajectories that are chosen for low rewards."""

WORST_BELOW = 0.5
"""Upper limit of a worst case's reward."""


@converts_arguments
def write_report(runs: Sequence[RunRecord], output: Path, *, max_trajectories: int = MAX_TRAJECTORIES) -> None:
    """Write one HTML file that shows the runs, including running ones; the write is atomic.

    Args:
        runs: At least one run; several are compared. Data that a record has already read is not reread.
        output: A .html file in an existing folder.
        max_trajectories: Maximum number of trajectories per run; larger runs are sampled, with their worst cases.

    Raises:
        SettingsError: No run was given, max_trajectories is below 1, or the output's path is invalid.
        OSError: The file cannot be written, or a run's cannot be read.
    """
    check_request(runs, max_trajectories)
    check_output(output)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")  # a trainer and its user may write at once
    _remove_left_parts(output)
    try:
        with part.open("wb") as page:
            names = run_names([run.name for run in runs])
            page.write(page_head(", ".join(names)))
            sink = page_blobs(page)
            page.write(page_tail(pack_runs(runs, sink, max_trajectories=max_trajectories)))
        sync_file(part)
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(output.parent)


def _remove_left_parts(output: Path) -> None:
    """Remove unfinished parts of killed processes."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.part"):
        pid = left.suffixes[-2].removeprefix(".") if len(left.suffixes) > 1 else ""
        if pid.isdecimal() and not is_running(int(pid)):
            left.unlink(missing_ok=True)


def check_output(output: Path) -> None:
    """Refuse a path that is no .html file in an existing folder.

    Raises:
        SettingsError: The file has another ending or is a folder, or its folder is missing.
    """
    if output.is_dir():
        raise SettingsError(
            f"the report must be a file; {output} is a folder. Name a file in it, such as {output / 'report.html'}."
        )
    if output.suffix.lower() != ".html":
        raise SettingsError(
            f"the report must end in .html; found {output.name!r}. Name another file, such as "
            f"{output.with_suffix('.html')}."
        )
    if not output.parent.is_dir():
        raise SettingsError(f"the report must be in an existing folder; found {output.parent}. Create it first.")


def check_request(runs: Sequence[object], max_trajectories: int) -> None:
    """Refuse a request for a report without runs or trajectories.

    Raises:
        SettingsError: No run is given, or max_trajectories is below 1.
    """
    if not runs:
        raise SettingsError("a report needs at least one run; found none.")
    if max_trajectories < 1:
        raise SettingsError(f"max_trajectories must be at least 1; found {max_trajectories}.")


def pack_runs(runs: Sequence[RunRecord], sink: BlobSink, *, max_trajectories: int) -> dict[str, Any]:
    """Pack all runs and return the manifest, from which a page loads them."""
    names = run_names([run.name for run in runs])
    packed = [_pack_run(run, name, sink, max_trajectories) for run, name in zip(runs, names, strict=True)]
    return {"runs": packed, "written": round(time.time(), 3)}


def _pack_run(run: RunRecord, name: str, sink: BlobSink, max_trajectories: int) -> str:
    history = run.history
    curves, columns = pack_curves(history)
    distributions, distribution_columns = pack_distributions(run)
    probes, probe_columns = pack_probes(run.probes)
    slowest = slowest_sessions(run)
    header = {
        "name": name,
        "folder": str(run.folder),
        "step": int(history.steps[-1]) if len(history.steps) else 0,
        "steps": int((history.steps > 0).sum()),  # at step 0 only validation ran
        "num_rows": len(history.steps),
        "times": [float(history.times[0]), float(history.times[-1])] if len(history.times) else [None, None],
        "is_finished": run.is_finished,
        **describe_health(run),
        "outcome": describe_outcome(run),
        "curves": curves,
        "distributions": distributions,
        "probes": probes,
        "events": notable_events(run),
        "settings": flat_settings(run.settings),
        "summary": flat_settings(run.summary),
        "hang": describe_hang(run),
        "generations": pack_generations(run.generations, sink, images=ImageStore(run.folder / "images")),
        "index": _pack_rollouts(run, sink, max_trajectories, slowest),
        "slowest": slowest,  # now with the rows of their trajectories
    }
    return sink(pack(header, columns | distribution_columns | probe_columns))


def _pack_rollouts(run: RunRecord, sink: BlobSink, max_trajectories: int, slowest: Sequence[dict[str, Any]]) -> str:
    """Pack the trajectories, and add `row` to each of the slowest sessions among them."""
    rows: Iterable[RolloutRow] = islice(run.rollouts(), max_trajectories)
    num_recorded = None
    if run.most_rollouts() > max_trajectories:
        kept, num_recorded = choose(run.rollouts(), limit=max_trajectories)
        rows = compress(run.rollouts(), kept)
    sessions = {tuple(session.get(name) for name in SESSION_PLACE): session for session in slowest}

    def noted(rows: Iterable[RolloutRow]) -> Iterator[RolloutRow]:
        for number, row in enumerate(rows):
            if (session := sessions.get((row.prompt_uid, row.session, row.output))) is not None:
                session["row"] = number
            yield row

    images = ImageStore(run.folder / "images")
    return pack_rollouts(noted(rows), sink, images=images, num_recorded=num_recorded)


def choose(rows: Iterable[RolloutRow], *, limit: int) -> tuple[NDArray[np.bool_], int]:
    """Choose the trajectories to keep.

    Problems are drawn by a hash of their names: groups stay complete, every problem has the same chance, and reports of
    several runs keep the same problems. The lowest rewards below `WORST_BELOW` among the rest are kept too.

    Args:
        rows: Trajectories in the order of packing.
        limit: Maximum number to keep, at least 1.

    Returns:
        [N] bool, whether each trajectory is kept, and N.
    """
    places, rewards = array("Q"), array("d")
    for row in rows:
        problem = (row.problem or row.prompt_uid).encode("utf-8", errors="surrogatepass")
        places.append(int.from_bytes(blake2b(problem, digest_size=8).digest(), "little"))
        rewards.append(row.reward)
    place, reward = np.array(places, dtype=np.uint64), np.array(rewards)
    kept = np.ones(len(place), dtype=bool)
    if len(place) > limit:
        kept[:] = False
        order = np.argsort(place, kind="stable")
        num_worst = int(limit * WORST_SHARE)
        kept[order[: limit - num_worst]] = True
        rest = order[limit - num_worst :]
        rest = rest[np.argsort(np.where(np.isnan(reward), -np.inf, reward)[rest], kind="stable")]
        kept[rest[reward[rest] < WORST_BELOW][:num_worst]] = True
        kept[order[~kept[order]][: limit - int(kept.sum())]] = True
    return kept, len(kept)
