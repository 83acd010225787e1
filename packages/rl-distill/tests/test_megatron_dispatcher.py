"""Dispatch of tokens to experts without host synchronization, compared with megatron's dispatcher."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal_tensors import different_tensors
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import build_module
from rounding import BFLOAT16, FLOAT32, rounding_bound
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.megatron.attention.layout import PackedLayout
from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.mixture import LocalDispatcher, dispatch_locally
from rl_distill.megatron.model_spec import PolicyLayer, block_spec, transformer_config

pytestmark = pytest.mark.usefixtures("one_rank")

NUM_TOKENS = 21
FAMILIES = ("Qwen3MoeForCausalLM", "Glm4MoeForCausalLM")
GROUPED = Kernels(experts="grouped")


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, policy_writer: Callable[..., Path], tmp_path_factory: Any) -> Path:
    return policy_writer(tmp_path_factory.mktemp(request.param), request.param)


def make_mixture(policy_dir: Path, dtype: torch.dtype, kernels: Kernels = GROUPED) -> MoELayer:
    policy = parse_policy_config(read_policy_config(policy_dir))
    config = transformer_config(policy, dtype=dtype, init_method=lambda weight: weight, kernels=kernels)
    spec = block_spec(config).layer_specs[-1].submodules.mlp
    mixture = build_module(spec, config=config, pg_collection=get_default_pg_collection()).to(dtype)
    dispatch_locally(mixture)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in mixture.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return mixture


def with_megatrons_dispatcher(mixture: MoELayer) -> MoELayer:
    experts, groups = list(range(mixture.config.num_moe_experts)), get_default_pg_collection()
    mixture.token_dispatcher = MoEAlltoAllTokenDispatcher(
        len(experts), experts, config=mixture.config, pg_collection=groups
    )
    return mixture


def computed(mixture: MoELayer, given: Tensor | None = None, *, num_tokens: int = NUM_TOKENS) -> dict[str, Tensor]:
    """Return outputs, and gradients of tokens and weights."""
    weight = mixture.experts.linear_fc1
    random = torch.Generator().manual_seed(5)
    shape = (num_tokens, 1, mixture.config.hidden_size)
    tokens, grad = (torch.randn(shape, generator=random).to(weight.device, weight.dtype) for _ in range(2))
    tokens.requires_grad_()
    return differentiated(mixture, tokens, grad, given)


def differentiated(mixture: MoELayer, tokens: Tensor, grad: Tensor, given: Tensor | None) -> dict[str, Tensor]:
    mixture.zero_grad()
    with mixture.router.replaying(given):
        out, bias = mixture(tokens)
    assert bias is None
    out.backward(grad)
    grads = {name: weight.grad for name, weight in mixture.named_parameters() if weight.requires_grad}
    return {"out": out.detach(), "tokens": tokens.grad, **grads}


def random_choices(mixture: MoELayer, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Return [T, top_k] experts; -1 leaves the choice for the first tokens to the router."""
    config = mixture.config
    scores = torch.rand(num_tokens, config.num_moe_experts, generator=torch.Generator().manual_seed(2))
    given = scores.argsort(-1)[:, : config.moe_router_topk]
    given[:3] = -1
    return given


@pytest.mark.parametrize("replays", [False, True])
def test_outputs_and_gradients_are_those_of_megatrons_dispatcher(replays: bool, policy: Path):
    for dtype, epsilon in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        mixture = make_mixture(policy, dtype)
        given = random_choices(mixture) if replays else None
        assert isinstance(mixture.token_dispatcher, LocalDispatcher)
        found = computed(mixture, given)
        expected = computed(with_megatrons_dispatcher(mixture), given)
        for name, tensor in expected.items():
            # Megatron rounds after each expert, our dispatcher after the last.
            bound = rounding_bound(float(tensor.abs().max()), roundings=8, epsilon=epsilon)
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=bound, msg=name)


def test_the_order_of_given_experts_does_not_matter(policy: Path):
    mixture = make_mixture(policy, torch.float32)
    given = random_choices(mixture)

    expected = computed(mixture, given)

    assert different_tensors(expected, computed(mixture, given.flip(-1))) == []


def test_no_token_gives_no_output(policy: Path):
    found = computed(make_mixture(policy, torch.float32), num_tokens=0)

    assert found["out"].shape == found["tokens"].shape == (0, 1, 32)
    assert not any(tensor.any() for tensor in found.values())


class WithoutTheHost(TorchDispatchMode):
    """Raise an error where the host would wait for a GPU: reads of values, sizes that depend on values, device changes.

    It does not see `tolist` on a CPU; the pretend accelerator refuses that.
    """

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.startswith(self.READS):
            raise AssertionError(f"{func} makes the host wait")
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, *(kwargs or {}).values(), out) if isinstance(one, Tensor)]
        if len({one.device for one in tensors}) > 1:
            raise AssertionError(f"{func} moves between devices")
        return out


def test_nothing_waits_for_the_host(policy: Path):
    mixture = make_mixture(policy, torch.bfloat16)
    given = random_choices(mixture)
    expected = computed(mixture, given)

    tokens, grad = (torch.randn(NUM_TOKENS, 1, 32).bfloat16() for _ in range(2))
    tokens.requires_grad_()
    with WithoutTheHost():
        found = differentiated(mixture, tokens, grad, given)

    assert found.keys() == expected.keys()
    with pytest.raises(AssertionError, match=r"masked_select.* makes the host wait"), WithoutTheHost():
        differentiated(with_megatrons_dispatcher(mixture), tokens, grad, given)


def test_counting_replayed_rows_waits_for_nothing(policy: Path):
    mixture = make_mixture(policy, torch.bfloat16)
    given = random_choices(mixture)
    computed(mixture, given)
    layer = SimpleNamespace(
        layer_number=2,
        config=SimpleNamespace(sequence_parallel=True, num_layers=2),
        tp_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        mlp=mixture,
    )
    layout = PackedLayout(kept=torch.tensor([0, 3, 5]), routed=torch.zeros(2, 2, dtype=torch.int64))

    with WithoutTheHost():
        PolicyLayer._count_rows(layer, layout, given)

    assert layout.routed[1, 0] == 2


def test_the_meta_device_runs_it_all(policy: Path):
    mixture = make_mixture(policy, torch.bfloat16)
    given = random_choices(mixture)
    expected = computed(mixture, given)
    mixture, given = mixture.to("meta"), given.to("meta")
    tokens, grad = (torch.empty(NUM_TOKENS, 1, 32, dtype=torch.bfloat16, device="meta") for _ in range(2))
    tokens.requires_grad_()

    with WithoutTheHost():
        found = differentiated(mixture, tokens, grad, given)

    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }
    in_turn = make_mixture(policy, torch.bfloat16, Kernels()).to("meta")
    with pytest.raises(RuntimeError, match="meta"):  # the host needs the number of rows of each expert
        differentiated(in_turn, tokens, grad, given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build")
def test_on_a_gpu_nothing_waits_and_results_are_the_cpus(policy: Path):
    mixture = make_mixture(policy, torch.bfloat16)
    given = random_choices(mixture)
    given[:3] = given[3:6]  # rounding could change a router's choices
    expected = computed(mixture, given)
    mixture, given = mixture.cuda(), given.cuda()
    for name, tensor in computed(mixture, given).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=0, atol=0.05 * scale, msg=name)
    tokens, grad = (torch.randn(NUM_TOKENS, 1, 32).bfloat16().cuda() for _ in range(2))
    tokens.requires_grad_()
    mode = torch.cuda.get_sync_debug_mode()
    # Before Hopper, torch's grouped products are loops that synchronize with the host.
    torch.cuda.set_sync_debug_mode("error" if torch.cuda.get_device_capability() >= (9, 0) else mode)
    try:
        differentiated(mixture, tokens, grad, given)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
