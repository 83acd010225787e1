"""Arithmetic of the LoRA benchmark: rows of its results and comparisons. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from _learner_summary import Measured as Steps
from _learner_summary import check_agreement
from _lora_workload import DECODE, FULL, MERGED, OURS, PEFT, RECOMPUTE, TRAIN

TOLERANCE = 1e-4
"""Maximum relative difference of our losses and gradient norms from peft's."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of one system on one workload; the first of every list is a warm-up.

    Attributes:
        rounds: Its answers.
        updates: Its answers to updates.
        about: Its description of itself at its end.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median of a number over the rounds."""
        return float(median(of[name] for of in self.rounds[1:]))

    def of_updates(self, name: str) -> float | None:
        """Return the median of a number over the updates; None without updates."""
        return median(of[name] for of in self.updates[1:]) if self.updates else None


Found = Mapping[str, Mapping[str, Measured]]
"""Measurements by workload and system."""


def result_row(system: str, workload: str, found: Found) -> dict[str, Any]:
    """Return a row of `results`; a learner's update is measured by the engine of the same system."""
    of, served = found[workload][system], found.get(DECODE, {}).get(system, Measured())
    num_bytes = served.of_updates("num_bytes")
    return {
        "system": system,
        "workload": workload,
        "step_s": round(of.median("step_s"), 5),
        "processor_s": round(of.median("processor_s"), 5),
        "tokens_per_s": round(of.median("tokens_per_s"), 1),
        "peak_memory_mb": round(of.about["peak_bytes"] / 1e6, 1),
        "update_ms": rounded(served.of_updates("update_ms"), 2),
        "proven_ms": rounded(served.of_updates("proven_ms"), 2),
        "update_mb": rounded(None if num_bytes is None else num_bytes / 1e6, 3),
        "losses": [answer["loss"] for answer in of.rounds if "loss" in answer],
    }


def comparisons(found: Found) -> list[dict[str, Any]]:
    """Compare the measurements of both sides with the maxima."""
    compared = []
    for workload in (TRAIN, RECOMPUTE):
        sides = found.get(workload)
        if sides is None:
            continue
        compared.append(of_steps(workload, sides[OURS], sides[FULL], peer=FULL, wanted=0.8))
        compared.append(of_steps(workload, sides[OURS], sides[PEFT], peer=PEFT, wanted=1.0))
        for peer, wanted in ((FULL, 0.6 if workload == RECOMPUTE else None), (PEFT, None)):
            ratio = sides[OURS].about["peak_bytes"] / sides[peer].about["peak_bytes"]
            compared.append(claim(workload, f"peak memory, of {peer}'s", ratio, wanted))
    if (sides := found.get(DECODE)) is not None:
        compared.append(of_steps(DECODE, sides[OURS], sides[FULL], peer=FULL, wanted=None))
        compared.append(of_steps(DECODE, sides[MERGED], sides[FULL], peer=FULL, wanted=1.05, system=MERGED))
        updates = {name: sides[OURS].of_updates(name) or 0.0 for name in sides[OURS].updates[0]}
        ratio = updates["num_bytes"] / updates["tensor_bytes"]
        compared.append(claim("update", "bytes, of those of A and B", ratio, 1.05))
        for name, what, wanted in (
            ("update", "slot and read-back", 15.0),
            ("proven", "with base probes and canary", 100.0),
        ):
            processor = updates.get(f"{name}_processor_ms")
            told = {} if processor is None else {"processor": round(processor, 3)}
            compared.append(claim("update", f"ms, {what}", updates[f"{name}_ms"], wanted) | told)
    return compared


def of_steps(
    workload: str, ours: Measured, theirs: Measured, *, peer: str, wanted: float | None, system: str = OURS
) -> dict[str, Any]:
    """Return our step time as a share of another system's: the median of the rounds' ratios."""

    def ratio(name: str) -> float:
        pairs = zip(ours.rounds[1:], theirs.rounds[1:], strict=True)
        return float(median(own[name] / other[name] for own, other in pairs))

    compared = claim(workload, f"step of {system}, of {peer}'s", ratio("step_s"), wanted)
    return {**compared, "processor": round(ratio("processor_s"), 3)}


def claim(workload: str, what: str, found: float, wanted: float | None) -> dict[str, Any]:
    """Return a number with its maximum."""
    is_met = None if wanted is None else found <= wanted
    return {"workload": workload, "what": what, "found": round(found, 3), "wanted": wanted, "is_met": is_met}


def check_same(workload: str, found: Found) -> dict[str, float]:
    """Raise an error if a learner computed other results than peft.

    Raises:
        DisagreementError: A loss or a gradient norm differs.
    """
    return check_agreement(*(steps_of(found[workload][system]) for system in (OURS, PEFT)), tolerance=TOLERANCE)


def steps_of(of: Measured) -> Steps:
    """Compare losses and gradient norms as the learner benchmark does."""
    told = {name: [answer[name] for answer in of.rounds] for name in ("loss", "grad_norm")}
    return Steps(losses=told["loss"], grad_norms=told["grad_norm"])


def rounded(value: float | None, digits: int) -> float | None:
    """None stays None."""
    return None if value is None else round(value, digits)
