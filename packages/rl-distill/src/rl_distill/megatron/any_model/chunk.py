"""transformers' own model as this rank's chunk: our packed attention under it, our head over it.

The class computes everything between attention and head, so any architecture trains. How its rows are computed is not
read from a table: `settle` tries the ways on a few rows, and keeps the first that gives the class's own logprobs.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.enums import ModelType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.data import Batch, ImageSpan, IntArray, Ragged, RowKey
from rl_core.errors import SettingsError
from rl_distill.architecture.lora_targets import adapted_modules
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.transformers_model import build_model, vision_parameters
from rl_distill.megatron.any_model.images import PackImages, RankImages
from rl_distill.megatron.attention.layout import HeadIndex, PackedLayout
from rl_distill.megatron.attention.packed import packed_attention, reordered, split_buckets
from rl_distill.megatron.head import logits_at_once
from rl_distill.megatron.lora import LoraLinear
from rl_distill.megatron.model import Head, OutputRequest, R, TokenResults, TokenScoring
from rl_distill.megatron.rank_batches import PlacedPack
from rl_distill.objectives.vocabulary import VocabularyPart
from rl_distill.options import LoraOptions

_log = structlog.get_logger(__name__)

PACKED = "rl_packed"
"""Name of our attention among transformers' implementations."""
WAYS = ((PACKED, True), ("sdpa", False), ("eager", False))
"""Attention, and whether rows lie end to end; otherwise each is padded on its right."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Maximum mean difference of logprobs from the class's own, in nats; rounding to bfloat16 gives up to 0.03 in tests."""
ROUNDING_SHARE, MAX_ROUNDING = 2.0, 5.0
"""How much of the difference between two kernels of the class itself is added to the tolerance, and at most how many
tolerances: a router chooses differently between nearly equal experts."""
MAX_LEAK = 5e-3
"""Maximum mean change of the logprobs of other rows when a row's tokens change, as a share of the change of its own.
Unlike a difference, it also tells rounding from a wrong way where weights are small."""
MAX_SEEN = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""The same of a row's earlier tokens, as a share of the change of the later ones; of experts, rounding may change."""
HEAD_TOLERANCE, SCALE_TOLERANCE = 1e-2, 1e-3
"""Maximum relative difference of a head's logits from scaled products, and of the scale from 1."""
PLAIN_ARGUMENTS = frozenset({"position_ids", "use_cache", "output_router_logits", "position_embeddings", "is_causal"})
"""Arguments of a layer's attention that do not change what it computes, besides those of `_attention`."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands for an attention mask: transformers' function of the positions that a query may see.

    Attributes:
        is_visible: Called with (0, 0, query, key), positions within a row; returns whether the key is visible.
    """

    is_visible: Callable[..., Tensor]

    def mask(self, length: int, device: torch.device) -> Tensor:
        """Return [length, length] bool: the keys that each query sees."""
        positions = torch.arange(length, device=device)
        return self.is_visible(0, 0, positions[:, None], positions[None, :])


def _mask_rule(*_: Any, mask_function: Callable[..., Tensor] = causal_mask_function, **__: Any) -> MaskRule | None:
    """Return what a mask would say; None for all earlier tokens."""
    return None if mask_function is causal_mask_function else MaskRule(mask_function)


def _reads_tensors(rule: Callable[..., Any]) -> bool:
    """Return whether a rule looks at more than positions, such as at the tokens of an image."""
    values = [cell.cell_contents for cell in rule.__closure__ or ()]
    values += [one for value in values if isinstance(value, tuple | list) for one in value]
    return any(torch.is_tensor(one) or (inspect.isfunction(one) and _reads_tensors(one)) for one in values)


class _Pack:
    """The pack that a model computes, where its attention layers find it, also when they are recomputed.

    Attributes:
        layout: Layout of the pack.
    """

    layout = PackedLayout()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - always 0
    sliding_window: int | None = None,  # noqa: ARG001 - the mask says it
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each row of the pack.

    Args:
        module: The attention layer.
        query: [1, heads, T, D].
        key: [1, groups, T, D].
        value: [1, groups, T, D of the values].
        attention_mask: See `_mask_rule`.
        scaling: Factor on the scores; None for 1 / sqrt(D).
        dropout: Not used.
        sliding_window: Not used.
        softcap: Bound of the scores, by a hyperbolic tangent.
        s_aux: [heads] scores of a sink, to which every query attends.
        **others: Other arguments of the layer.

    Returns:
        [1, T, heads, D of the values].

    Raises:
        SettingsError: The layer has an argument that is not known here.
    """
    unknown = sorted(
        {name for name, given in others.items() if given is not None and given is not False} - PLAIN_ARGUMENTS
    )
    if unknown or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise SettingsError(f"attention of {type(module).__name__} has {unknown or 'no causal mask'}, unknown here.")
    if attention_mask is not None and _reads_tensors(attention_mask.is_visible):
        raise SettingsError(f"attention of {type(module).__name__} depends on more than positions; rows are padded.")
    layout: PackedLayout = module.rl_pack.layout
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    size = max(query.shape[-1], width)  # latent attention has values of another size
    q, k, v = (F.pad(x[0].transpose(0, 1), (0, size - x.shape[-1])).contiguous() for x in (query, key, value))
    if attention_mask is None and softcap is None and s_aux is None:
        return packed_attention((q, k, v), layout, scale=scale)[None, ..., :width], None
    if layout.spans:
        raise SettingsError(f"attention of {type(module).__name__} sees windows, caps or sinks; rows share no prefix.")
    index = layout.index(q.shape[1])
    parts = [
        split_buckets(reordered(x.flatten(0, 1), own.to_buckets, own.from_buckets, None), layout.buckets)
        for x, own in ((x, layout.index(x.shape[1])) for x in (q, k, v))
    ]
    outs = []
    for (rows, length), of_bucket in zip(layout.buckets, zip(*parts, strict=True), strict=True):
        by_head = [part.view(rows, -1, length, size) for part in of_bucket]
        rule = MaskRule(causal_mask_function) if attention_mask is None else attention_mask
        mask = rule.mask(length, query.device)
        outs.append(_masked(by_head, mask, scale=scale, softcap=softcap, sinks=s_aux).reshape(-1, size))
    out = reordered(torch.cat(outs), index.from_buckets, index.to_buckets, index.padding).view(q.shape)
    return out[None, ..., :width], None


def _masked(
    qkv: Sequence[Tensor], mask: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend in [rows, heads, length, D] under a [length, length] mask."""
    q, k, v = qkv
    if softcap is None and sinks is None:
        has_groups = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=has_groups)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype) @ v


class TransformersModel(TokenScoring, torch.nn.Module):
    """A model of transformers as a chunk with all layers.

    Attributes:
        is_packed: True if rows are computed end to end, without padding.
        shares_prefixes: True if attention computes shared prefixes of rows once.
        calls_group: Ranks that gather weights together, and so call the layers equally often; None for no other.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        config: Any,
        *,
        head: Head = "policy",
        lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model; `settle` follows once its weights are loaded.

        Args:
            policy: The policy's configuration, with its `model_json`.
            config: Megatron's configuration of the policy.
            head: Output of the model.
            lora: Options of the adapter; rank 0 for none.
            dtype: Dtype of the parameters; None for that of the computation.
        """
        dtype = dtype or config.params_dtype
        torch.nn.Module.__init__(self)
        AttentionInterface.register(PACKED, _attention)
        AttentionMaskInterface.register(PACKED, _mask_rule)
        self.config, self._policy = config, policy
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        self.vp_stage = None
        self.inner = build_model(policy.model_json, attn_implementation="eager", dtype=dtype)
        if config.recompute_granularity == "full":
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})
        if not policy.trains_vision:
            for parameter in vision_parameters(self.inner).values():
                parameter.requires_grad_(False)
        for name in adapted_modules(policy, lora):
            path, _, own = name.rpartition(".")
            parent = self.inner.get_submodule(path)
            setattr(parent, own, LoraLinear(getattr(parent, own), lora, config=config))
        self._pack = _Pack()
        for module in self.inner.modules():
            module.rl_pack = self._pack
        self.value_head = None
        if head == "value":
            output = self.inner.get_output_embeddings()
            path, _, own = next(n for n, m in self.inner.named_modules() if m is output).rpartition(".")
            setattr(self.inner.get_submodule(path), own, torch.nn.Identity())
            self.value_head = torch.nn.Linear(policy.hidden_size, 1, dtype=dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        elif self._output is self._input:
            self._output.zero_out_wgrad = True  # type: ignore[attr-defined] # Megatron then adds both gradients
        self.is_packed = self.shares_prefixes = False
        self.calls_group: dist.ProcessGroup | None = None
        self._head_scale: float | None = 1.0
        self._name_of_layers = ""
        self._answer_kind: Any = None

    def train(self, mode: bool = True) -> "TransformersModel":
        """Set the mode of adapters and recomputation; the class computes as in evaluation, without randomness."""
        super().train(False)
        self.training = mode
        for module in self.inner.modules():
            if isinstance(module, GradientCheckpointingLayer | LoraLinear):
                module.training = mode
        return self

    def layers(self) -> list[torch.nn.Module]:
        """Return the decoder layers."""
        return [module for module in self.inner.modules() if isinstance(module, GradientCheckpointingLayer)]

    def set_input_tensor(self, _: Any) -> None:
        """Do nothing: there is one pipeline stage."""

    def forward(self, placed: PlacedPack, *, wanted: OutputRequest = OutputRequest()) -> TokenResults:  # noqa: B008
        """Score tokens of a pack; see `PolicyModel.forward`."""
        hidden = self._hidden(placed)
        hidden = placed.to_score(hidden.index_select(0, placed.kept))
        if self._head_scale is None:
            return self._results_of_class(hidden, placed, wanted)
        return self._results(hidden if self._head_scale == 1.0 else hidden * self._head_scale, placed, wanted)

    @torch.no_grad()
    def settle(self, place: Callable[[Batch, int], PlacedPack], images: RankImages | None = None) -> None:
        """Choose how rows are computed: the first way that gives the class's own logprobs of a few rows.

        Args:
            place: Lays out a batch; rows of a prompt share prefixes of this number of tokens, 0 for none.
            images: Images of the rank's rows, among which are those of the tried ones; None for texts alone.

        Raises:
            SettingsError: No way gives them, or the class is not causal.
        """
        was_training = self.training
        self.eval()
        rows, others = _probe_rows(self._policy.vocab_size, self._policy.image_token_id, images)
        batch, other_batch = _batch(rows), _batch(others)
        own_head = self.value_head
        if own_head is not None:  # which may be 0
            self.value_head = torch.nn.Linear(
                self._policy.hidden_size, 1, bias=False, dtype=self.config.params_dtype, device=self._device
            )
            self.value_head.weight.normal_(0.0, self._policy.hidden_size**-0.5, generator=_generator(self._device))
        self._use("eager", is_packed=False)
        try:
            self._name_of_layers = self._find_layers()
            own, other = [self._own_results(row, images) for row in rows], self._own_results(others[0], images)
            if self.value_head is None:
                self._head_scale = self._find_head_scale()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # in any way
            raise SettingsError(
                f"{self._policy.architecture} cannot be trained: transformers' class does not compute a single row "
                f"of tokens ({type(error).__name__}: {error})."
            ) from error
        expected, changes = torch.cat(own), torch.split((own[0] - other).abs(), [_SHARED, len(other) - _SHARED])
        if changes[0].mean() > MAX_SEEN[self.config.params_dtype] * changes[1].mean():
            raise SettingsError(
                f"{self._policy.architecture} cannot be trained: its tokens see later ones, and a policy predicts each "
                "token from those before it. If the class can be a decoder, set is_decoder = true in config.json."
            )
        seen: dict[str, str] = {}

        def difference(attention: str, is_packed: bool, min_shared: int = 0) -> float:
            """Return the mean difference of logprobs in nats; infinite if the class refuses the attention."""
            way = "packed with shared prefixes" if min_shared else "packed" if is_packed else f"padded, {attention}"
            try:
                self._use(attention, is_packed=is_packed)
                values, others = (
                    placed.spread(self(placed).values)
                    for placed in (place(batch, min_shared), place(other_batch, min_shared))
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # in any way
                if isinstance(self, FSDPModule):
                    self.reset_iter_state()
                seen[way] = f"{type(error).__name__}: {error}"
                return float("inf")
            nats = float((values - expected).abs().mean())
            of_row, of_others = torch.tensor_split(values - others, [len(rows[0].ids)])
            changed, leaked = float(of_row.abs().mean()), float(of_others.abs().mean())
            seen[way] = f"{nats:.2g}"
            if leaked <= MAX_LEAK * changed:
                return nats
            seen[way] += f", and other rows change it by {leaked:.2g}"
            return float("inf")

        most = TOLERANCES[self.config.params_dtype]
        rounding = difference("sdpa", False)
        most += min(ROUNDING_SHARE * rounding, MAX_ROUNDING * most) if math.isfinite(rounding) else 0.0
        for attention, is_packed in WAYS:
            if difference(attention, is_packed) <= most:
                break
        else:
            differences = ", ".join(f"{name}: {difference}" for name, difference in seen.items())
            raise SettingsError(
                f"{self._policy.architecture} cannot be trained: no way to compute its rows gives the logprobs of "
                f"transformers' class within {most:g} nats; mean differences were {differences}."
            )
        self.shares_prefixes = is_packed and difference(attention, is_packed, _SHARED) <= most
        self._use(attention, is_packed=is_packed)
        _log.info(
            "class_computes",
            architecture=self._policy.architecture,
            attention=attention,
            is_packed=is_packed,
            shares_prefixes=self.shares_prefixes,
            padded_because=None if is_packed else seen["packed"],
        )
        self.value_head = own_head
        self.train(was_training)

    def _use(self, attention: str, *, is_packed: bool) -> None:
        if self._policy.image_token_id is None:
            self.inner.set_attn_implementation(attention)
        else:
            self.inner.set_attn_implementation("sdpa" if attention == PACKED else attention)
            self.inner.get_decoder().set_attn_implementation(attention)
        self.is_packed = is_packed

    def _find_layers(self) -> str:
        """Return the name of the model without its head: the outermost module with the embedding that is called."""
        embedding = self.inner.get_input_embeddings()
        called: list[str] = []
        hooks = [
            module.register_forward_pre_hook(lambda _, __, name=name: called.append(name))
            for name, module in self.inner.named_modules()
            if name and any(part is embedding for part in module.modules())
        ]
        self.inner(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=self._device), use_cache=False)
        for hook in hooks:
            hook.remove()
        return called[0]

    def _own_results(self, row: "_ProbeRow", images: RankImages | None) -> Tensor:
        """Return the class's logprobs [T] of a row's tokens, 0 at the first; a critic's values."""
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(self._device)
        inputs: dict[str, Tensor] = {}
        if images is not None and row.spans:
            inputs = {name: x.to(self._device) for name, x in images.inputs(row.spans).items()}
            inputs = self._accepted(inputs, images.token_types(ids)[None])
        if self.value_head is not None:
            hidden = self._layers(input_ids=ids[None], use_cache=False, **inputs).last_hidden_state[0, :-1]
            found = self.value_head(hidden).flatten()
        else:
            logits = self.inner(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1]
            found = torch.log_softmax(logits.float(), -1).gather(-1, ids[1:, None])[:, 0]
        return F.pad(found.float(), (1, 0))

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._input.device
        return device

    @property
    def _layers(self) -> Any:
        """The model without its head."""
        return self.inner.get_submodule(self._name_of_layers)

    @property
    def _input(self) -> torch.nn.Parameter:
        weight: torch.nn.Parameter = self.inner.get_input_embeddings().weight
        return weight

    @property
    def _output(self) -> torch.nn.Parameter:
        weight: torch.nn.Parameter = self.inner.get_output_embeddings().weight
        return weight

    def _with_head(self, compute: Callable[[Tensor], R]) -> R:
        """See `TokenScoring`."""
        return compute(self._output)

    @property
    def _part(self) -> VocabularyPart:
        return VocabularyPart(self._policy.vocab_size, None)

    @property
    def positions_of(self) -> Callable[..., Any] | None:
        """The class's function of positions with several axes; None if it has only those of a text."""
        found: Callable[..., Any] | None = getattr(self._layers, "get_rope_index", None)
        return found

    def _accepted(self, inputs: Mapping[str, Tensor], token_types: Tensor) -> dict[str, Tensor]:
        """Return the inputs for images, and the types of tokens, that are arguments of the class.

        Raises:
            SettingsError: Pixel values are none.
        """
        names = inspect.signature(type(self._layers).forward).parameters
        if unknown := [name for name, x in inputs.items() if x.is_floating_point() and name not in names]:
            raise SettingsError(f"{self._policy.architecture} takes no {unknown[0]}, which its processor returns.")
        both = {**inputs, "mm_token_type_ids": token_types, "token_type_ids": token_types}
        return {name: tensor for name, tensor in both.items() if name in names}

    def _hidden(self, placed: PlacedPack) -> Tensor:
        """Return [T, H] last hidden states."""
        ids, layout, images = placed.input_ids, placed.layout, placed.images
        if self.is_packed:
            self._pack.layout = layout
            inputs = {"position_ids": placed.position_ids[None], "attention_mask": torch.ones_like(ids)[None]}
            if images is not None:
                inputs |= self._accepted(images.joined(range(len(images.starts))), images.token_types)
                if images.positions is not None:
                    inputs["position_ids"] = images.positions
            return self._base(ids[None], **inputs)[0]
        num_calls = self._most_calls(len(layout.buckets))
        index, outs, start = layout.index(1), [], 0
        places = ids.index_select(0, index.to_buckets)
        mask = torch.ones_like(places).index_fill_(0, index.padding, 0)
        if images is not None:
            places = places * mask  # a copy of a placeholder would need pixel values
        for rows, length in layout.buckets:
            part = slice(start, start + rows * length)
            start += rows * length
            of_rows, is_real = (x[part].view(rows, length) for x in (places, mask))
            inputs = {} if images is None else self._bucket_inputs(images, index, part, is_real)
            outs.append(self._base(of_rows, attention_mask=is_real, **inputs).flatten(0, 1))
        hidden = torch.cat(outs).index_select(0, index.from_buckets)
        for _ in range(len(outs), num_calls):
            hidden = hidden + 0.0 * self._base(ids[None, :1]).sum()
        return hidden

    def _bucket_inputs(self, images: PackImages, index: HeadIndex, part: slice, is_real: Tensor) -> dict[str, Tensor]:
        """Return what the class needs for the images of a bucket's [rows, length] places."""
        starts = index.from_buckets.cpu().numpy()[list(images.starts)]
        chosen = [int(one) for one in np.argsort(starts) if part.start <= starts[one] < part.stop]
        places = index.to_buckets[part]
        types = images.token_types[0, places].view_as(is_real) * is_real
        inputs = self._accepted(images.joined(chosen), types)
        if images.positions is not None:
            inputs["position_ids"] = images.positions[:, 0, places].view(-1, *is_real.shape)
        return inputs

    def _most_calls(self, count: int) -> int:
        """Return how often a rank of the group calls the layers at most."""
        if self.calls_group is None:
            return count
        most = torch.tensor(count)  # on the host, which then does not wait for a GPU
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.calls_group)
        return int(most)

    def _base(self, ids: Tensor, **others: Tensor) -> Tensor:
        """Return [rows, T, H] last hidden states of the layers."""
        found = self._layers(input_ids=ids, use_cache=False, **others)
        hidden: Tensor = found.last_hidden_state.to(self.config.params_dtype)  # Mamba's are float32
        self._answer_kind = type(found)
        return hidden

    # -- heads that do more than multiply

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [M, V] of hidden states [M, H] by the class's own forward, without its layers."""
        base = self._layers
        base.forward = lambda *_, **__: self._answer_kind(last_hidden_state=hidden[None])
        try:
            logits: Tensor = self.inner(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del base.forward
        return logits

    def _find_head_scale(self) -> float | None:
        """Return c if logits are c times hidden states times the output matrix; None if the head does more."""
        if getattr(self.inner.get_output_embeddings(), "bias", None) is not None:
            return None
        self._base(torch.zeros(1, 4, dtype=torch.int64, device=self._device))  # whose kind of answer `_logits` gives
        weight = self._output
        hidden = (
            torch.randn(4, weight.shape[1], generator=_generator(self._device), device=self._device).to(weight) * 10
        )
        found, plain = self._logits(hidden).float(), (hidden @ weight.t()).float()
        scale = float((found * plain).sum() / plain.square().sum())
        smallest = SCALE_TOLERANCE * float(plain.abs().max())
        if not torch.allclose(found, scale * plain, rtol=HEAD_TOLERANCE, atol=smallest):
            return None
        return 1.0 if abs(scale - 1.0) < SCALE_TOLERANCE else scale

    def _results_of_class(self, hidden: Tensor, placed: PlacedPack, wanted: OutputRequest) -> TokenResults:
        """Return logprobs and other results by the class's head, some tokens at a time, computed again backward."""
        if wanted.comparison is not None:
            raise SettingsError(
                f"{self._policy.architecture} cannot be compared with a teacher's distributions: its head does more "
                'than multiply. Distil with distribution = "sampled".'
            )
        size = max(1, logits_at_once(hidden.device) // self._policy.vocab_size)
        score = partial(self._score_by_class, temperature=wanted.temperature)
        pairs = zip(torch.split(hidden, size), torch.split(placed.targets, size), strict=True)
        parts = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]
        values, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        others: dict[str, Tensor] = {"hidden": hidden.float()} if wanted.has_hidden else {}
        if wanted.top_k is not None:
            top = [self._top(part, wanted) for part in torch.split(hidden, size)]
            logprobs, ids = (torch.cat(column) for column in zip(*top, strict=True))
            others["logprobs"] = torch.cat([values.unsqueeze(-1), logprobs], -1)
            others["ids"] = torch.cat([placed.targets.unsqueeze(-1), ids], -1)
        return TokenResults(values, entropy, others)

    def _score_by_class(self, hidden: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(self._logits(hidden).float() / temperature, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        if targets.ndim == 1:
            return logprobs.gather(-1, targets[:, None])[:, 0], entropy
        return logprobs.gather(-1, targets.clamp_min(0)), entropy

    def _top(self, hidden: Tensor, wanted: OutputRequest) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(self._logits(hidden).float() / wanted.temperature, -1)
        top = logprobs.topk(wanted.top_k or 0, dim=-1)
        return top.values, top.indices


_SHARED = 4
"""Tokens of the prefix that two probe rows share."""


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@dataclass(frozen=True, slots=True)
class _ProbeRow:
    """A row to try ways of computing rows.

    Attributes:
        ids: [T] tokens.
        spans: Images among them.
    """

    ids: IntArray
    spans: tuple[ImageSpan, ...] = ()

    def with_image(self, tokens: IntArray, digest: str, *, at: int) -> "_ProbeRow":
        """Return the row with an image inserted after its other images."""
        span = ImageSpan(digest=digest, start=at, length=len(tokens))
        return _ProbeRow(np.insert(self.ids, at, tokens), (*self.spans, span))


def _probe_rows(
    vocab_size: int, image_token_id: int | None, images: RankImages | None
) -> tuple[list[_ProbeRow], list[_ProbeRow]]:
    """Return rows, and the same with another first row, which differs after the prefix that it shares with the third.

    With images, the first row has another image, and a text lies among the rows.
    """
    random = np.random.default_rng(0)
    of_texts = [random.integers(0, vocab_size, size).astype(np.int32) for size in (11, 6, 11)]
    of_texts[2][:_SHARED] = of_texts[0][:_SHARED]
    changed = np.where(np.arange(11) < _SHARED, of_texts[0], (of_texts[0] + 1) % vocab_size).astype(np.int32)
    texts = [np.where(ids == image_token_id, 0, ids).astype(np.int32) for ids in (*of_texts, changed)]
    first, second, third, other = (_ProbeRow(ids) for ids in texts)
    if images is None:
        return [first, second, third], [other, second, third]
    one, two, wide = images.probe()
    first, third = (row.with_image(*one, at=_SHARED) for row in (first, third))
    fourth = second.with_image(*wide, at=2).with_image(*one, at=3 + len(wide[0]))
    return [first, second, third, fourth], [other.with_image(*two, at=_SHARED), second, third, fourth]


def _batch(rows: Sequence[_ProbeRow]) -> Batch:
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)])
    keys = [RowKey("probe", index, 0) for index in range(len(rows))]
    columns: Mapping[str, Any] = {"input_ids": Ragged(np.concatenate([row.ids for row in rows]), offsets)}
    images = [[[span.digest, span.start, span.length] for span in row.spans] for row in rows]
    return Batch(keys, columns, extras=[{"images": of_row} for of_row in images])
