"""Hostile prompt files and tokenizers: bounds, trials in a child process, and errors that name the file."""

import json
import os
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.errors import DataError, SettingsError
from rl_rollout.prompts import PromptTokenizer, open_rows
from rl_rollout.prompts.within import call_within

PIPES = """
import sys
from pathlib import Path
from rl_core.errors import RLError
from rl_rollout.prompts import PromptTokenizer, open_rows
for read in (open_rows, lambda path: PromptTokenizer.load(path.parent)):
    try:
        read(Path(sys.argv[1]))
    except RLError as error:
        assert "must be a regular file" in str(error), error
    else:
        raise SystemExit("nothing was refused")
"""


def save_tokenizer(folder, *, pattern=".", chat_template=None):
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rl_core.files.trials.BASE_CPU_S", 1)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 9999999999 }}",
    ],
)
def test_a_template_that_never_ends_is_refused_when_it_is_loaded(tmp_path, template):
    folder = save_tokenizer(tmp_path / "model", chat_template=template)
    with pytest.raises(SettingsError, match=r"tokenizer.json cannot be used: .*(CPU time|more memory)"):
        PromptTokenizer.load(folder)


def test_a_template_that_loops_for_some_messages_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_rollout.prompts.tokenizer.DEADLINE_S", 0.5)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'x' %}" + loop + "{% endif %}fine"
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path / "model", chat_template=template))
    with pytest.raises(DataError, match=r"f, row 3: the chat template took longer than 0.5 s"):
        tokenizer.render([{"role": "user", "content": "x"}], where="f, row 3")
    assert tokenizer.render([{"role": "user", "content": "y"}]) == "fine"


def test_a_tokenizer_whose_expression_explodes_is_refused(tmp_path):
    folder = save_tokenizer(tmp_path / "model", pattern="(a|a|aa)+$")
    with pytest.raises(SettingsError, match=r"tokenizer.json cannot be used: .*(PanicException|processor time)"):
        PromptTokenizer.load(folder)


def test_a_panic_of_a_library_is_an_error_of_ours():
    class Panic(BaseException):
        pass

    def panic():
        raise Panic("index out of bounds")

    with pytest.raises(DataError, match=r"the tokenizer of m failed \(Panic: index out of bounds\)"):
        call_within(60, panic, what="the tokenizer of m", error=DataError)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "[" * 200_000),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer.json", "[" + "[]," * (1 << 23) + "[]]"),
        ("tokenizer.json", "{"),
    ],
)
def test_files_of_a_tokenizer_that_are_none_are_refused(tmp_path, name, content):
    folder = save_tokenizer(tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(SettingsError, match=str(folder)):
        PromptTokenizer.load(folder)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_pipes_are_refused_at_once(tmp_path, name):
    save_tokenizer(tmp_path)
    os.mkfifo(tmp_path / name)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    subprocess.run([sys.executable, "-c", PIPES, tmp_path / name], check=True, timeout=120)


def many_rows(path):
    pq.write_table(pa.table({"prompt": pa.array(np.zeros(17_000_000, dtype=bool))}), path)


def a_large_cell(path):
    pq.write_table(pa.table({"prompt": pa.array(["a" * 100_000_000])}), path, compression="zstd")


def many_nulls(path):
    pq.write_table(pa.table({"prompt": pa.array([[None] * 20_000_000], pa.list_(pa.null()))}), path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (many_rows, "it has more than 16777216 rows"),
        (a_large_cell, "it has more than 67108864 bytes in a cell"),
        (many_nulls, "more than 16777216 values"),
    ],
)
def test_parquet_files_that_grow_when_they_are_read_are_refused(tmp_path, write, message):
    write(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 3_000_000
    with pytest.raises(DataError, match=f"a.parquet cannot be used: .*{message}"):
        open_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize("line", ["[" * 200_000, '{"a": [' + "1," * (1 << 20) + "1]}", '{"a": ' + "9" * 5000 + "}"])
def test_lines_that_no_row_has_are_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        open_rows(tmp_path / "a.jsonl")


@pytest.mark.parametrize("state", ["[]", '{"_data_files": 5}', '{"_data_files": [{"filename": "../a.arrow"}]}'])
def test_a_saved_dataset_that_names_files_elsewhere_is_refused(tmp_path, state):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        open_rows(tmp_path / "set")


def test_a_saved_dataset_with_offsets_below_zero_is_refused(tmp_path):
    offsets = pa.array([0, -(1 << 30), 1], pa.int32()).buffers()[1]
    texts = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"x"))
    table = pa.table({"prompt": texts})
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(DataError, match=r"a\.arrow cannot be used: .*offset"):
        open_rows(tmp_path)


def test_a_file_that_passed_is_not_tried_again(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist([{"prompt": "x"}]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "x"}))
    assert list(open_rows(tmp_path / "a.parquet")) == [{"prompt": "x"}]
    monkeypatch.setattr("rl_core.files.trials._problem", lambda *_, **__: "it was tried again")
    assert list(open_rows(tmp_path / "a.parquet")) == [{"prompt": "x"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": "y"}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="it was tried again"):
        open_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
@pytest.mark.parametrize(
    "values", [pa.array([2**30], pa.date32()), pa.array([1], pa.timestamp("s", tz="No/Where"))], ids=["date", "zone"]
)
def test_a_value_that_python_does_not_have_is_refused_by_the_files_name(tmp_path, values, name):
    table, path = pa.table({"prompt": ["a"], "when": values}), tmp_path / name
    if path.suffix:
        pq.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    rows = open_rows(path)
    for read in (lambda: rows[0], lambda: list(rows)):
        with pytest.raises(DataError, match=f"{name}: a row has a value that cannot be read"):
            read()


@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers"])
def test_a_tokenizer_beside_a_configuration_of_endless_lists_is_refused(tmp_path, name):
    folder = save_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", name: 10**9}))
    with pytest.raises(SettingsError, match=rf"config.json must have {name} from 0"):
        PromptTokenizer.load(folder)
