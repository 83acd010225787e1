"""The skip-cache benchmark: its arithmetic and its samples."""

from pathlib import Path

import numpy as np
import pytest
from benchmark_modules import load_benchmark

samples, summary, protocol = map(load_benchmark, ("_skip_samples", "_skip_summary", "_skip_protocol"))


def measured(write_s: list[float], read_s: list[float], **rest: object) -> object:
    return summary.Measured(wall_s={"write": write_s, "read": read_s}, **rest)


def test_speed_is_the_payload_over_the_median_round() -> None:
    found = {"ours": measured([0.1, 0.4, 0.2], [0.05, 0.05, 0.02], size_bytes=20_400_000)}
    write, read = summary.result_rows(found, payload_bytes=40_000_000)
    assert (write["system"], write["operation"], write["mb_per_s"], write["size_mb"]) == ("ours", "write", 200.0, 20.4)
    assert (read["operation"], read["mb_per_s"], read["mb_per_s_best"]) == ("read", 800.0, 2000.0)
    assert write["mb_per_s_quartiles"] == [133.3, 266.7]  # 40 MB in 0.3 s and in 0.15 s


def test_ratios_are_of_the_same_round() -> None:
    found = {"ours": measured([1.0, 2.0, 4.0], [1.0] * 3), "torch_rows": measured([2.0, 8.0, 40.0], [3.0, 9.0, 1.0])}
    rows = {(row["peer"], row["operation"]): row for row in summary.comparisons(found)}
    assert list(rows) == [("torch_rows", "write"), ("torch_rows", "read")]  # only measured systems are compared
    assert rows["torch_rows", "write"]["ratio"] == 4.0  # the median of 2, 4 and 10
    assert rows["torch_rows", "write"]["ratio_quartiles"] == [3.0, 7.0]
    assert rows["torch_rows", "read"]["ratio"] == 3.0


@pytest.mark.parametrize(("size_bytes", "is_met"), [(35, True), (36, False)])
def test_targets_are_those_that_were_set(size_bytes: int, is_met: bool) -> None:
    found = {
        "ours": measured([1.0], [1e-7]),
        "ours_compressed": measured([1.0], [1.0], size_bytes=size_bytes),
        "torch_rows": measured([2.9], [8e-7]),
    }
    claims = {claim["target"]: claim for claim in summary.targets(found, payload_bytes=100)}
    assert [(claim["wanted"], claim["found"], claim["is_met"]) for claim in claims.values()] == [
        (1_000.0, 1_000.0, True),
        (8.0, 8.0, True),
        (3.0, 2.9, False),
        (0.35, size_bytes / 100, is_met),
    ]
    unjudged = summary.targets(found, payload_bytes=100, is_judged=False)
    assert [claim | {"is_met": None} for claim in claims.values()] == unjudged


def test_share_of_the_wait_for_the_disk_is_of_pairs() -> None:
    found = {
        "ours": measured([0.04, 0.06, 0.05], [1.0], unflushed_s=[0.03, 0.03, 0.04]),
        "verl": measured([1.0], [1.0]),
    }
    assert summary.flushes(found) == {"ours": {"flush_ms": 10.0, "share_of_write": 0.25}}


def test_a_single_round_has_its_value_for_quartiles() -> None:
    assert summary.quartiles([3.0]) == [3.0, 3.0]


def test_samples_are_rollouts_of_groups() -> None:
    rows, again = samples.make_samples(), samples.make_samples()
    assert len(rows.lengths) == 1_024
    assert 44e6 < rows.size_bytes < 50e6
    assert (rows.lengths.min() >= 256, rows.lengths.max() <= 4_096) == (True, True)
    assert samples.COLUMNS
    assert all(np.array_equal(rows.columns[name], again.columns[name]) for name in samples.COLUMNS)
    dtypes = {name: rows.columns[name].dtype.name for name in samples.COLUMNS}
    assert dtypes == {"input_ids": "int64", "position_ids": "int64", "logprobs": "float32", "mask": "int8"}
    is_prompt = rows.columns["position_ids"] < 64
    assert np.array_equal(rows.columns["mask"] == 0, is_prompt)
    assert not rows.columns["logprobs"][is_prompt].any()
    prompts = rows.columns["input_ids"][is_prompt].reshape(128, 8, 64)
    assert (prompts == prompts[:, :1]).all()
    assert np.array_equal(rows.columns["position_ids"], samples.positions(rows.lengths))


def test_what_was_read_changed_is_refused() -> None:
    rows = samples.make_samples(1)
    protocol.check(rows.columns, rows)
    changed = {**rows.columns, "logprobs": rows.columns["logprobs"].copy()}
    changed["logprobs"][-1] += 1e-6
    with pytest.raises(protocol.ChangedError, match="logprobs must be read as it was written"):
        protocol.check(changed, rows)


def test_verl_is_told_to_be_missing_by_the_variable_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_PYTHON", raising=False)
    skip_cache = load_benchmark("skip_cache")
    skipped: dict[str, str] = {}
    with skip_cache.leaving_out("verl", skipped):
        skip_cache.start("verl", 1, tmp_path)
    assert "VERL_PYTHON" in skipped["verl"]
