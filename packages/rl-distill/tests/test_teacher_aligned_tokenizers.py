"""Alignment with real kinds of tokenizers: two byte-level ones of different sizes, and SentencePiece."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_core.data.row_keys import RowKey
from rl_distill.teacher.aligned import END, TeacherAligner, read_pieces
from rl_distill.teacher.scores import TeacherRow

TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "Größe: 5 €, naïve — 你好 😀 12345",
    "the cat sat on the mat",
] * 4
UNSEEN = "  the größte cat 😀😀 returned 67 € to 你们\n\tand  left"


def trained(folder, *, size, kind):
    folder.mkdir()
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
        alphabet = []
    octets = [f"<0x{octet:02X}>" for octet in range(256)] if kind == "pieces" else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<end>", *octets], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:2]  # bytes are ordinary tokens of the model
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_pieces_of_a_text_are_its_bytes_and_every_token_is_in_a_span(tmp_path, kind):
    student = trained(tmp_path / "student", size=300, kind="byte_level")
    teacher = trained(tmp_path / "teacher", size=700, kind=kind)
    own, other = read_pieces(tmp_path / "student", end_ids=[1]), read_pieces(tmp_path / "teacher", end_ids=[1])
    ids = student.encode(UNSEEN, add_special_tokens=False).ids
    assert b"".join(own.pieces[token] for token in ids) == UNSEEN.encode()

    encode = lambda texts: [one.ids for one in teacher.encode_batch(list(texts), add_special_tokens=False)]
    ids = [*student.encode("the cat").ids, *ids, 1]
    mask = np.arange(len(ids)) >= len(student.encode("the cat").ids)
    row = TeacherRow(key=RowKey("p", 0, 0), input_ids=np.asarray(ids, dtype=np.int32), loss_mask=mask)
    asked = TeacherAligner(own, other, encode, mode="sampled").to_teacher(row)
    assert asked.row.loss_mask.sum() > 10
    found = np.concatenate([np.arange(first, stop) for first, stop, _, _ in asked.spans])
    assert found.tolist() == np.flatnonzero(mask).tolist()
    for first, stop, other_first, other_stop in asked.spans.tolist():
        text = [own.pieces[token] for token in ids[first:stop]]
        teachers = [other.pieces[token] for token in asked.row.input_ids[other_first:other_stop].tolist()]
        assert text == teachers == [END] or b"".join(text).strip() == b"".join(teachers).strip()
