"""The transfer benchmark: its arithmetic and its payload."""

import numpy as np
import pytest
from benchmark_modules import load_benchmark

payload, summary = load_benchmark("_payload"), load_benchmark("_transfer_summary")


def row(system: str, operation: str, **values: float) -> dict[str, object]:
    empty = dict.fromkeys(("mb_per_s", "mb_per_s_median", "samples_per_s", "p50_ms", "p99_ms"))
    return {"system": system, "operation": operation, **empty, **values}


def test_percentiles_are_measured_values() -> None:
    assert summary.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert summary.percentile([float(value) for value in range(1, 201)], 0.99) == 198.0
    assert summary.percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="found none"):
        summary.percentile([], 0.5)


def test_bulk_speed_is_of_the_best_round() -> None:
    found = summary.bulk_row([0.5, 0.1, 0.2], payload_bytes=48_000_000, num_samples=1_024)
    assert found["mb_per_s"] == 480.0
    assert found["mb_per_s_median"] == 240.0
    assert found["samples_per_s"] == 10_240.0


def test_closed_loops_have_a_sample_under_way_for_each_client() -> None:
    found = summary.call_row([1.0, 3.0], samples_at_once=8)
    assert (found["samples_per_s"], found["p50_ms"], found["p99_ms"]) == (4_000.0, 1.0, 3.0)


def test_what_was_not_measured_is_null_with_its_reason() -> None:
    measured = summary.Measured(reasons={"lease_1m": "too slow"}, failure="it ended")
    measured.call_ms["lease_10k"] += [2.0]
    rows = summary.system_rows("ray", measured, payload_bytes=1, num_samples=1, num_clients=8, lease_rows=64)
    found = {entry["operation"]: entry for entry in rows}
    assert list(found) == list(summary.OPERATIONS)
    assert found["lease_10k"]["samples_per_s"] == 32_000.0
    assert (found["lease_1m"]["p50_ms"], found["lease_1m"]["reason"]) == (None, "too slow")
    assert found["put"]["reason"] == "it ended"


def test_targets_compare_like_with_like() -> None:
    results = [
        row("shm", "put", mb_per_s=6_000.0, mb_per_s_median=3_000.0),
        row("transferqueue", "put", mb_per_s=300.0, mb_per_s_median=300.0),
        row("shm", "small_put", p50_ms=1.0),
        row("shm", "lease_10k", p50_ms=0.1),
        row("shm", "lease_1m", p50_ms=0.2),
    ]
    memory = {"shm": {"peak_bytes": 140, "payload_bytes": 100}}
    found = {claim["target"]: claim for claim in summary.targets(results, memcpy_mb_per_s=12_000.0, memory=memory)}
    put = found["shm put, times TransferQueue's"]
    assert (put["found"], put["found_of_medians"], put["is_met"]) == (20.0, 10.0, True)
    assert found["shm get, times TransferQueue's"]["is_met"] is None
    assert found["shm put, share of memcpy"]["found"] == 0.5
    assert found["shm small_put, p50 in ms"]["is_met"] is False
    assert found["shm lease at 1,000,000 rows, times that at 10,000"]["is_met"] is True
    assert found["shm peak memory, times the payload"]["is_met"] is False


def test_payload_is_the_same_in_every_process() -> None:
    rows = [payload.producer_rows(producer) for producer in range(payload.NUM_PRODUCERS)]
    again = payload.producer_rows(3)
    assert sum(len(part.lengths) for part in rows) == 1_024
    assert sum(part.size_bytes for part in rows) == payload.payload_bytes()
    assert 44e6 < payload.payload_bytes() < 50e6
    assert payload.COLUMNS
    assert all(np.array_equal(rows[3].columns[name], again.columns[name]) for name in payload.COLUMNS)
    assert min(part.lengths.min() for part in rows) >= 256
    assert max(part.lengths.max() for part in rows) <= 4_096
    assert payload.small_row(0).size_bytes == 1_029


def test_positions_start_anew_in_each_sample() -> None:
    positions = payload.make_rows([3, 1, 2], seed=0).columns["position_ids"]
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_look_reads_every_byte() -> None:
    octets = np.zeros(21, dtype=np.uint8)
    for place in range(21):
        octets[place] = 1
        assert payload.look([octets]) != 0
        octets[place] = 0
    assert payload.look([octets, np.zeros(0, dtype=np.int64)]) == 0
