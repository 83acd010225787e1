"""Vocabularies of student and teacher: when they count as equal, and the error otherwise."""

import json

import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_distill.teacher import vocabulary
from rl_distill.teacher.vocabulary import check_same_vocabulary, compare_vocabularies, read_vocabulary

TOKENS = {"a": 0, "b": 1, "ab": 2, "\u0120a": 3}
END = {"id": 4, "content": "<end>", "special": True}


def document(tokens=None, *, added=(END,), merges=("a b",), **parts):
    model = {"type": "BPE", "vocab": TOKENS if tokens is None else tokens, "merges": list(merges)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    return {"added_tokens": list(added), "normalizer": None, "pre_tokenizer": byte_level, "model": model, **parts}


@pytest.fixture
def folder(tmp_path):
    def make(name, content):
        (tmp_path / name).mkdir()
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / name / "tokenizer.json").write_bytes(raw)
        return tmp_path / name

    return make


def test_equal_tokenizers_are_the_same(folder):
    difference = compare_vocabularies(folder("student", document()), folder("teacher", document()))
    assert difference.is_same
    assert difference.num_ids == 5
    assert difference.described() == ""


def test_padded_rows_of_an_embedding_do_not_count(folder):
    student, teacher = folder("student", document()), folder("teacher", document())
    (student / "config.json").write_text('{"vocab_size": 64}')
    (teacher / "config.json").write_text('{"vocab_size": 128}')
    assert refusal(check_same_vocabulary, student, teacher, teacher_name="big") is None


def test_more_tokens_in_the_teacher_are_no_difference(folder):
    more = document(added=(END, {"id": 9, "content": "<tool>"}))
    difference = compare_vocabularies(folder("student", document()), folder("teacher", more))
    assert difference.is_same
    assert difference.only_in_teacher == ("<tool>",)


def test_a_refusal_names_the_teacher_the_ids_and_what_to_do(folder):
    other = document({"a": 0, "c": 1, "ab": 2, "\u0120a": 3}, added=())
    student, teacher = folder("student", document()), folder("teacher", other)
    with pytest.raises(SettingsError) as caught:
        check_same_vocabulary(student, teacher, teacher_name="big")
    text = str(caught.value)
    assert text.startswith("distillation.teachers.big must have the student's vocabulary")
    assert "2 of 5 ids differ (id 1: student 'b', teacher 'c', id 4: student '<end>', teacher none)" in text
    assert "2 tokens are only in the student ('b', '<end>')" in text
    assert "1 tokens are only in the teacher ('c')" in text
    assert str(student) in text
    assert str(teacher) in text
    assert 'distillation.other_tokenizer = "align"' in text


def test_only_the_first_several_are_shown(folder):
    tokens = {f"t{index}": index for index in range(1000)}
    moved = {f"t{index}": (index + 1) % 1000 for index in range(1000)}
    difference = compare_vocabularies(folder("s", document(tokens)), folder("t", document(moved)))
    assert len(difference.different) == 999  # both have <end> at id 4
    assert difference.described().startswith("999 of 1000 ids differ (id 0: student 't0', teacher 't999', id 1: ")
    assert difference.described().count("id ") == 5
    assert len(difference.described()) < 500


def test_tokens_at_other_ids_are_in_both(folder):
    swapped = {"b": 0, "a": 1, "ab": 2, "\u0120a": 3}
    difference = compare_vocabularies(folder("s", document()), folder("t", document(swapped)))
    assert [index for index, _, _ in difference.different] == [0, 1]
    assert difference.only_in_student == difference.only_in_teacher == ()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"merges": ("b a",)}, "merges differ (1 and 1; at number 0: student 'a b', teacher 'b a')"),
        ({"merges": ("a b", "b b")}, "at number 1: student none, teacher 'b b'"),
        ({"normalizer": {"type": "NFC"}}, "normalizer differs (student None, teacher {'type': 'NFC'})"),
        ({"pre_tokenizer": None}, "pre_tokenizer differs"),
    ],
)
def test_rules_that_give_other_ids_for_a_text_are_a_difference(folder, changed, words):
    with pytest.raises(SettingsError) as caught:
        check_same_vocabulary(folder("s", document()), folder("t", document(**changed)), teacher_name="big")
    assert words in str(caught.value)


def test_scores_of_unigram_pieces_are_a_difference(folder):
    one, two = ({**document(), "model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", s]]}} for s in (-2.0, -3.0))
    difference = compare_vocabularies(folder("s", one), folder("t", two))
    assert difference.different == ()
    assert not difference.is_same
    assert "scores differ (2 and 2; at number 1: student -2.0, teacher -3.0)" in difference.described()


def test_files_that_say_the_same_in_other_ways_are_the_same(folder):
    newer = document(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
    newer["model"] |= {"merges": [["a", "b"]], "byte_fallback": False, "unk_token": None, "ignore_merges": False}
    newer["post_processor"] = {"type": "TemplateProcessing"}
    newer["truncation"] = {"max_length": 8}
    assert compare_vocabularies(folder("s", document()), folder("t", newer)).is_same


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"add_prefix_space": True}, {"prepend_scheme": "always", "split": True}),
        ({"add_prefix_space": False, "str_rep": "\u2581"}, {"prepend_scheme": "never", "split": True}),
    ],
)
def test_both_forms_of_a_metaspace_are_the_same(folder, older, newer):
    one, two = (
        document(pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", **form}) for form in (older, newer)
    )
    assert compare_vocabularies(folder("s", one), folder("t", two)).is_same


def test_a_folder_without_tokenizer_json_is_told_how_to_make_one(folder, tmp_path):
    with pytest.raises(SettingsError, match=r"tokenizer\.json is missing.*save_pretrained"):
        check_same_vocabulary(folder("s", document()), tmp_path, teacher_name="big")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "must be JSON"),
        (b"[]", "must be a JSON object; found list"),
        (b"\xff\xfe\xff", "must be JSON"),
        (b"[" * 200_000, "must be JSON"),
        ({"model": {}}, "not a supported tokenizer (KeyError: 'vocab')"),
        ({"model": {"vocab": {"a": "0"}}}, "whole number from 0 to 16777215; found '0'"),
        ({"model": {"vocab": {"a": True}}}, "found True"),
        ({"model": {"vocab": {"a": -1}}}, "found -1"),
        ({"model": {"vocab": {"a": 0, "b": 0}}}, "has two tokens with one id"),
        ({"model": {"vocab": 3}}, "not a supported tokenizer"),
        ({"model": {"vocab": [["a"]]}}, "not a supported tokenizer"),
        (document(added=("x",)), "not a supported tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(folder, content, words):
    with pytest.raises(SettingsError) as caught:
        read_vocabulary(folder("s", content))
    assert words in str(caught.value)


def test_a_file_of_too_much_is_refused_before_it_is_parsed(folder, monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_VALUES", 10)
    with pytest.raises(SettingsError, match="the limit is 10"):
        read_vocabulary(folder("s", document()))
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 50)
    with pytest.raises(SettingsError, match="at most 50 bytes"):
        read_vocabulary(folder("t", document()))


def test_an_added_token_takes_the_place_of_a_models(folder):
    found = read_vocabulary(folder("s", document(added=({"id": 1, "content": "<pad>"},))))
    assert dict(found.tokens) == {0: "a", 1: "<pad>", 2: "ab", 3: "\u0120a"}
    assert found.added == {1}
