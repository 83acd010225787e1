import numpy as np
import pytest

from rl_metrics.doctor.diagnosis import Diagnosis, NoFinding
from rl_metrics.doctor.memory_growth import diagnose_memory, trend_of
from rl_metrics.run_files.history import History

STEPS = np.arange(1, 101, dtype=np.int64)
LEVEL = np.full(100, 4.0)
LEAK = 4.0 + 0.01 * STEPS


def history(**columns):
    values = {name.replace("__", "/"): np.asarray(column, dtype=np.float64) for name, column in columns.items()}
    return History(steps=STEPS, times=STEPS.astype(np.float64), values=values)


def noise(seed, size=0.01):
    return np.random.default_rng(seed).normal(0.0, size, len(STEPS))


def test_a_trend_is_the_median_slope():
    trend = trend_of(STEPS, LEAK)
    assert trend.slope == pytest.approx(0.01)
    assert trend.grown == pytest.approx(0.69)
    assert (trend.first, trend.last, trend.end) == (31, 100, 5.0)  # the first 30 steps are the warm-up
    assert trend.is_certain


def test_the_owner_that_grows_comes_first_and_explains_the_process():
    found = diagnose_memory(
        history(
            memory__trainer_gb=LEAK,
            memory__engine_gb=LEVEL + noise(0),
            memory__rewards_gb=0.5 + 0.001 * STEPS,
            perf__process_memory_gb=LEAK + 0.001 * STEPS,
            perf__cpu_memory_used_gb=20.0 + 0.011 * STEPS,
            perf__cpu_memory_total_gb=np.full(100, 32.1),
        ),
        (),
    )
    assert isinstance(found, Diagnosis)
    assert [cause.name for cause in found.causes] == ["trainer", "rewards"]
    assert found.causes[0].share == pytest.approx(10 / 11)
    assert found.evidence[-1].value == pytest.approx(11.0 / 0.011)  # 32.1 - 21.1 = 11 GiB are left


def test_what_grows_beside_the_run_is_not_its_own():
    found = diagnose_memory(history(memory__trainer_gb=LEVEL, perf__cpu_memory_used_gb=20.0 + 0.05 * STEPS), ())
    assert (found.kind, found.state) == ("memory", "right")
    assert found.text.endswith("since step 31, because of another program")
    found = diagnose_memory(history(perf__cpu_memory_used_gb=20.0 + 0.05 * STEPS), ())
    assert [cause.name for cause in found.causes] == ["host"]


def test_the_queue_inside_a_process_is_named_before_it():
    found = diagnose_memory(history(memory__controller_gb=LEAK, memory__queue_gb=0.008 * STEPS), ())
    assert [cause.name for cause in found.causes] == ["queue", "controller"]
    found = diagnose_memory(history(memory__controller_gb=LEAK, queue__size_bytes=0.008 * STEPS * 2**30), ())
    assert found.causes[0].name == "queue"


def test_lines_that_grow_at_every_look_are_named():
    looks = ((1, 5, 70), (2, 5, 90), (3.5, 6, 80))
    events = [
        {
            "event": "memory_lines",
            "step": step,
            "role": "trainer",
            "lines": [
                {"line": f"{name}.py:3", "size_bytes": int(size * 2**20), "count": 1}
                for name, size in zip("abc", sizes, strict=True)
            ],
        }
        for step, sizes in enumerate(looks)
    ]
    found = diagnose_memory(history(memory__trainer_gb=LEAK), events)
    texts = [evidence.text for evidence in found.causes[0].evidence if evidence.metric == "memory_lines"]
    assert texts == ["a.py:3: 1.0 MiB, then 3.5, more in each of 3 snapshots"]


@pytest.mark.parametrize(
    ("blocks", "said"),
    [(1e6 + 500 * STEPS, "grow by 500 per step: Python objects accumulate"), (np.full(100, 1e6), "stay at 1,000,000")],
)
def test_whose_memory_it_is_that_grows(blocks, said):
    found = diagnose_memory(history(memory__trainer_gb=LEAK, memory__trainer_python_blocks=blocks), ())
    assert [cause.name for cause in found.causes] == ["trainer"]
    assert said in found.causes[0].evidence[1].text


def test_a_process_that_no_owner_explains():
    found = diagnose_memory(history(memory__engine_gb=LEVEL, perf__process_memory_gb=LEAK), ())
    assert [cause.name for cause in found.causes] == ["process"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "column",
    [
        LEVEL,
        4.0 + 2.0 * (1.0 - np.exp(-STEPS / 5.0)),  # a cache that fills up
        4.0 + 0.5 * np.sin(STEPS / 3.0),
        LEVEL - 0.01 * STEPS,
        4.0 + 0.0001 * STEPS,
        np.where(STEPS < 30, 2.0, 4.0),
    ],
    ids=["level", "fills", "breathes", "falls", "hardly", "jumps"],
)
def test_steady_memory_is_right(column, seed):
    found = diagnose_memory(history(memory__trainer_gb=column + noise(seed)), ())
    assert isinstance(found, NoFinding), found
    assert found.state == "right"


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_leak_measured_every_fifth_step_is_found(seed):
    column = np.where(STEPS % 5 == 1, LEAK + noise(seed, 0.1), np.nan)
    assert diagnose_memory(history(memory__trainer_gb=column), ()).causes[0].name == "trainer"


def test_nothing_measured_is_unknown():
    assert diagnose_memory(history(), ()).state == "unknown"
    few = np.where(STEPS < 4, 1.0, np.nan)
    assert diagnose_memory(history(memory__trainer_gb=few), ()).state == "unknown"
