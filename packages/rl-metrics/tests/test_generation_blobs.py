import math

import numpy as np
import pytest
from read_report import unpack

from rl_core.images import ImageStore, encode_image
from rl_metrics.report import row_blobs
from rl_metrics.report.packing import folder_blobs
from rl_metrics.report.row_blobs import pack_generations
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.jsonl import GenerationTable


def sample(uid="u", **more):
    of = {"prompt_uid": uid, "input": "1+1=", "output": "2", "policy_version": (3, 4), "source": "trainer"}
    return GenerationSample(**(of | more))


def table(step, *samples, name="validation/generations"):
    return GenerationTable(step=step, name=name, time=0.0, samples=samples)


def packed(tables, folder):
    read = lambda name: unpack((folder / name).read_bytes())
    header, index = read(pack_generations(tables, folder_blobs(folder, set()), images=ImageStore(folder / "images")))
    return header, index, [read(chunk["texts"])[0]["rows"] for chunk in header["chunks"]]


def test_packed_tables_equal_those_by_hand(tmp_path):
    tables = [
        table(10, sample("b", score=0.5, components={"acc": 0.5}, data_source="sums", finish="length")),
        table(0, sample("a", failure="boom", ground_truth=[2, None]), name="test/generations"),
    ]
    header, index, chunks = packed(tables, tmp_path)
    assert header["names"] == {
        "table": ["test/generations", "validation/generations"],
        "problem": ["a", "b"],
        "source": ["default", "sums"],
        "finish": ["stop", "length"],
        "failure": ["", "boom"],
    }
    assert (header["parts"], header["prompts"]) == (["acc"], ["1+1=", "1+1="])
    np.testing.assert_array_equal(index.pop("part0"), [math.nan, 0.5])
    assert header["recorded"] == 2
    assert {name: values.tolist() for name, values in index.items() if name != "score"} == {
        "step": [0, 10], "table": [0, 1], "problem": [0, 1], "version": [4, 4], "source": [0, 1], "finish": [0, 1],
        "failure": [1, 0],
    }  # fmt: skip
    np.testing.assert_array_equal(index["score"], [math.nan, 0.5])
    assert chunks == [
        [
            ["1+1=", "2", "[2, null]", "a", "trainer", "boom", [3, 4], {}, []],
            ["1+1=", "2", None, "b", "trainer", None, [3, 4], {"acc": 0.5}, []],
        ]
    ]


def test_only_the_newest_samples_are_kept_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(row_blobs, "CHUNK_SAMPLES", 2)
    monkeypatch.setattr(row_blobs, "CHUNK_CHARACTERS", 50)
    monkeypatch.setattr(row_blobs, "MAX_SAMPLES", 4)
    long = sample("long", output="x" * 60)
    header, index, chunks = packed([table(1, sample(), sample()), table(2, long, sample(), sample())], tmp_path)
    assert header["recorded"] == 5
    assert index["step"].tolist() == [1, 2, 2, 2]
    assert [chunk["first"] for chunk in header["chunks"]] == [0, 2]
    assert [len(rows) for rows in chunks] == [2, 2]


def test_no_tables_have_no_chunks(tmp_path):
    header, index, chunks = packed([], tmp_path)
    assert (header["chunks"], chunks, header["recorded"]) == ([], [], 0)
    assert index
    assert all(len(values) == 0 for values in index.values())


def test_hostile_ones_come_back(tmp_path):
    texts = ["</script><script>alert(1)</script>", "nul\0", "lone \ud800", "\u202eturned"]
    strange = [
        sample(text, input=text, output=text, ground_truth=text, failure=text, source=text, components={text: math.inf},
               policy_version=(-(10**400), 10**400)) for text in texts
    ]  # fmt: skip
    header, index, (rows,) = packed([table(10**400, *strange, name=texts[0])], tmp_path)
    assert (header["names"]["table"], header["names"]["problem"]) == ([texts[0]], texts)
    assert header["names"]["failure"] == ["", *texts]
    assert header["parts"] == texts
    assert [row[:6] for row in rows] == [[text] * 6 for text in texts]
    assert index["step"].tolist() == index["version"].tolist() == [2**31 - 1] * 4


def test_a_sample_has_the_thumbnails_of_its_images(tmp_path):
    pytest.importorskip("PIL")
    digest = ImageStore(tmp_path / "images").put(encode_image(np.full((8, 8, 3), 200, np.uint8)))
    with_images = GenerationSample.from_json(sample(images=(digest, "0" * 64)).to_json())
    _, _, [[shown, bare]] = packed([table(0, with_images, sample())], tmp_path)
    (thumbnail, missing), none = shown[-1], bare[-1]
    assert unpack((tmp_path / thumbnail).read_bytes())[0]["url"].startswith("data:image/jpeg;base64,")
    assert (missing, none) == ("", [])
