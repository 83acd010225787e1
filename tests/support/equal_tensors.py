"""Comparison of named tensors, such as the weights of a policy."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def different_tensors(found: Mapping[str, Any], expected: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names of expected tensors that were not found, or differ in a value; fail without expected ones."""
    wanted = dict(expected)
    assert wanted, "expected no tensors, so nothing is compared"
    return [name for name, tensor in wanted.items() if name not in found or not torch.equal(found[name], tensor)]
