"""Training data and results in the client's protobuf messages. Only this file knows the `tinker` package.

Facts about the messages come from tinker 0.38 (Apache-2.0).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import FloatArray, IntArray
from rl_core.errors import MissingExtraError
from rl_rollout.gateway import RefusedError, refused_field
from rl_service.losses import Datum, ForwardBackward
from rl_service.requests import Place
from rl_service.sampling import Sampled

try:
    import zstandard
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as messages
except ImportError as error:
    raise MissingExtraError(
        f"the service needs tinker's messages: {error}. Install rl-service[service] as the README says."
    ) from error

PROTOBUF = "application/x-protobuf"
MAX_VALUES = 2**26
"""Maximum size of a tensor that arrives compressed."""
MAX_PARTS = 1 << 14
"""Maximum number of rows of a request, and of chunks of a row; a client sends at most 1024 rows at once."""
_PLACE = re.compile(rb"\n[\x01-\x7f][ -~]{1,127}\x10[\x80-\xff]*[\x00-\x7f]")
"""What a request begins with: its fields model_id and seq_id."""
_DTYPES: Mapping[int, str] = {messages.DTYPE_FLOAT32: "<f4", messages.DTYPE_INT64: "<i8", messages.DTYPE_INT32: "<i4"}


def decompressed(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """Return a body without its content encoding.

    Raises:
        RefusedError: The encoding is unknown, or the content damaged or too large.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise refused_field("content-encoding", encoding, '"zstd" or "identity"')
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            content: bytes = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(f"the body is not zstd: {error}.") from None
    if len(content) > max_bytes:
        raise RefusedError(f"the body must have at most {max_bytes} bytes.", kind="request_too_large")
    return content


def read_place_of_pass(head: bytes) -> Place | None:
    """Return the position of a request from its first bytes, or None if they have none."""
    found, message = _PLACE.match(head), messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(found[0] if found else b"")
    except DecodeError:
        return None
    return Place(model_id=message.model_id, seq_id=message.seq_id) if message.seq_id > 0 else None


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request. Data that the service does not support becomes its `problem`, which names the field.

    Raises:
        RefusedError: The message is damaged.
    """
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RefusedError(f"the body is not a ForwardBackwardRequest: {error}.") from None
    options: dict[str, float | str] = dict(message.loss_fn_config)
    options |= {name: getattr(one, one.WhichOneof("value")) for name, one in message.loss_fn_config_v2.items()}
    data, problem = [], None
    try:
        if len(message.data) > MAX_PARTS:
            raise refused_field("data", f"{len(message.data)} rows", f"at most {MAX_PARTS}")
        data = [_datum(one, f"data[{index}]") for index, one in enumerate(message.data)]
    except RefusedError as error:
        problem = error
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        options=options,
        data=data,
        forward_only=message.forward_only,
        problem=problem,
    )


def _datum(message: Any, where: str) -> Datum:
    parts = []
    if len(message.model_input) > MAX_PARTS:
        raise refused_field(f"{where}.model_input", f"{len(message.model_input)} chunks", f"at most {MAX_PARTS}")
    for index, chunk in enumerate(message.model_input):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise refused_field(f"{where}.model_input[{index}]", kind, "text; this service trains no other kind")
        parts.append(_array(chunk.encoded_text.tokens, "<i4", f"{where}.model_input[{index}]"))
    inputs = {name: _tensor(one, f"{where}.{name}") for name, one in message.loss_fn_inputs.items()}
    return Datum(tokens=np.concatenate(parts) if parts else np.zeros(0, np.int32), inputs=inputs)


def _tensor(message: Any, where: str) -> NDArray[Any]:
    if message.dtype not in _DTYPES:
        raise refused_field(f"{where}.dtype", message.dtype, f"one of {list(_DTYPES)}")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        return _from_sparse(message.sparse_csr, shape, dtype, where)
    values = _array(message.dense, dtype, where)
    shape = shape or values.shape
    if int(np.prod(shape)) != values.size or min(shape, default=0) < 0:
        raise refused_field(f"{where}.shape", list(shape), f"a shape of {values.size} values")
    return values.reshape(shape)


def _from_sparse(message: Any, shape: tuple[int, ...], dtype: str, where: str) -> NDArray[Any]:
    """Return the whole tensor of compressed rows, with 0 at the entries that they leave out."""
    starts, columns = (_array(one, "<i8", where) for one in (message.crow_indices, message.col_indices))
    values = _array(message.values, dtype, where)
    is_matrix = len(shape) == 2 and min(shape) > 0 and len(starts) == shape[0] + 1 and shape[0] * shape[1] <= MAX_VALUES
    if not is_matrix or starts[0] or (np.diff(starts) < 0).any() or not starts[-1] == len(columns) == len(values):
        raise refused_field(where, f"shape {list(shape)}", f"compressed rows of at most {MAX_VALUES} values")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise refused_field(where, "other columns", f"columns from 0 to {shape[1] - 1}")
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return whole


def _array(content: bytes, dtype: str, where: str) -> NDArray[Any]:
    try:
        return np.frombuffer(content, dtype=dtype)
    except ValueError:
        raise refused_field(where, f"{len(content)} bytes", f"values of type {dtype}") from None


def write_forward_backward(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    """Return the message of a pass.

    Args:
        logprobs: Logprobs of each row's target tokens, [N] or [N, K].
        metrics: Metrics, named `name:reduction`.
    """
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for trailing, rows in groupby(logprobs, key=lambda one: one.shape[1:]):
        contents = [np.asarray(one, "<f4").tobytes() for one in rows]
        field = message.loss_fn_outputs.add(num_datums=len(contents)).fields["logprobs"]
        field.dtype, field.data = messages.DTYPE_FLOAT32, b"".join(contents)
        field.offsets = np.cumsum([0, *map(len, contents)], dtype="<i8").tobytes()
        field.trailing_shape.extend(trailing)
    content: bytes = message.SerializeToString()
    return content


def write_samples(
    sequences: Sequence[Sampled],
    prompt_logprobs: FloatArray | None = None,
    top: tuple[IntArray, FloatArray] | None = None,
) -> bytes:
    """Return the message of a sampling request.

    Args:
        sequences: The samples.
        prompt_logprobs: [P] logprobs of the prompt, NaN where there is none; None if nobody asked.
        top: Most probable tokens of the prompt and their logprobs, [P, K] each; None if nobody asked.
    """
    message = messages.SampleResponse()
    for sampled in sequences:
        sequence = message.sequences.add(
            stop_reason=messages.STOP_REASON_LENGTH if sampled.is_cut else messages.STOP_REASON_STOP,
            tokens=np.asarray(sampled.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sampled.logprobs, "<f4").tobytes(),
        )
        if sampled.top is not None:
            _put_top(sequence.topk_sampled_logprobs, sampled.top)
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if top is not None:
        _put_top(message.topk_prompt_logprobs, top)
    content: bytes = message.SerializeToString()
    return content


def _put_top(message: Any, top: tuple[IntArray, FloatArray]) -> None:
    ids, logprobs = top
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = np.asarray(ids, "<i4").tobytes(), np.asarray(logprobs, "<f4").tobytes()
