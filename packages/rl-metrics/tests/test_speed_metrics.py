import pytest

from rl_core.errors import SettingsError
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.hardware import model_flops_utilization, per_token_times

STEP = {
    "timing_s/gen": 2.0,
    "timing_s/ref": 0.5,
    "timing_s/update_actor": 4.0,
    "timing_s/update_critic": 0.0,
    "timing_s/testing": 60.0,
    "perf/total_num_tokens": 2000.0,
    "rollout/num_trajectories": 4.0,
    "response_length/mean": 250.0,
}


def test_a_phase_is_divided_by_the_tokens_that_it_goes_over():
    found = per_token_times(STEP)
    assert found == {
        "timing_per_token_ms/gen": 2.0,
        "timing_per_token_ms/ref": 0.25,
        "timing_per_token_ms/update_actor": 2.0,
        "timing_per_token_ms/update_critic": 0.0,
    }
    for name in found:
        DEFINITIONS.lookup(name)


def test_without_tokens_there_is_nothing_by_token():
    assert per_token_times({}) == {}
    assert per_token_times({"timing_s/gen": 1.0, "timing_s/ref": 1.0, "perf/total_num_tokens": 0.0}) == {}
    assert per_token_times({"timing_s/gen": 1.0, "rollout/num_trajectories": 4.0}) == {}


def test_utilization_is_of_all_devices_and_of_each_role_that_took_time():
    found = model_flops_utilization(
        STEP, flops={"actor": 8e12, "ref": 5e11, "critic": 8e12}, peak_tflops=10.0, num_devices=2
    )
    assert found == {"perf/mfu/actor": pytest.approx(0.1), "perf/mfu/ref": pytest.approx(0.05)}
    assert model_flops_utilization({}, flops={"actor": 8e12}, peak_tflops=10.0) == {}
    alone = model_flops_utilization(STEP, flops={"actor": 8e12}, peak_tflops=10.0)
    assert alone == {"perf/mfu/actor": pytest.approx(0.2)}
    for name in found:
        DEFINITIONS.lookup(name)


@pytest.mark.parametrize(("peak", "devices"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_an_impossible_peak_is_refused(peak, devices):
    with pytest.raises(SettingsError, match="must be above 0"):
        model_flops_utilization(STEP, flops={"actor": 1.0}, peak_tflops=peak, num_devices=devices)
