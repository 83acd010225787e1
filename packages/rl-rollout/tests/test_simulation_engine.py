"""Simulated engines, compared with times computed by hand and with a closed form."""

import numpy as np
import pytest

from rl_rollout.simulation.engine import FOREVER, EnginePool, Response, SimulatedEngine

STEP_SECONDS = [0.0, 1.0, 2.0, 3.0]


def responses(*lengths: int, prompt: int = 0) -> list[Response]:
    return [Response(index, length, prompt) for index, length in enumerate(lengths)]


def ends(engine: SimulatedEngine) -> list[tuple[float, int]]:
    """Return the end time and group of each response, until none runs."""
    found = []
    while engine.ends_at != FOREVER:
        time = engine.ends_at
        ended, _ = engine.finish()
        found += [(time, response.group) for response in ended]
    return found


def test_responses_share_steps_until_the_shorter_ends() -> None:
    engine = SimulatedEngine(STEP_SECONDS)
    assert len(engine.add(responses(10, 25), now=0.0)) == 2
    assert ends(engine) == [(20.0, 0), (35.0, 1)]  # 10 steps of 2 s, then 15 of 1 s
    assert engine.busy_s == 35.0


def test_one_that_joins_slows_the_others_from_then_on() -> None:
    engine = SimulatedEngine(STEP_SECONDS)
    engine.add([Response(0, 10, 0)], now=0.0)
    engine.add([Response(1, 4, 0)], now=6.0)  # both have 4 tokens left
    assert engine.ends_at == 6.0 + 4 * 2.0
    assert sorted(ends(engine)) == [(14.0, 0), (14.0, 1)]


def test_what_finds_no_slot_begins_when_another_ends() -> None:
    engine = SimulatedEngine(STEP_SECONDS[:2])
    assert [response.group for response in engine.add(responses(3, 4, 5), now=1.0)] == [0]
    assert engine.load == 3
    ended, began = engine.finish()
    assert ([one.group for one in ended], [one.group for one in began]) == ([0], [1])
    assert ends(engine) == [(8.0, 1), (13.0, 2)]


def test_prompts_are_prefilled_before_anything_is_decoded() -> None:
    engine = SimulatedEngine(STEP_SECONDS, prefill_s_per_token=0.5)
    engine.add(responses(10, 10, prompt=4), now=0.0)
    assert engine.ends_at == 2 * 4 * 0.5 + 10 * 2.0


def test_a_weight_update_stops_decoding_and_prefills_again_what_goes_on() -> None:
    plain, again = (SimulatedEngine(STEP_SECONDS, prefill_s_per_token=0.5) for _ in range(2))
    for engine in (plain, again):
        engine.add([Response(0, 10, 2)], now=0.0)
    plain.stall(3.0, now=5.0, recomputes_prefixes=False)
    again.stall(3.0, now=5.0, recomputes_prefixes=True)
    assert plain.ends_at == 11.0 + 3.0
    assert again.ends_at == 11.0 + 3.0 + 0.5 * (2 + 4)  # the prompt and the 4 tokens decoded so far
    again.finish()
    assert again.busy_s == again.now - 3.0


def test_an_update_while_nothing_runs_costs_only_what_comes_during_it() -> None:
    engine = SimulatedEngine(STEP_SECONDS)
    engine.stall(3.0, now=5.0, recomputes_prefixes=True)
    engine.add([Response(0, 2, 0)], now=6.0)
    assert engine.ends_at == 8.0 + 2.0


def test_responses_go_to_the_engine_with_the_fewest() -> None:
    pool = EnginePool(3, STEP_SECONDS)
    pool.add(responses(9, 1, 9, 9), now=0.0)
    assert sorted(engine.load for engine in pool.engines) == [1, 1, 2]
    assert pool.next_end() == 1.0
    pool.finish()
    pool.add(responses(5), now=1.0)
    assert sorted(engine.load for engine in pool.engines) == [1, 1, 2]
    assert min(engine.now for engine in pool.engines) == 0.0  # only the two changed engines advanced


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_takes_as_long_as_its_sorted_lengths_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step_seconds = [0.0, *np.cumsum(rng.uniform(0.001, 0.01, 40)).tolist()]
    lengths = rng.integers(1, 5000, 40)
    engine = SimulatedEngine(step_seconds)
    engine.add(responses(*lengths.tolist()), now=0.0)
    order = np.sort(lengths)
    expected = (np.diff(order, prepend=0) * np.array(step_seconds)[np.arange(40, 0, -1)]).sum()
    assert ends(engine)[-1][0] == pytest.approx(expected, rel=1e-9)
    assert engine.busy_s == pytest.approx(expected, rel=1e-9)


def test_loads_are_level_after_responses_have_ended_unevenly() -> None:
    pool = EnginePool(4, [0.0, *(1.0 + 0.1 * batch for batch in range(64))])
    rng = np.random.default_rng(0)
    pool.add(responses(*rng.integers(1, 400, 40).tolist()), now=0.0)
    for _ in range(5):
        for _ in range(9):
            now = pool.next_end()
            pool.finish()
        lacking = 4 * max(engine.load for engine in pool.engines) - sum(engine.load for engine in pool.engines)
        pool.add(responses(*rng.integers(1, 400, lacking + 2).tolist()), now=now)
        loads = [engine.load for engine in pool.engines]
        assert max(loads) - min(loads) == 1
