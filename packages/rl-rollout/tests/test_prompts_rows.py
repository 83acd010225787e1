import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.errors import DataError
from rl_rollout.prompts import open_rows

ROWS = [
    {
        "prompt": [{"role": "user", "content": "1+2?"}],
        "reward_model": {"ground_truth": "3"},
        "extra_info": {"index": 0},
    },
    {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": 1},
    },
]


def test_the_three_kinds_of_file_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a")
    for name in ("a.jsonl", "a.parquet", "a"):
        rows = open_rows(tmp_path / name)
        assert list(rows) == ROWS, name
        assert [rows[1], rows[0]] == [ROWS[1], ROWS[0]], name
        assert len(rows) == 2


def test_locations_count_from_one_and_jsonl_counts_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "x"}\n\n{"prompt": "y"}\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.jsonl")
    assert [rows.locate(row) for row in range(len(rows))] == [
        f"{tmp_path}/a.jsonl, line 2",
        f"{tmp_path}/a.jsonl, line 4",
    ]
    assert open_rows(tmp_path / "a.parquet").locate(0) == f"{tmp_path}/a.parquet, row 1"


def test_jsonl_keeps_line_separators_inside_strings_and_skips_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert list(open_rows(tmp_path / "a.jsonl")) == [{"prompt": "a\u2028b"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl, line 2, column 12: not JSON \(Expecting value\)"),
        (b'{"prompt": "x"}\n[1]\n', r"a\.jsonl, line 2: expected a JSON object, found list"),
        (b'{"prompt": NaN}\n', r"line 1: not JSON \(NaN is not a JSON value\)"),
        (b'{"prompt": "\xff"}\n', r"line 1: not UTF-8"),
        (b"\n\n", r"has no rows"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path / "a.jsonl")


def test_missing_unknown_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.parquet does not exist"):
        open_rows(tmp_path / "none.parquet")
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"unknown extension '\.csv'; expected \.parquet or \.jsonl"):
        open_rows(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet cannot be used: Parquet magic bytes not found"):
        open_rows(tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet has no rows"):
        open_rows(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"no state\.json"):
        open_rows(tmp_path)


def test_a_saved_dict_of_splits_asks_for_one(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"holds several splits: test, train\. Give one, such as .*both/test"):
        open_rows(tmp_path / "both")
    assert list(open_rows(tmp_path / "both" / "train")) == ROWS


def test_a_damaged_dataset_folder_is_refused(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a")
    (tmp_path / "a" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json must list 1 to 4096 files"):
        open_rows(tmp_path / "a")


def test_parquet_texts_that_are_not_utf8_are_refused_by_the_files_name(tmp_path):
    values = pa.array([b"ok", b"\xed\xa0\x80"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 2, values.buffers())
    file = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": texts}), file)
    with pytest.raises(DataError, match=r"odd\.parquet cannot be used: In column 1: Invalid: Invalid UTF8"):
        open_rows(file)
