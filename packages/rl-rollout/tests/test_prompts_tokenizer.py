import datetime

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.errors import DataError, SettingsError
from rl_rollout.prompts import PromptTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}={% endif %}{% if loud is defined %}!{% endif %}"
)
OLDER = '{"chat_template": "older"}'
VOCABULARY = {"<pad>": 0, "<eos>": 1, **{character: i + 2 for i, character in enumerate("0123456789+=[]! ,.")}}


def save_tokenizer(folder, *, chat_template=TEMPLATE):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def test_messages_become_text_then_the_tokens_that_transformers_gives(tmp_path):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "1+2"}]
    text = tokenizer.render(messages)
    assert text == "[1+2]="
    assert tokenizer.encode([text], add_special_tokens=False) == [[14, 3, 12, 4, 15, 13]]
    direct = tokenizer._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert direct["input_ids"] == [14, 3, 12, 4, 15, 13]
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize("content", ["1+2=", [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]])
def test_a_beginning_of_the_answer_is_continued(tmp_path, content):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    question = {"role": "user", "content": "1+2"}
    begun = [question, {"role": "assistant", "content": content}]
    assert tokenizer.render(begun) == "[1+2][1+2="
    assert tokenizer.render([*begun, question]) == f"[1+2][{content}][1+2]="
    assert tokenizer.render(begun, add_generation_prompt=False) == f"[1+2][{content}]"


IMAGE = {"type": "image", "url": "x"}


@pytest.mark.parametrize(
    "fields", [{"content": " "}, {"content": []}, {"content": [IMAGE]}, {"content": "1", "tool_calls": [{}]}, {}]
)
def test_an_assistants_message_without_text_at_the_end_names_the_row(tmp_path, fields):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", **fields}]
    with pytest.raises(DataError, match=r"f, row 3: the messages end with an assistant's message that has no text"):
        tokenizer.render(messages, where="f, row 3")


def test_template_options_and_a_given_template(tmp_path):
    folder = save_tokenizer(tmp_path, chat_template=None)
    messages = [{"role": "user", "content": "1"}]
    assert (
        PromptTokenizer.load(folder, chat_template=TEMPLATE, template_options={"loud": True}).render(messages)
        == "[1]=!"
    )
    bare = PromptTokenizer.load(folder)
    assert not bare.has_chat_template
    with pytest.raises(DataError, match=r"f, row 3: .* no chat template"):
        bare.render(messages, where="f, row 3")


def test_the_template_of_an_older_processor_is_used_if_the_tokenizer_has_none(tmp_path):
    messages = [{"role": "user", "content": "1"}]
    (save_tokenizer(tmp_path / "none", chat_template=None) / "chat_template.json").write_text(OLDER)
    tokenizer = PromptTokenizer.load(tmp_path / "none")
    assert tokenizer.render(messages) == tokenizer.wrapped.apply_chat_template(messages, tokenize=False) == "older"

    (save_tokenizer(tmp_path / "own") / "chat_template.json").write_text(OLDER)
    assert PromptTokenizer.load(tmp_path / "own").render(messages) == "[1]="

    (tmp_path / "none" / "chat_template.json").write_text('{"chat_template": ["older"]}')
    with pytest.raises(SettingsError, match=r"chat_template.json must have chat_template as a text; found list"):
        PromptTokenizer.load(tmp_path / "none")


def test_a_template_prints_the_date_that_it_is_given(tmp_path):
    folder = save_tokenizer(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }} " + TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    first = PromptTokenizer.load(folder, date=datetime.date(2024, 7, 26))
    later = PromptTokenizer.load(folder, date=datetime.date(2024, 7, 27))
    assert first.render(messages).startswith("26 Jul 2024 ")
    assert later.render(messages).startswith("27 Jul 2024 ")
    assert first.fingerprint == {**later.fingerprint, "date": "2024-07-26"}
    today = datetime.date.today().strftime("%d %b %Y")
    assert PromptTokenizer.load(folder).render(messages).startswith(today)
    assert "date" not in PromptTokenizer.load(folder, chat_template=TEMPLATE).fingerprint


@pytest.mark.parametrize(
    "part",
    [
        *("{{ [1, 2] | random }}", "{{[1,2]|random}}", "{{ lipsum() }}", "{% for i in x|random %}{% endfor %}"),
        *("{{ [[1,2]]|map('random')|list }}", "{% filter random %}ab{% endfilter %}"),
    ],
)
def test_a_template_that_draws_is_refused(tmp_path, part):
    with pytest.raises(SettingsError, match=r"chat template of .* would render a prompt differently each time"):
        PromptTokenizer.load(save_tokenizer(tmp_path, chat_template=part + TEMPLATE))
    PromptTokenizer.load(save_tokenizer(tmp_path, chat_template="be random {# |random #}" + TEMPLATE))


def test_a_template_that_refuses_names_the_row(tmp_path):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    with pytest.raises(DataError, match=r"f, row 3: the chat template refuses the messages .*no system role"):
        tokenizer.render([{"role": "system", "content": "1"}], where="f, row 3")


def test_decode_leaves_special_tokens_out_and_spaces_alone(tmp_path):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    sequences = [np.array([3, 17, 19, 1], dtype=np.int32), np.array([], dtype=np.int32)]
    assert tokenizer.decode(sequences) == ["1 .", ""]
    assert tokenizer.decode([]) == []


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="absent is not a folder"):
        PromptTokenizer.load(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # transformers would create one
    with pytest.raises(SettingsError, match=r"has no tokenizer; expected one of tokenizer\.json"):
        PromptTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SettingsError, match="transformers cannot load the tokenizer"):
        PromptTokenizer.load(tmp_path)


def test_special_tokens_are_kept_where_asked_for(tmp_path):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path))
    ids = [np.array([3, 1, 4], dtype=np.int32)]
    assert tokenizer.decode(ids) == ["12"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == ["1<eos>2"]
    assert tokenizer.special_tokens == ("<eos>", "<pad>")
    assert tokenizer.token_id("<eos>") == 1
    assert tokenizer.token_id("<|im_end|>") is None


def test_a_template_gets_tools_and_may_leave_out_the_generation_prompt(tmp_path):
    template = "{{ tools | length if tools else 'no tools' }}" + TEMPLATE
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path, chat_template=template))
    messages = [{"role": "user", "content": "1"}]
    assert tokenizer.render(messages) == "no tools[1]="
    assert tokenizer.render(messages, tools=[{"type": "function"}], add_generation_prompt=False) == "1[1]"


def test_what_a_template_writes_can_be_encoded(tmp_path):
    tokenizer = PromptTokenizer.load(save_tokenizer(tmp_path, chat_template=r"{{ '\ud800' }}{{ messages[0].role }}"))
    text = tokenizer.render([{"role": "\udfff", "content": "1"}])
    assert text == r"\ud800\udfff"
    assert tokenizer.encode([text], add_special_tokens=False)
