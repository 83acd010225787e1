"""A batch's images as inputs of a transformers model."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_core.images import joined_pixels
from rl_rollout.engines.stepper import Sample

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which classes take the kind of each token: 1 for an image's."""


def image_inputs(model: Any, samples: Sequence[Sample], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Return the inputs that a batch's images add or replace.

    A token that only looks like an image's placeholder, because the model has sampled it, becomes another one in
    input_ids: see `with_embeddings`.

    Args:
        model: The model.
        samples: The samples, some with images.
        ids: [N, T] their tokens, padded on the left.
        mask: [N, T] 0 where padded.
    """
    pixels = joined_pixels([image.pixels for sample in samples for image in sample.images])
    tensors = {name: torch.from_numpy(array).to(ids.device) for name, array in pixels.items()}
    tensors = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    types = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        padding = ids.shape[1] - len(sample.input_ids) - len(sample.token_ids)
        for image in sample.images:
            begin = padding + image.span.start
            types[row, begin : begin + image.span.length] = torch.from_numpy(image.is_embedded).to(types)
    placeholder = ids[types > 0][0]
    plain = ids.masked_fill((ids == placeholder) & (types == 0), 0 if placeholder else 1)
    taken = inspect.signature(model.forward).parameters
    inputs = tensors | {"input_ids": plain} | {name: types for name in TOKEN_TYPES if name in taken}
    if (positions := getattr(model.base_model, "get_rope_index", None)) is not None:
        grids = {name: one for name, one in tensors.items() if name.endswith("_thw")}
        inputs["position_ids"], _ = positions(plain, mm_token_type_ids=types, attention_mask=mask, **grids)
    return inputs


def next_positions(inputs: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor | int:
    """Return [N, 1]: how far the position of each sample's next token is from its number of tokens."""
    positions = inputs.get("position_ids")
    if positions is None:
        return 0
    last: torch.Tensor = positions.masked_fill(mask == 0, 0).amax(dim=(0, 2))
    return (last + 1 - mask.sum(-1)).unsqueeze(-1)


@contextmanager
def with_embeddings(model: Any, ids: torch.Tensor, given: torch.Tensor | None) -> Iterator[None]:
    """Embed ids, even where the model is given other ones."""
    if given is None or torch.equal(ids, given):
        yield
        return
    handle = model.get_input_embeddings().register_forward_hook(lambda module, _given, _found: module.forward(ids))
    try:
        yield
    finally:
        handle.remove()
