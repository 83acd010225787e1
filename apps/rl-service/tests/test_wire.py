"""The client's messages, as this service reads and writes them."""

import msgspec
import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the tinker client is not installed (pip install tinker)")

import zstandard  # noqa: E402 - after importorskip
from tinker import types  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_proto_response  # noqa: E402

from rl_rollout.gateway import RefusedError  # noqa: E402
from rl_service import requests  # noqa: E402
from rl_service.sampling import Sampled  # noqa: E402
from rl_service.wire import (  # noqa: E402
    decompressed,
    read_forward_backward,
    write_forward_backward,
    write_samples,
)


def sent(model_input, **inputs):
    datum = types.Datum(model_input=model_input, loss_fn_inputs=inputs)
    given = types.ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.7})
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_pass_arrives_as_it_was_sent():
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    read = read_forward_backward(sent(types.ModelInput(chunks=chunks), target_tokens=[2, 3, 4], advantages=[0, 1.5, 2]))
    assert (read.model_id, read.seq_id, read.loss, read.forward_only) == ("m", 3, "ppo", False)
    assert read.options == {"clip_low_threshold": 0.7}
    (datum,) = read.data
    assert datum.tokens.tolist() == [1, 2, 3]
    assert {name: values.tolist() for name, values in datum.inputs.items()} == {
        "target_tokens": [2, 3, 4],
        "advantages": [0, 1.5, 2],
    }
    assert read.num_tokens == 3


def test_what_cannot_train_keeps_its_place_in_the_order():
    image = types.ImageChunk(data=b"png", format="png")
    read = read_forward_backward(sent(types.ModelInput(chunks=[image]), target_tokens=[1]))
    assert (read.seq_id, len(read.data)) == (3, 0)
    assert "data[0].model_input[0] must be text" in str(read.problem)
    with pytest.raises(RefusedError, match="not a ForwardBackwardRequest"):
        read_forward_backward(b"\xff\xff")


def sparse(starts=(0, 2, 2, 3), columns=(1, 3, 0), values=(5, 6, 7), shape=(3, 4)):
    given = {"sparse_crow_indices": list(starts), "sparse_col_indices": list(columns), "shape": list(shape)}
    return types.TensorData(data=list(values), dtype="int64", **given)


def test_compressed_rows_become_whole():
    read = read_forward_backward(sent(types.ModelInput.from_ints([1, 2, 3]), target_tokens=sparse()))
    assert read.data[0].inputs["target_tokens"].tolist() == [[0, 5, 0, 6], [0, 0, 0, 0], [7, 0, 0, 0]]
    for damaged, found in (
        ({"starts": (0, 2, 3)}, "compressed rows"),
        ({"starts": (0, 3, 2, 3)}, "compressed rows"),
        ({"starts": (0, 2, 2, 4)}, "compressed rows"),
        ({"shape": (3, 10**12)}, "compressed rows of at most"),
        ({"columns": (1, 4, 0)}, "columns from 0 to 3"),
        ({"columns": (1, -1, 0)}, "columns from 0 to 3"),
    ):
        read = read_forward_backward(sent(types.ModelInput.from_ints([1]), target_tokens=sparse(**damaged)))
        assert f"data[0].target_tokens must be {found}" in str(read.problem), damaged


def test_a_result_of_a_pass_is_read_by_the_client():
    rows = [np.asarray([-1, -2], np.float32), np.asarray([-3], np.float32), np.full((2, 3), -4, np.float32)]
    content = write_forward_backward(rows, {"loss:sum": 2.5})
    read = deserialize_proto_response(content, types.ForwardBackwardOutput)
    assert read.metrics == {"loss:sum": 2.5}
    assert [one["logprobs"].data for one in read.loss_fn_outputs] == [[-1, -2], [-3], [-4] * 6]
    assert [one["logprobs"].shape for one in read.loss_fn_outputs] == [[2], [1], [2, 3]]


def test_samples_are_read_by_the_client():
    tokens, logprobs = np.asarray([5, 6], np.int32), np.asarray([-1, -2], np.float32)
    top = np.asarray([[5, 7], [6, 8]], np.int32), np.asarray([[-1, -3], [-2, -4]], np.float32)
    prompt = np.asarray([np.nan, -1.5], np.float32)
    content = write_samples([Sampled(tokens=tokens, logprobs=logprobs, is_cut=True, top=top)], prompt, top)
    read = deserialize_proto_response(content, types.SampleResponse)
    (sequence,) = read.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([5, 6], [-1, -2], "length")
    assert sequence.topk_logprobs == [[(5, -1), (7, -3)], [(6, -2), (8, -4)]] == read.topk_prompt_logprobs
    assert read.prompt_logprobs == [None, -1.5]


def test_compressed_bodies_have_a_limit():
    body = zstandard.ZstdCompressor().compress(b"0" * 1000)
    assert decompressed(body, "zstd", max_bytes=1000) == b"0" * 1000
    with pytest.raises(RefusedError, match="at most 999 bytes") as caught:
        decompressed(body, "zstd", max_bytes=999)
    assert caught.value.status == 413
    for broken, encoding, message in ((b"no", "zstd", "not zstd"), (b"", "gzip", "content-encoding must be")):
        with pytest.raises(RefusedError, match=message):
            decompressed(broken, encoding, max_bytes=9)


def test_requests_are_read_strictly():
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"stop": [3]}}
    read = requests.read_request(msgspec.json.encode(body | {"sampling_session_id": "s", "seq_id": 1}), requests.Sample)
    assert (read.prompt.to_ints(), read.sampling_params.stop, read.num_samples) == ([1, 2], [3], 1)
    for content, message in (
        (body | {"sampling_session_id": "s"}, "seq_id: Field required"),
        (body | {"seq_id": 1, "sampling_session_id": "s", "best_of": 2}, "best_of: Extra inputs"),
        (body | {"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: Extra inputs"),
    ):
        with pytest.raises(RefusedError, match=message):
            requests.read_request(msgspec.json.encode(content), requests.Sample)
    for broken in (b"{", b"[" * 100_000, b"\xff"):
        with pytest.raises(RefusedError, match="Invalid JSON"):
            requests.read_request(broken, requests.Sample)
