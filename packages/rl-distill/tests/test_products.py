"""float32 products with oneDNN: the same values and gradients as torch, with one choice per process."""

import pytest
import torch

import rl_distill.products as products
from rl_core.errors import SettingsError
from rl_distill.products import chosen_products, computing_with, has_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN products on this machine")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of products that oneDNN computes."""
    found: list[tuple[int, ...]] = []
    own = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda a, b: found.append((*a.shape, b.shape[1])) or own(a, b))
    return found


def forward_and_backward(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    out = torch.nn.functional.linear(x, weight)
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), (x, weight))]


def test_values_and_gradients_are_torchs(calls):
    x, weight = torch.randn(3, 100, 128, requires_grad=True), torch.randn(160, 128, requires_grad=True)
    expected = forward_and_backward(x, weight)

    with computing_with("onednn"):
        found = forward_and_backward(x, weight)

    assert sorted(calls) == sorted([(300, 128, 160), (300, 160, 128), (160, 300, 128)])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    found = forward_and_backward(x, weight)
    assert len(found) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(calls) == 3


def test_products_into_a_tensor_are_torchs(calls):
    a, b, total = torch.randn(100, 200), torch.randn(200, 150), torch.randn(100, 150)
    expected, added = torch.mm(a, b), torch.addmm(total, a, b)

    with computing_with("onednn"):
        found = torch.full((200, 150), torch.nan)
        torch.mm(a, b, out=found[:100])
        torch.mm(a[:2], b, out=found[100:102])
        assert total.addmm_(a, b) is total
        scaled = torch.ones(100, 150).addmm_(a, b, beta=2, alpha=3)

    assert calls == [(100, 200, 150)] * 2
    torch.testing.assert_close(found[:100], expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[100:102], torch.mm(a[:2], b), rtol=1e-5, atol=1e-4)
    assert found[102:].isnan().all()
    torch.testing.assert_close(total, added, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scaled, 2 + 3 * expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 200), (torch.bfloat16, 200), (torch.int64, 200), (torch.float32, 8)]
)
def test_other_products_stay_torchs(dtype, size, calls):
    a, b = (torch.randint(-4, 4, (size, size)).to(dtype) for _ in range(2))

    with computing_with("onednn"):
        found = a @ b

    assert calls == []
    assert torch.equal(found, a @ b)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_products_are_zeros(shape):
    rows, inputs, outputs = shape
    with computing_with("onednn"):
        found = torch.ones(rows, inputs) @ torch.ones(inputs, outputs)

    assert torch.equal(found, torch.zeros(rows, outputs))


def test_what_is_faster_is_chosen(monkeypatch):
    monkeypatch.setattr(products, "_seconds", lambda product, a, b: 1.0 if product is torch.mm else 0.5)
    products._measured.cache_clear()
    assert chosen_products("auto") == "onednn"
    monkeypatch.setattr(products, "_seconds", lambda product, a, b: 1.0)
    products._measured.cache_clear()
    assert chosen_products("auto") == "torch"
    products._measured.cache_clear()
    assert (chosen_products("torch"), chosen_products("onednn")) == ("torch", "onednn")


def test_the_gain_is_that_of_the_shortest_of_15_calls_after_a_first_one(monkeypatch):
    times = {torch.mm: [0.1, *[3.0] * 14, 2.0], products._onednn: [9.0, 0.5, *[1.0] * 14]}
    monkeypatch.setattr(products, "_seconds", lambda product, a, b: times[product].pop(0))
    assert products._gain(2, 3, 4) == 4.0
    assert list(times.values()) == [[], []]


def test_a_machine_without_onednn_says_so(monkeypatch):
    monkeypatch.setattr(products, "has_onednn", lambda: False)

    assert chosen_products("auto") == "torch"
    with pytest.raises(SettingsError, match=r'optimizer\.products is "onednn", which torch .* does not have'):
        chosen_products("onednn")
