import json

import numpy as np
import pytest

from rl_core.errors import DataError, SettingsError
from rl_rollout.prompts import PromptOptions, PromptTokenizer, load_prompts


class CharacterTokenizer:
    """Encodes each character as a token, with begin token 0 before plain text; has only what PromptTokenizer calls."""

    def __init__(self, chat_template="[...]="):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, *, chat_template, tools, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"[{message['content']}]" for message in messages) + "="

    def __call__(self, texts, *, add_special_tokens, return_attention_mask):
        begin = [0] if add_special_tokens else []
        return {"input_ids": [begin + [ord(character) for character in text] for text in texts]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(*files, chat_template="[...]=", **options):
    tokenizer = PromptTokenizer(CharacterTokenizer(chat_template))
    return load_prompts(files, tokenizer, PromptOptions(**{"max_tokens": 8, **options}))


def text_of(prompt):
    return "".join(map(chr, prompt.input_ids.tolist()))


@pytest.fixture
def mixed(tmp_path):
    chat = {"prompt": [{"role": "user", "content": "1+2"}], "answer": "3", "data_source": "chat", "level": 9}
    return write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "2"}, chat])


def test_both_schemas_in_one_file_and_every_column_arrives(mixed):
    plain, chat = load(mixed)
    assert text_of(plain) == "\x001+1="
    assert text_of(chat) == "[1+2]="
    assert plain.input_ids.dtype == np.int32
    assert (plain.messages, plain.data_source, plain.ground_truth) == ((), "default", "2")
    assert (chat.messages, chat.data_source) == (({"role": "user", "content": "1+2"},), "chat")
    assert chat.columns["level"] == 9


def test_plain_prompts_as_a_users_message(mixed):
    plain, _ = load(mixed, plain_prompts="chat")
    assert text_of(plain) == "[1+1=]="
    assert plain.messages == ({"role": "user", "content": "1+1="},)


def test_messages_need_a_template_and_plain_prompts_do_not(tmp_path, mixed):
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, field `prompt`: .* no chat template"):
        load(mixed, chat_template=None)
    assert len(load(write(tmp_path / "b.jsonl", [{"prompt": "1", "answer": "1"}]), chat_template=None)) == 1


def test_uids_are_distinct_stable_and_count_rows_across_files(tmp_path):
    row = {"prompt": "1", "answer": "1"}
    a, b = write(tmp_path / "a.jsonl", [row, row]), write(tmp_path / "b.jsonl", [row])
    uids = load(a, b).uids
    assert [uid.split("-")[1] for uid in uids] == ["0", "1", "2"]
    assert len({uid.split("-")[0] for uid in uids}) == 1
    assert load(a, b).uids == uids


def test_too_long_is_an_error_or_a_counted_drop(tmp_path):
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "12345678", "answer": "1"}, {"prompt": "2", "answer": "1"}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, field `prompt`: 9 tokens, more than max_tokens = 8"):
        load(path)
    kept = load(path, overlong="drop")
    assert (len(kept), kept.num_dropped) == (2, 1)
    assert [prompt.columns["prompt"] for prompt in kept] == ["1", "2"]
    assert kept.uids[1].endswith("-2")
    with pytest.raises(DataError, match=r"all 3 rows .* longer than max_tokens = 1"):
        load(path, overlong="drop", max_tokens=1)


def test_a_bad_row_late_in_the_file_is_found_when_loading(tmp_path):
    rows = [{"prompt": "1", "answer": "1"}] * 2000 + [{"prompt": "1"}]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2001, field `answer`: missing"):
        load(write(tmp_path / "a.jsonl", rows))


def test_fingerprint_follows_content(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "1", "answer": "2"}])
    assert load(a).fingerprint == load(a).fingerprint
    assert len({load(a).fingerprint, load(b).fingerprint, load(a, a).fingerprint}) == 3
    assert load(b, plain_prompts="chat").fingerprint != load(b).fingerprint


def test_impossible_options_are_refused():
    with pytest.raises(
        SettingsError, match="max_tokens of PromptOptions must be a whole number of at least 1; found 0"
    ):
        PromptOptions(max_tokens=0)
    with pytest.raises(SettingsError, match="no prompt file"):
        load()


def test_an_index_out_of_range_is_refused(mixed):
    prompts = load(mixed)
    with pytest.raises(IndexError, match="prompt index 2"):
        prompts[2]
