"""The fused passes with and without torch's compiler."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from rounding import rounding_bound
from torch import Tensor

from rl_distill.megatron import layers as module
from rl_distill.megatron import setup
from rl_distill.megatron.attention.layout import rotated
from rl_distill.megatron.head import HeadRequest, head_scores
from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.layers import can_compile, compiled, fused_swiglu, fused_swiglu_grad, swiglu, swiglu_grad
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.objectives.vocabulary import VocabularyPart
from rl_distill.options import LearnerOptions

SIZES = (5, 1, 9)
"""Tokens of consecutive packs."""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Reset what this process knows about its compiler, before and after; yield the folder of compiled code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    forget()
    yield tmp_path / "compiled"
    forget()


def forget() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    compiled.cache_clear()
    can_compile.cache_clear()


@pytest.fixture
def traced(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Trace functions as for a compiler, but run them with torch; return the number of graphs by function."""
    graphs: dict[str, int] = {}

    def compile_function(function: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        def backend(graph: Any, examples: Any) -> Any:
            graphs[function.__name__] = graphs.get(function.__name__, 0) + 1
            return aot_eager(graph, examples)

        return torch.compile(function, dynamic=True, backend=backend, fullgraph=True)

    monkeypatch.setattr(module, "_compile", compile_function)
    return graphs


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out.cos().sum(), leaves))


def test_every_fused_pass_is_traced_whole_for_packs_of_all_sizes(traced: dict[str, int]):
    torch.manual_seed(0)
    for num_tokens in SIZES:
        x, grad = torch.randn(num_tokens, 1, 12), torch.randn(num_tokens, 1, 6)
        torch.testing.assert_close(fused_swiglu(x), swiglu(x), rtol=0, atol=1e-6)
        torch.testing.assert_close(fused_swiglu_grad(x, grad), swiglu_grad(x, grad), rtol=0, atol=1e-6)
        heads = torch.randn(num_tokens, 1, 3, 8, requires_grad=True)
        for size in (8, 6):
            tables = torch.randn(num_tokens, 1, 1, size), torch.randn(num_tokens, 1, 1, size // 2)
            found, expected = (gradients(partial(turned, tables=tables, is_fused=f), heads) for f in (True, False))
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)  # gradients are sums of several products
        for found, expected in zip(head(num_tokens, is_fused=True), head(num_tokens, is_fused=False), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    assert set(traced) == {"_tried", "swiglu", "_swiglu_grad", "_rotate", "_statistics", "_put_gradient"}
    # One graph for any number of tokens and one for a single token, each for two temperatures or forms of a rotation.
    assert max(traced.values()) <= 4


def turned(x: Tensor, *, tables: tuple[Tensor, Tensor], is_fused: bool) -> Tensor:
    return rotated(x, *tables, is_fused=is_fused)


def head(num_tokens: int, *, is_fused: bool, **to: Any) -> list[Tensor]:
    """Return scores and gradients with and without entropy, at two temperatures, with a padded vocabulary."""
    draw = torch.Generator().manual_seed(num_tokens)
    leaves = [torch.randn(rows, 4, generator=draw).to(**to).requires_grad_() for rows in (num_tokens, 11)]
    targets = torch.randint(0, 10, (num_tokens,), generator=draw).to(leaves[0].device)
    out = []
    for temperature in (1.0, 0.7):
        request = HeadRequest(part=VocabularyPart(10), temperature=temperature, is_fused=is_fused, chunk_logits=4 * 11)
        for share in (0.0, 0.1):
            logprobs, entropy = head_scores(*leaves, targets=targets, request=request)[:2]
            loss = logprobs.sum() if not share else (logprobs + share * entropy).sum()
            out += [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]
    return out


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
def test_a_compiled_pass_is_the_plain_one(fresh: Path):
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):  # saves seconds
        for num_tokens in (5, 9):
            x = torch.randn(num_tokens, 1, 12)
            torch.testing.assert_close(fused_swiglu(x), swiglu(x), rtol=0, atol=1e-6)
        assert can_compile("cpu")
    assert list(fresh.rglob("*.so"))


def test_without_a_compiler_everything_stays_as_it_is_and_one_line_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/c++",))
    x, grad = torch.randn(5, 1, 12), torch.randn(5, 1, 6)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            assert torch.equal(fused_swiglu(x), swiglu(x))
            assert torch.equal(fused_swiglu_grad(x, grad), swiglu_grad(x, grad))

    assert [(line["event"], line["device"]) for line in lines] == [("not_compiled", "cpu")]
    assert "C++ compiler" in lines[0]["reason"]


def test_a_function_that_the_compiler_refuses_is_computed_as_it_is(traced: dict[str, int]):
    def refused(x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x  # one graph cannot contain both branches

    run = compiled(refused, "cpu")
    with structlog.testing.capture_logs() as lines:
        assert [float(run(torch.ones(()))) for _ in range(2)] == [2.0, 2.0]
    assert [(line["event"], line["function"]) for line in lines] == [("not_compiled", "refused")]


def test_a_fused_step_is_a_plain_one(
    traced: dict[str, int], tied_policy: Path, make_batch: Any, monkeypatch: pytest.MonkeyPatch
):
    batch, options = make_batch([7, 12, 3, 9]), LearnerOptions(learning_rate=1e-3, micro_batch_tokens=20)
    plain = MegatronLearner(tied_policy, options)
    monkeypatch.setattr(setup, "chosen_kernels", lambda *_, **__: Kernels(is_fused=True))
    fused = MegatronLearner(tied_policy, options)

    for _ in range(2):
        expected, found = (learner.train_step(batch, supervised_objective) for learner in (plain, fused))
        assert found.loss == pytest.approx(expected.loss, rel=rounding_bound(1.0))
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert {"swiglu", "_rotate", "_statistics"} <= set(traced)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_on_a_gpu_compiled_passes_are_the_plain_ones(fresh: Path, dtype: torch.dtype, tolerance: float):
    to = {"device": "cuda", "dtype": dtype}
    with structlog.testing.capture_logs() as lines:
        if not can_compile("cuda"):
            pytest.skip(f"torch compiles nothing here: {lines[0]['reason']}")
        for num_tokens in (5, 1, 300):
            for found, expected in fused_and_plain(num_tokens, **to):
                scale = max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)
    assert not lines  # no function was refused


def fused_and_plain(num_tokens: int, **to: Any) -> list[tuple[Tensor, ...]]:
    x, grad = torch.randn(num_tokens, 1, 96, **to), torch.randn(num_tokens, 1, 48, **to)
    heads, tables = torch.randn(num_tokens, 1, 3, 8, **to), [torch.randn(num_tokens, 1, 1, n, **to) for n in (8, 4)]
    return [
        (fused_swiglu(x), swiglu(x)),
        (fused_swiglu_grad(x, grad), swiglu_grad(x, grad)),
        tuple(rotated(heads, *tables, is_fused=is_fused) for is_fused in (True, False)),
        *zip(*(head(num_tokens, is_fused=is_fused, **to) for is_fused in (True, False)), strict=True),
    ]
