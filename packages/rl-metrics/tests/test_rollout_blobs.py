import base64
import math

import numpy as np
import pytest
from read_report import unpack

from rl_core.data import ImageSpan
from rl_core.images import ImageStore, encode_image, open_image
from rl_metrics.report import row_blobs
from rl_metrics.report.packing import folder_blobs
from rl_metrics.report.row_blobs import pack_rollouts
from rl_metrics.run_files.rollout_log import RolloutRow


def row(**more):
    of = {"step": 3, "time": 5.0, "prompt_uid": "u", "problem": "p", "prompt": "1+1=", "response": "2"}
    return RolloutRow(**(of | more))


def packed(rows, folder, num_recorded=None):
    images = ImageStore(folder / "images")
    name = pack_rollouts(rows, folder_blobs(folder, set()), images=images, num_recorded=num_recorded)
    read = lambda name: unpack((folder / name).read_bytes())
    header, index = read(name)
    return header, index, [(read(chunk["texts"])[0]["rows"], *read(chunk["tokens"])) for chunk in header["chunks"]]


def test_the_index_equals_one_by_hand(tmp_path):
    whole = row(
        reward=0.5,
        timings={"generate_s": 1.5, "reward_s": 0.25, "preemptions": 4},
        policy_version=7,
        tokens=("a", "b", "c"),
        mask=(True, False, True),
        columns={
            "versions": (6, -1, 7),
            "rollout_logprobs": (math.log(0.5), 0.0, math.log(0.25)),
            "policy_logprobs": (math.log(0.25), 0.0, math.log(0.5)),
            "entropy": (1.0, 0.0, math.nan),
            "advantages": (2.0, 0.0, 4.0),
        },
    )
    bare = row(step=4, reward=math.nan, source="other", problem="q", finish="length", failure="boom")
    header, index, _ = packed([whole, bare], tmp_path, num_recorded=9)
    assert header["recorded"] == 9
    assert header["names"] == {
        "source": ["default", "other"],
        "problem": ["p", "q"],
        "finish": ["stop", "length"],
        "failure": ["", "boom"],
    }
    first = {name: values[0].item() for name, values in index.items()}
    assert first == pytest.approx(
        {
            "step": 3, "reward": 0.5, "length": 3, "source": 0, "problem": 0, "finish": 0, "failure": 0, "version": 7,
            "staleness": 1, "mismatch": 0.25, "entropy": 1.0, "advantage": 3.0, "seconds": 1.75,
        },
        rel=1e-4,
    )  # fmt: skip
    second = {name: values[1].item() for name, values in index.items()}
    assert (second["step"], second["source"], second["problem"], second["finish"], second["failure"]) == (4, 1, 1, 1, 1)
    assert (second["length"], second["staleness"], second["seconds"]) == (0, -1, 0)
    assert all(math.isnan(second[name]) for name in ("reward", "mismatch", "entropy", "advantage"))


def test_texts_and_tokens_come_back(tmp_path):
    texts = ["</script><script>alert(1)</script>", "nul\0", "lone \ud800", "\u202eturned", "<img onerror=x>"]
    rows = [
        row(prompt=text, response=text, ground_truth=text, failure=text, components={text: 1.0}, tokens=(text, "x"),
                extras={text: [1]},
            mask=(True, False), columns={"token_ids": (5, 6), "entropy": (0.125, math.nan)})
        for text in texts
    ]  # fmt: skip
    _, _, ((text_rows, tokens_header, columns),) = packed(rows, tmp_path)
    assert [found[:4] for found in text_rows] == [[text, text, text, "u"] for text in texts]
    assert [found[7:] for found in text_rows] == [[text, {text: 1.0}, {}, {text: [1]}, [], []] for text in texts]
    assert [tokens_header["tokens"][code] for code in columns["codes"]] == [t for text in texts for t in (text, "x")]
    assert [tokens_header["ids"][code] for code in columns["codes"]] == [5, 6] * 5
    assert columns["lengths"].tolist() == [2] * 5
    assert columns["mask"].tolist() == [1, 0] * 5
    assert columns["entropy"][::2].tolist() == [0.125] * 5
    assert np.isnan(columns["entropy"][1::2]).all()
    assert "advantages" not in columns  # no trajectory has them
    assert "versions" not in columns


def test_a_column_that_some_trajectories_lack(tmp_path):
    with_it = row(tokens=("a",), mask=(True,), columns={"advantages": (2.0,)})
    _, _, ((_, _, columns),) = packed([row(tokens=("b",), mask=(True,)), with_it], tmp_path)
    assert math.isnan(columns["advantages"][0])
    assert columns["advantages"][1] == 2.0


def test_chunks_end_by_rows_tokens_and_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(row_blobs, "CHUNK_ROWS", 3)
    monkeypatch.setattr(row_blobs, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(row_blobs, "CHUNK_CHARACTERS", 100)
    short = row(tokens=("a",), mask=(True,))
    long = row(tokens=("a",) * 4, mask=(True,) * 4)
    wordy = row(response="x" * 100)
    header, index, chunks = packed([short, short, short, long, wordy, short], tmp_path)
    assert [chunk["first"] for chunk in header["chunks"]] == [0, 3, 4, 5]
    assert [len(texts) for texts, _, _ in chunks] == [3, 1, 1, 1]
    assert index["length"].tolist() == [1, 1, 1, 4, 0, 1]
    assert index["step"].tolist() == [3] * 6


def test_no_rows_have_no_chunks(tmp_path):
    header, index, chunks = packed([], tmp_path)
    assert (header["chunks"], chunks) == ([], [])
    assert index
    assert all(len(values) == 0 for values in index.values())


def test_names_for_filters_are_cut_and_texts_are_not(tmp_path):
    header, _, ((texts, _, _),) = packed([row(failure="f" * 5000)], tmp_path)
    (_, failure) = header["names"]["failure"]
    assert failure.startswith("f" * 200 + "…")
    assert len(failure) < 220
    assert texts[0][7] == "f" * 5000


def test_hostile_numbers_are_clamped_or_nan(tmp_path):
    strange = row(step=2**60, policy_version=-(2**60), reward=math.inf, tokens=("a",), mask=(True,),
                  columns={"token_ids": (1e300,), "versions": (math.inf,), "rollout_logprobs": (900.0,),
                           "policy_logprobs": (-math.inf,)}, timings={"generate_s": math.nan})  # fmt: skip
    _, index, _ = packed([strange], tmp_path)
    assert index["step"].tolist() == [2**31 - 1]
    assert math.isnan(index["reward"][0])
    assert index["mismatch"].tolist() == [1.0]


def test_the_list_tells_prompts_and_responses(tmp_path):
    template = "You are a careful assistant.\n\nWhat is 1"
    rows = [
        row(problem="a", prompt=f"{template}2 + 3?", response=" 15\n\n(fifteen)"),
        row(problem="b", prompt=f"{template}7 + 3?", response="x" * 100),
        row(problem="a", prompt=f"{template}2 + 3?", response=""),
    ]
    header, _, _ = packed(rows, tmp_path)
    assert header["prompts"] == ["…12 + 3?", "…17 + 3?"]
    assert header["responses"] == ["15 (fifteen)", "x" * 80 + "…", ""]


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        (["What is 1 + 1?", "What is 1 + 2?"], ["What is 1 + 1?", "What is 1 + 2?"]),  # too short for a common template
        (["the same all along, all the way"], ["the same all along, all the way"]),
        (["word " * 60, "word " * 60], ["word " * 15 + "word…"] * 2),
        ([], []),
    ],
)
def test_only_a_template_that_all_share_is_left_out(tmp_path, prompts, shown):
    header, _, _ = packed([row(problem=str(n), prompt=prompt) for n, prompt in enumerate(prompts)], tmp_path)
    assert [one.lstrip("…") or shown[0] for one in header["prompts"]] == shown


def test_parts_of_rewards_are_columns(tmp_path):
    rows = [row(components={"acc": 1.0}), row(), row(components={"format": 0.5, "acc": math.nan})]
    header, index, _ = packed(rows, tmp_path)
    assert header["parts"] == ["acc", "format"]
    np.testing.assert_array_equal(index["part0"], [1.0, math.nan, math.nan])
    np.testing.assert_array_equal(index["part1"], [math.nan, math.nan, 0.5])


def test_very_many_parts_of_rewards(tmp_path):
    header, index, ((texts, _, _),) = packed([row(components={f"part {n}": n for n in range(100)})], tmp_path)
    assert header["parts"] == [f"part {n}" for n in range(16)]
    assert len(texts[0][8]) == 100
    assert "part16" not in index


def test_long_names_that_begin_alike_are_told_apart(tmp_path):
    names = ["same " * 60 + end for end in ("one", "two", "one", "\ud800")]
    rows = [row(problem=name, components={name: 1.0}) for name in names]
    header, index, _ = packed(rows, tmp_path)
    assert index["problem"].tolist() == [0, 1, 0, 2]
    assert len(set(header["names"]["problem"])) == len(set(header["parts"])) == 3
    assert max(map(len, header["names"]["problem"])) < 220


def test_whole_numbers_are_kept_as_they_are(tmp_path):
    _, index, _ = packed([row(reward=reward) for reward in (123462.0, math.nan, 2.0**24 + 1)], tmp_path)
    np.testing.assert_array_equal(index["reward"], [123462.0, math.nan, 2.0**24 + 1])


@pytest.mark.parametrize(
    ("prompt", "response", "asked", "answered"),
    [
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7?<|im_end|>\n",
            "<think>\nsix times seven\n</think>\n42<|im_end|>",
            "What is 6*7?",
            "42",
        ),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "Hello<|eot_id|>",
            "Hi",
            "Hello",
        ),
        ("<s>[INST] Hi [/INST]", "Hello</s>", "Hi", "Hello</s>"),
        ("<|im_end|>", "<think></think>", "<|im_end|>", "<think></think>"),
    ],
)
def test_the_list_tells_the_last_question_and_the_answer(tmp_path, prompt, response, asked, answered):
    header, _, _ = packed([row(prompt=prompt, response=response)], tmp_path)
    assert (header["prompts"], header["responses"]) == ([asked], [answered])


def test_an_image_of_several_trajectories_is_one_thumbnail(tmp_path):
    pytest.importorskip("PIL")
    store = ImageStore(tmp_path / "images")
    large, small = (
        store.put(encode_image(np.full((height, width, 3), 200, np.uint8))) for height, width in ((300, 600), (8, 8))
    )
    spans = [ImageSpan(digest=digest, start=2, length=4) for digest in (large, "0" * 64, small)]
    _, _, ((rows, _, _),) = packed([row(images=tuple(spans)), row(images=(spans[0],)), row()], tmp_path)
    (first, missing, third), (again,), none = (texts[-1] for texts in rows)
    assert (again, missing, none) == (first, "", [])
    for part, size in ((first, (96, 48)), (third, (8, 8))):
        head, data = unpack((tmp_path / part).read_bytes())[0]["url"].split(",")
        assert (head, open_image(base64.b64decode(data)).size) == ("data:image/jpeg;base64", size)


def test_no_more_than_the_first_images_are_shown(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    monkeypatch.setattr("rl_metrics.report.thumbnails.MAX_THUMBNAILS", 2)
    store = ImageStore(tmp_path / "images")
    digests = [store.put(encode_image(np.full((4, 4, 3), value, np.uint8))) for value in (1, 2, 3)]
    spans = tuple(ImageSpan(digest=digest, start=0, length=1) for digest in digests)
    _, _, ((rows, _, _),) = packed([row(images=spans)], tmp_path)
    assert list(map(bool, rows[0][-1])) == [True, True, False]
