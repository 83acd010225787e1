from dataclasses import replace

import pytest

from rl_core.data import Batch, ImageSpan
from rl_core.errors import DataError
from rl_core.queue.messages import decode_prompt, encode_prompt
from rl_core.testing import make_prompt, make_trajectory

IMAGES = (ImageSpan(digest="a" * 64, start=1, length=4), ImageSpan(digest="b" * 64, start=7, length=2))


def test_a_prompt_keeps_its_images_on_the_wire():
    prompt = replace(make_prompt("p0"), images=IMAGES)
    assert decode_prompt(encode_prompt(prompt)).images == IMAGES
    assert decode_prompt(encode_prompt(make_prompt("p1"))).images == ()


@pytest.mark.parametrize("images", [b"7", b"[7]", b'[{"digest": "a"}]', b'{"a": 1}'])
def test_images_of_another_form_are_refused(images):
    encoded = encode_prompt(replace(make_prompt("p0"), images=IMAGES))
    start, stop = encoded.index(b'"images":') + 9, encoded.rindex(b"]") + 1
    with pytest.raises(DataError, match="a prompt cannot be decoded"):
        decode_prompt(encoded[:start] + images + encoded[stop:])


def test_a_row_keeps_its_images_beside_its_extras():
    row = replace(make_trajectory("p0", 0), images=IMAGES, extras={"ended_by": "answer"})
    batch = Batch.from_trajectories([row, make_trajectory("p0", 1)])
    assert batch.images == (IMAGES, ())
    assert batch.extras[0]["ended_by"] == "answer"
    wrong = Batch.from_trajectories([replace(row, images=(), extras={"images": [["a", 1]]})])
    with pytest.raises(DataError, match=r"must be a list of \[digest, start, length\]"):
        _ = wrong.images
