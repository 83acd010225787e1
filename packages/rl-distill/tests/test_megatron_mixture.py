"""The router of a mixture of experts, and replay of its choices."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from equal_tensors import different_tensors
from megatron.core.models.gpt import GPTModel
from rounding import BFLOAT16, rounding_bound

from rl_core.data.ragged import offsets_of
from rl_distill.architecture.mixture_config import SigmoidRouting
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.checkpoints.hf_folder import PolicyTensors
from rl_distill.megatron.attention.layout import PackedLayout, packed_layout, rotary_frequencies
from rl_distill.megatron.convert import Shard, blocks_of
from rl_distill.megatron.mixture import route
from rl_distill.megatron.model_spec import PolicyLayer, block_spec, transformer_config

pytestmark = pytest.mark.usefixtures("one_rank")

NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K = 20, 2, 4, 2
LENGTHS = [12, 8]
LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()


@pytest.mark.parametrize(("given", "expected"), [
    (None, [0, 0, 3 / 7, 4 / 7]),
    ([[0, 1]], [1 / 3, 2 / 3, 0, 0]),
    ([[3, 0]], [1 / 5, 0, 0, 4 / 5]),
    ([[-1, -1]], [0, 0, 3 / 7, 4 / 7]),
    ([[-1, 0]], [0, 0, 3 / 7, 4 / 7]),
    ([[1, 1]], [0, 0, 3 / 7, 4 / 7]),
    ([[0, 4]], [0, 0, 3 / 7, 4 / 7]),
])  # fmt: skip
def test_probabilities_of_the_chosen_sum_to_one(given: list[list[int]] | None, expected: list[float]):
    experts = None if given is None else torch.tensor(given)

    probabilities, chosen = route(LOGITS, top_k=TOP_K, is_normalized=True, given=experts)

    torch.testing.assert_close(probabilities, torch.tensor([expected]))
    assert chosen.tolist() == [[value > 0 for value in expected]]


def test_probabilities_stay_as_they_are_where_the_policy_does_not_normalise():
    probabilities, _ = route(LOGITS, top_k=TOP_K, is_normalized=False, given=torch.tensor([[0, 2]]))

    torch.testing.assert_close(probabilities, torch.tensor([[0.1, 0.0, 0.3, 0.0]]))


SIGMOID_SCORES = [0.1, 0.4, 0.3, 0.2, 0.8, 0.05]
"""Three groups of two experts."""


@pytest.mark.parametrize(("bias", "top_groups", "given", "expected"), [
    ([0, 0, 0, 0, 0, 0], 3, None, [0, 0.4, 0, 0, 0.8, 0]),
    ([0, 0, 0, 0, 0, 0], 1, None, [0, 0, 0, 0, 0.8, 0.05]),
    ([0.01, 0, 0, 0, -0.5, 0], 1, None, [0.1, 0.4, 0, 0, 0, 0]),  # the groups score 0.51, 0.5 and 0.35
    ([0, -0.5, 0, 0, -0.65, 0], 2, None, [0, 0, 0.3, 0.2, 0, 0]),
    ([0, 0, 0, 0, 0, 0], 1, [[1, 2]], [0, 0.4, 0.3, 0, 0, 0]),  # of groups never chosen together
    ([9, 9, 9, 9, 9, 9], 1, [[0, -1]], [0, 0, 0, 0, 0.8, 0.05]),
])  # fmt: skip
@pytest.mark.parametrize("is_normalized", [True, False])
def test_sigmoids_choose_by_groups_and_bias_and_weigh_without(
    bias: list[float], top_groups: int, given: list[list[int]] | None, expected: list[float], is_normalized: bool
):
    sigmoid = SigmoidRouting(num_groups=3, top_groups=top_groups, scaling=2.5)
    logits = torch.logit(torch.tensor([SIGMOID_SCORES])).requires_grad_()
    experts = None if given is None else torch.tensor(given)

    probabilities, chosen = route(
        logits, top_k=2, is_normalized=is_normalized, given=experts, sigmoid=sigmoid, bias=torch.tensor(bias)
    )

    weights = torch.tensor([expected])
    torch.testing.assert_close(probabilities, 2.5 * (weights / weights.sum() if is_normalized else weights))
    assert chosen.tolist() == [[value > 0 for value in expected]]
    probabilities.square().sum().backward()
    assert (logits.grad != 0).tolist() == chosen.tolist()


def test_the_softmax_is_taken_in_float32():
    probabilities, _ = route(LOGITS.bfloat16(), top_k=TOP_K, is_normalized=True, given=None)

    expected = torch.softmax(LOGITS.bfloat16().double()[:, 2:], -1)
    bound = BFLOAT16 / 2 + rounding_bound(1.0, roundings=8)  # one rounding to bfloat16, after those in float32
    torch.testing.assert_close(probabilities[:, 2:].double(), expected, rtol=bound, atol=0)


def test_no_token_gives_no_choice():
    probabilities, chosen = route(torch.zeros(0, 4), top_k=TOP_K, is_normalized=True, given=torch.zeros(0, 2).long())

    assert probabilities.shape == chosen.shape == (0, 4)


def keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build(policy_dir: Path, **changes: Any) -> GPTModel:
    policy = parse_policy_config(read_policy_config(policy_dir))
    config = transformer_config(policy, dtype=torch.float32, init_method=keep, **changes)
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=policy.vocab_size,
        max_sequence_length=policy.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=policy.is_tied,
    )
    tensors = PolicyTensors(policy_dir, policy)
    for block in blocks_of(dict(model.named_parameters()), policy, Shard(layers=range(policy.num_layers))):
        block.write(tensors.read(block.name, block.offsets, block.sizes, dtype=torch.float32))
    return model


def ids_of_tokens() -> torch.Tensor:
    return torch.randint(0, 40, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def layout_of(policy_dir: Path, experts: torch.Tensor | None, kept: torch.Tensor | None = None) -> PackedLayout:
    policy = parse_policy_config(read_policy_config(policy_dir))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    heads = (policy.num_heads, policy.num_key_value_heads)
    layout = packed_layout(positions, offsets_of(LENGTHS), frequencies=rotary_frequencies(policy), head_counts=heads)
    layout.experts, layout.kept = experts, kept
    return layout


def logits_of(model: GPTModel, layout: PackedLayout) -> torch.Tensor:
    ids = ids_of_tokens()[None]
    return model(ids, torch.zeros_like(ids), None, packed_seq_params=layout)[0]


def random_choices() -> torch.Tensor:
    """Return [T, layers, top_k] experts, different within a token."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]


def own_choices(model: GPTModel, policy_dir: Path) -> torch.Tensor:
    """Return the routers' own choices."""
    choices = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda *args: choices.append(args[2][0].topk(TOP_K).indices))
        for layer in model.decoder.layers
    ]
    logits_of(model, layout_of(policy_dir, None))
    for hook in hooks:
        hook.remove()
    return torch.stack(choices, 1)


def gradients(model: GPTModel, layout: PackedLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = logits_of(model, layout)
    logits.log_softmax(-1)[:, 3].sum().backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_replaying_ones_own_choices_changes_nothing(mixture_policy: Path):
    model = build(mixture_policy)
    own = own_choices(model, mixture_policy)
    logits, grads = gradients(model, layout_of(mixture_policy, None))

    for experts in (own, own.flip(-1), torch.full_like(own, -1)):
        found, found_grads = gradients(model, layout_of(mixture_policy, experts))
        assert torch.equal(found, logits)
        assert different_tensors(found_grads, grads) == []


def test_others_choices_give_those_experts_outputs(mixture_policy: Path):
    layer = build(mixture_policy).decoder.layers[0].mlp
    x = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(4))
    given = torch.tensor([[0, 1], [2, 3], [3, 0]])

    with layer.router.replaying(given), torch.no_grad():
        found, _ = layer(x)

    weights = dict(layer.named_parameters())
    expected = torch.zeros(3, 32)
    for row, experts in enumerate(given.tolist()):
        shares = (weights["router.weight"] @ x[row, 0])[experts].softmax(0)
        for share, expert in zip(shares, experts, strict=True):
            gate, up = (weights["experts.linear_fc1"][expert] @ x[row, 0]).chunk(2)
            down = weights["experts.linear_fc2"][expert]
            expected[row] += (share * (down @ (F.silu(gate) * up))).detach()
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(layer(x)[0], found)  # outside the context, the router chooses


def test_every_layer_replays_its_own_choices(mixture_policy: Path):
    experts = random_choices()
    experts[3], experts[5, 1] = -1, -1
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        mixture_policy, dtype=torch.float32, trust_remote_code=False
    )

    def replay(rows: torch.Tensor, index: int) -> Callable[..., Any]:
        def hook(_module: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, _, own = output
            chosen = torch.where(rows[:, index] >= 0, rows[:, index], own)
            shares = logits.softmax(-1).gather(-1, chosen)
            return logits, shares / shares.sum(-1, keepdim=True), chosen

        return hook

    expected = []
    for ids, rows in zip(ids_of_tokens().split(LENGTHS), experts.split(LENGTHS), strict=True):
        hooks = [
            layer.mlp.gate.register_forward_hook(replay(rows, index))
            for index, layer in enumerate(reference.model.layers)
        ]
        expected.append(reference(ids[None]).logits[0])
        for hook in hooks:
            hook.remove()
    model = build(mixture_policy)

    found = logits_of(model, layout_of(mixture_policy, experts))

    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    assert (found - logits_of(model, layout_of(mixture_policy, None))).abs().max() > 1e-2


def test_the_router_learns_from_replayed_choices(mixture_policy: Path):
    model = build(mixture_policy)
    experts = torch.tensor([1, 3]).expand(NUM_TOKENS, NUM_LAYERS, TOP_K)

    _, grads = gradients(model, layout_of(mixture_policy, experts))

    for layer in range(NUM_LAYERS):
        rows = grads[f"decoder.layers.{layer}.mlp.router.weight"].norm(dim=-1)
        assert rows[[1, 3]].min() > 1e-4
        assert rows[[0, 2]].max() < 1e-6
        unused, used = grads[f"decoder.layers.{layer}.mlp.experts.linear_fc1"][:2]
        assert used.any()
        assert not unused.any()


def test_a_recomputed_layer_replays_the_same(mixture_policy: Path):
    layouts = [layout_of(mixture_policy, random_choices()) for _ in range(2)]

    logits, grads = gradients(build(mixture_policy), layouts[0])
    found, found_grads = gradients(build(mixture_policy, recompute=True), layouts[1])

    assert torch.equal(found, logits)
    assert different_tensors(found_grads, grads) == []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kept", [None, [0, 4, 5, 11, 17]])
def test_rows_that_the_router_would_route_differently_are_counted_once(
    recompute: bool, kept: list[int] | None, mixture_policy: Path
):
    model = build(mixture_policy, recompute=recompute)
    experts = own_choices(model, mixture_policy)
    experts[[0, 4, 9], -1] = (experts[[0, 4, 9], -1] + 1) % NUM_EXPERTS  # one of two adjacent experts changes
    experts[[0, 5], -1] = experts[[0, 5], -1].flip(-1)  # the order of experts does not matter
    experts[17] = -1
    is_changed = {row: set(experts[row, -1].tolist()) for row in (0, 4, 9)}
    experts[7, :] = -1
    layout = layout_of(mixture_policy, experts, None if kept is None else torch.tensor(kept))
    layout.routed = torch.full((NUM_LAYERS, 2), 99)

    gradients(model, layout)

    own = own_choices(model, mixture_policy)[:, -1]
    changed = [row for row, chosen in is_changed.items() if chosen != set(own[row].tolist())]
    assert len(changed) == 3
    last = [NUM_TOKENS - 2, 3] if kept is None else [4, 2]
    assert layout.routed.tolist() == [[NUM_TOKENS - 2, 0], last]


def test_the_last_layer_replays_choices_of_the_tokens_that_it_keeps(mixture_policy: Path):
    model, experts = build(mixture_policy), random_choices()
    kept = torch.tensor([0, 4, 5, 11, 17])

    found = logits_of(model, layout_of(mixture_policy, experts, kept))
    nothing = logits_of(model, layout_of(mixture_policy, experts, kept[:0]))

    expected = logits_of(model, layout_of(mixture_policy, experts))[kept]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert nothing.shape == (0, 40)


def test_choices_count_dense_layers_too(policy_writer: Callable[..., Path], tmp_path: Path):
    policy_dir = policy_writer(tmp_path, "Qwen3MoeForCausalLM", mlp_only_layers=[0])
    model, experts = build(policy_dir), random_choices()
    changed = experts.clone()
    changed[:, 0] = 3 - changed[:, 0]

    first, second = (logits_of(model, layout_of(policy_dir, choices)) for choices in (experts, changed))

    assert torch.equal(first, second)
    changed[:, 1] = 3 - changed[:, 1]
    assert not torch.allclose(logits_of(model, layout_of(policy_dir, changed)), first)


def test_a_sequence_parallel_rank_takes_the_choices_of_its_tokens():
    layer = SimpleNamespace(
        layer_number=2,
        config=SimpleNamespace(sequence_parallel=True),
        tp_group=SimpleNamespace(rank=lambda: 1),
    )
    experts = random_choices()

    found = PolicyLayer._experts(layer, PackedLayout(experts=experts), None, num_tokens=NUM_TOKENS // 2)

    assert torch.equal(found, experts[NUM_TOKENS // 2 :, 1])
