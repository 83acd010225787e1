"""Use of a process's GPU, from a fake device and a fake driver."""

import asyncio
import sys
from types import SimpleNamespace

import pynvml
import pytest

from rl_core import gpus
from rl_core.errors import EngineError
from rl_core.gpus import GpuMeter, GpuUse, TorchGpu, driver, gpu_use_of, own_gpu_use

GIB = 2**30


class FakeCuda:
    """`torch.cuda` with one device that has been used, the second of two."""

    def __init__(self):
        self.peaks = {0: [0, 0], 1: [3 * GIB, 4 * GIB]}

    def is_initialized(self):
        return True

    def device_count(self):
        return 2

    def max_memory_allocated(self, index):
        return self.peaks[index][0]

    def max_memory_reserved(self, index):
        return self.peaks[index][1]

    def reset_peak_memory_stats(self, index):
        self.peaks[index] = [GIB, 2 * GIB]  # what is still allocated

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=80 * GIB, uuid=f"card-{index}")


class FakeNvml:
    """`pynvml` with two cards, busy 20 and 60 %."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        try:
            return ["GPU-card-0", "GPU-card-1"].index(uuid)
        except ValueError:
            raise self.NVMLError from None

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=(20, 60)[handle])


@pytest.fixture
def no_thread(monkeypatch):
    monkeypatch.setattr(GpuMeter, "watch", lambda self: None)
    monkeypatch.setattr(gpus, "_meters", [])
    driver.cache_clear()
    yield
    driver.cache_clear()


@pytest.mark.usefixtures("no_thread")
def test_a_process_reports_peaks_of_a_step_and_utilization_of_its_own_card(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    total = {"memory_total_gb": 80.0, "gpu_utilization": 0.6}
    assert own_gpu_use("learner") == [GpuUse(max_memory_allocated_gb=3.0, max_memory_reserved_gb=4.0, **total)]
    assert own_gpu_use("learner") == [GpuUse(max_memory_allocated_gb=1.0, max_memory_reserved_gb=2.0, **total)]
    cuda.peaks[1] = [5 * GIB, 6 * GIB]
    assert own_gpu_use("engine")[0].max_memory_allocated_gb == 5.0
    assert own_gpu_use("learner")[0].max_memory_allocated_gb == 5.0, "the engine's call hides no peak"
    assert own_gpu_use("learner")[0].max_memory_allocated_gb == 1.0


@pytest.mark.usefixtures("no_thread")
def test_utilization_is_the_mean_of_the_samples_of_a_step(monkeypatch):
    shares = iter([0.5, 0.0, 1.0, 0.2])
    gpu = SimpleNamespace(total_bytes=GIB, take_peaks=lambda: (0, 0), utilization=lambda: next(shares, None))
    one = GpuMeter(gpu)
    assert one.take("learner").gpu_utilization == 0.5
    assert one.sample()
    assert one.sample()
    assert one.take("learner").gpu_utilization == 0.5
    assert one.take("learner").gpu_utilization == 0.2
    assert not one.sample()
    assert one.take("learner").gpu_utilization is None


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("torch", [None, SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))])
def test_a_process_that_does_not_compute_on_a_gpu_has_no_figures(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert own_gpu_use("learner") == []


@pytest.mark.usefixtures("no_thread")
def test_a_card_that_the_driver_does_not_know_has_no_utilization(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    cuda = FakeCuda()
    assert TorchGpu(cuda).utilization() == 0.6
    cuda.get_device_properties = lambda index: SimpleNamespace(total_memory=80 * GIB, uuid="unknown")
    assert TorchGpu(cuda).utilization() is None


@pytest.mark.usefixtures("no_thread")
def test_a_machine_without_the_library_or_a_driver_has_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver() is None
    driver.cache_clear()
    nvml = FakeNvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(FakeNvml.NVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert driver() is None


def test_the_library_has_what_its_stand_in_has():
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) == 4
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_an_owner_that_does_not_report_or_answer_has_no_figures():
    async def fails():
        raise EngineError("gone.")

    async def hangs():
        await asyncio.Event().wait()

    async def ask():
        owners = [object(), SimpleNamespace(gpu_use=fails), SimpleNamespace(gpu_use=hangs)]
        return [await gpu_use_of(one, deadline_s=0.01) for one in owners]

    assert asyncio.run(ask()) == [[], [], []]
