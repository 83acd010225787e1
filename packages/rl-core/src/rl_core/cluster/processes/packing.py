"""Serialization for a role's process: pickles, with arrays and CPU tensors as separate buffers without copies.

This is the only module that pickles roles' arguments and results. Both ends are this project's processes; this module
never unpickles data from disk or from others.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

Buffer = Any
"""A bytes-like object: bytes, bytearray, memoryview or an array of uint8."""


class Packed(NamedTuple):
    """A serialized value.

    Attributes:
        body: The pickle.
        buffers: Flat byte buffers that the pickle refers to, in order; they share the sender's memory until sent.
    """

    body: bytes
    buffers: Sequence[Buffer]

    @property
    def size_bytes(self) -> int:
        """Total size of pickle and buffers."""
        return len(self.body) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


class _Pickler(pickle.Pickler):
    last: Any = None
    """The object visited last, which caused a failure if there is one."""

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or not _is_plain(torch, value):
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return _tensor, (pickle.PickleBuffer(flat.numpy()), dtype, tuple(value.shape), value.requires_grad)


def pack(value: Any) -> Packed:
    """Pickle a value without copying arrays and CPU tensors.

    Raises:
        TypeError: A part cannot be pickled, such as a lock or a class that is local to a function; the message names
            its type.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    pickler = _Pickler(body, protocol=5, buffer_callback=buffers.append)
    try:
        pickler.dump(value)
    except Exception as error:  # a custom __reduce__ can raise anything
        culprit = type(pickler.last)
        raise TypeError(
            f"a value of type {culprit.__module__}.{culprit.__qualname__} cannot be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Packed(body.getvalue(), [buffer.raw() for buffer in buffers])


def unpack(packed: Packed) -> Any:
    """Unpickle a value; its arrays are views of the buffers."""
    return pickle.loads(packed.body, buffers=packed.buffers)  # noqa: S301 - from our own process, see above


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Return True if bytes, shape and dtype fully describe a tensor."""
    is_dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    return bool(is_dense and tensor.is_leaf and not tensor.is_conj() and not tensor.is_neg())


def _tensor(buffer: Buffer, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)  # writing to Ray's read-only memory would crash the process
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(buffer, dtype=kind) if memoryview(buffer).nbytes else torch.empty(0, dtype=kind)
    return flat.reshape(shape).requires_grad_(requires_grad)
