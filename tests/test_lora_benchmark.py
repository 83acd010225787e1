"""The LoRA benchmark: its arithmetic."""

import pytest
from benchmark_modules import load_benchmark

lora_summary = load_benchmark("_lora_summary")


def measured(step_s: list[float], *, peak: float, losses: list[float] | None = None) -> object:
    losses = losses or [2.0] * len(step_s)
    rounds = [
        {"step_s": one, "processor_s": one / 2, "tokens_per_s": 1 / one, "loss": loss, "grad_norm": 1.0}
        for one, loss in zip(step_s, losses, strict=True)
    ]
    return lora_summary.Measured(rounds=rounds, about={"peak_bytes": peak})


def found(losses: list[float] | None = None) -> dict[str, dict[str, object]]:
    sides = {
        "ours": measured([9.0, 1.0, 2.0, 4.0], peak=6e6),
        "ours_full": measured([1.0, 2.0, 4.0, 4.0], peak=10e6),
        "peft": measured([1.0] * 4, peak=5e6, losses=losses),
    }
    return {"train_recompute": sides}


def test_ratios_are_medians_of_the_rounds_and_held_against_the_most_that_is_wanted() -> None:
    full, peft, memory, _ = lora_summary.comparisons(found())
    assert (full["found"], full["processor"], full["wanted"], full["is_met"]) == (0.5, 0.5, 0.8, True)
    assert (peft["found"], peft["is_met"]) == (2.0, False)
    assert (memory["found"], memory["wanted"], memory["is_met"]) == (0.6, 0.6, True)


def test_a_learners_row_has_its_engines_update() -> None:
    engine = measured([1.0, 1.0], peak=1e6)
    engine.updates = [{"update_ms": ms, "proven_ms": 10 * ms, "num_bytes": 1e6} for ms in (9.0, 4.0)]
    row = lora_summary.result_row("ours", "train_recompute", found() | {"decode": {"ours": engine}})
    names = ("step_s", "peak_memory_mb", "update_ms", "proven_ms", "update_mb")
    assert [row[name] for name in names] == [2.0, 6.0, 4.0, 40.0, 1.0]
    alone = lora_summary.result_row("peft", "train_recompute", found())
    assert (alone["update_ms"], alone["update_mb"]) == (None, None)


def test_learners_that_disagree_with_peft_are_refused() -> None:
    assert lora_summary.check_same("train_recompute", found())["loss"] == 0
    with pytest.raises(RuntimeError, match=r"loss must agree to 0\.0001"):
        lora_summary.check_same("train_recompute", found([2.0, 2.0, 2.001, 2.0]))
