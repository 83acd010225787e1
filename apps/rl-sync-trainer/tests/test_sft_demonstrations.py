"""Rows as token sequences and masks, and the rows that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from sft_rows import TEMPLATE, VOCABULARY, make_chat_tokenizer, said
from tiny_run import make_tiny_policy

from rl_core.errors import DataError
from rl_rollout.prompts import PromptTokenizer
from rl_sync_trainer.sft.demonstrations import read_demonstrations
from rl_sync_trainer.sft.settings import SftSettings
from rl_trainer_parts.settings.sources import load_settings

THINKING = (
    "{% for one in messages %}<{{ one.role }}>"
    "{{ one.content if loop.last or one.role == 'user' else one.content.split('<think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves out the reasoning of earlier turns, like Qwen3's."""

OTHERWISE = TEMPLATE.replace("<assistant>{% endif %}", "<think>{% endif %}")
"""The prompt that the policy answers is no beginning of the conversation with its answer."""

ENDLESS = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
PICTURE = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image"}]}
WEIGHED = {"role": "assistant", "content": "7", "weight": 0}
COLUMNS = ["--sft.columns=['prompt', 'answer']"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tiny_policy(folder, make_chat_tokenizer())
    return folder


def read(
    policy: Path, folder: Path, rows: list[Any], *words: str, template: str = TEMPLATE
) -> list[list[tuple[str, str]]]:
    """Return the runs of tokens of each sequence."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (f"--policy.path={policy}", f"--prompts.train={file}", *words)
    settings = load_settings(None, words, {}, kind=SftSettings)
    assert isinstance(settings, SftSettings)
    batch, num_dropped = read_demonstrations(file, PromptTokenizer(make_chat_tokenizer(template)), settings)
    assert num_dropped == len(rows) - len(batch) if "--prompts.overlong=drop" in words else not num_dropped
    characters = {index: token for token, index in VOCABULARY.items()}
    found = []
    for ids, mask in zip(batch.ragged("input_ids"), batch.ragged("loss_mask"), strict=True):
        runs: list[tuple[str, str]] = []
        for token, is_trained in zip(ids.tolist(), mask.tolist(), strict=True):
            kind = "trained" if is_trained else "context"
            before = runs.pop()[1] if runs and runs[-1][0] == kind else ""
            runs.append((kind, before + characters[token]))
        found.append(runs)
    return found


def test_every_turn_of_the_assistant_is_trained_up_to_its_end_token(policy: Path, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "0"}, *said("1+2=", "3", "4", "5")]
    tool = [*said("1", "2"), {"role": "tool", "content": "7"}, {"role": "assistant", "content": "8"}]
    tools = [{"name": "12"}, {"name": "34"}]
    rows = [{"messages": turns}, {"messages": tool, "tools": tools}, {"messages": tool, "tools": json.dumps(tools)}]
    *found, last = read(policy, tmp_path, rows)
    assert last == found[1]
    assert found == [
        [
            ("context", "<system>0<eos>\n<user>1+2=<eos>\n<assistant>"),
            *(
                ("trained", "3<eos>"),
                ("context", "\n<user>4<eos>\n<assistant>"),
                ("trained", "5<eos>"),
                ("context", "\n"),
            ),
        ],
        [
            ("context", "<tools>12+34<eos><user>1<eos>\n<assistant>"),
            *(
                ("trained", "2<eos>"),
                ("context", "\n<tool>7<eos>\n<assistant>"),
                ("trained", "8<eos>"),
                ("context", "\n"),
            ),
        ],
    ]


def test_a_template_that_changes_earlier_turns_gives_a_sequence_for_each_turn(policy: Path, tmp_path: Path) -> None:
    rows = [{"messages": said("1", "9<think>2", "3", "8<think>4")}]
    assert read(policy, tmp_path, rows, template=THINKING) == [
        [("context", "<user>1<eos><assistant>"), ("trained", "9<think>2<eos>")],
        [("context", "<user>1<eos><assistant>2<eos><user>3<eos><assistant>"), ("trained", "8<think>4<eos>")],
    ]


def test_turns_of_weight_0_are_not_trained(policy: Path, tmp_path: Path) -> None:
    rows = [{"messages": [said("1")[0], WEIGHED, *said("2", "3")]}]
    assert read(policy, tmp_path, rows) == [
        [
            ("context", "<user>1<eos>\n<assistant>7<eos>\n<user>2<eos>\n<assistant>"),
            ("trained", "3<eos>"),
            ("context", "\n"),
        ]
    ]
    assert len(read(policy, tmp_path, rows, template=THINKING)) == 1


@pytest.mark.parametrize(
    ("prompt", "words", "context"),
    [
        ("1+2=", [], "1+2="),
        ("1+2=", ["--prompts.plain_prompts=chat"], "<user>1+2=<eos>\n<assistant>"),
        (said("1", "2", "3"), [], "<user>1<eos>\n<assistant>2<eos>\n<user>3<eos>\n<assistant>"),
    ],
    ids=["raw", "chat", "messages"],
)
def test_of_a_prompt_and_an_answer_only_the_answer_is_trained(
    prompt: Any, words: list[str], context: str, policy: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": prompt, "answer": answer} for answer in ("3", "3<eos>", said("1", "3")[1:])]
    expected = [("context", context), ("trained", "3<eos>")]
    assert read(policy, tmp_path, rows, *COLUMNS, *words) == [expected] * 3
    assert read(policy, tmp_path, rows, *COLUMNS, *words, template=OTHERWISE)[0][-1] == expected[-1]


def test_a_begin_token_precedes_a_raw_prompt_as_in_a_rollout(policy: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<system> $A", special_tokens=[("<system>", VOCABULARY["<system>"])]
    )
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1=", "answer": "2"}\n')
    settings = load_settings(
        None, [f"--policy.path={policy}", f"--prompts.train={file}", *COLUMNS], {}, kind=SftSettings
    )
    assert isinstance(settings, SftSettings)
    (ids,) = read_demonstrations(file, PromptTokenizer(tokenizer), settings)[0].ragged("input_ids")
    assert ids.tolist() == [*tokenizer("1=").input_ids, VOCABULARY["2"], VOCABULARY["<eos>"]]
    assert ids[0] == VOCABULARY["<system>"]


def test_rows_that_are_too_long_are_refused_or_left_out(policy: Path, tmp_path: Path) -> None:
    rows = [{"messages": said("1", "2" * length)} for length in (1, 3)]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: 10 tokens, more than prompts\.max_tokens = 8\. Raise"):
        read(policy, tmp_path, rows, "--prompts.max_tokens=8")
    assert len(read(policy, tmp_path, rows, "--prompts.max_tokens=8", "--prompts.overlong=drop")) == 1
    with pytest.raises(DataError, match=r"all rows of .* are longer than prompts\.max_tokens = 2"):
        read(policy, tmp_path, rows, "--prompts.max_tokens=2", "--prompts.overlong=drop")


@pytest.mark.parametrize(
    ("row", "words", "says"),
    [
        (None, [], "has no rows"),
        ({"messages": [{"role": "user", "content": "1"}]}, [], "no message has the role assistant"),
        ({"messages": "1"}, [], r"column 'messages' \(sft\.columns\): expected messages; found '1'\."),
        ({"messages": [{"content": "1"}]}, [], "expected messages with role and content"),
        ({"messages": said("1", "2") + said("1", "2")[1:]}, [], "message 3 is the assistant's; expected another role"),
        ({"messages": said("1", "2")[1:]}, [], "message 1 is the assistant's; expected another role"),
        (
            {"text": "1"},
            [],
            r"column 'messages' \(sft\.columns\): expected messages; found no such column in \['text'\]",
        ),
        ({"prompt": "1"}, COLUMNS, r"column 'answer' .*: expected text; found no such column in \['prompt'\]"),
        ({"prompt": "1", "answer": ""}, COLUMNS, r"column 'answer' .*: expected text; found ''"),
        ({"prompt": "1", "answer": [2]}, COLUMNS, r"column 'answer' .*: expected text; found \[2\]"),
        ({"prompt": 1, "answer": "2"}, COLUMNS, r"column 'prompt' .*: expected text or messages; found 1\."),
        ({"prompt": "1", "answer": said("1", "2")}, COLUMNS, r"column 'answer' .*: expected text; found \[\{'role'"),
        ({"messages": said("1", "2"), "images": ["a.png"]}, [], "column 'images': images are not supported"),
        ({"prompt": "1", "answer": "2", "image": {"path": "a"}}, COLUMNS, "column 'image': images are not supported"),
        ({"messages": [PICTURE, *said("1", "2")[1:]]}, [], "parts of the type 'text'; found {'type': 'image'.*Images"),
        ({"messages": said("1", "2"), "tools": "[{"}, [], r"column 'tools': expected a list .* found '\[\{'"),
        ({"messages": [said("1")[0], WEIGHED | {"weight": 2}]}, [], "the weight of message 2 must be 0 or 1; found 2"),
        ({"messages": [said("1")[0], WEIGHED]}, [], "role assistant and a weight other than 0, so nothing can be"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(
    row: Any, words: list[str], says: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says) as refused:
        read(
            policy,
            tmp_path,
            [] if row is None else [{"messages": said("1", "2")} if not words else {"prompt": "1", "answer": "2"}, row],
            *words,
        )
    assert row is None or "rows.jsonl, line 2" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (OTHERWISE, "the assistant's message 2 does not continue the prompt that the policy answers"),
        (ENDLESS, "no end token ends the trained text"),
    ],
)
def test_templates_that_cannot_be_trained_exactly_are_refused(
    template: str, says: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        read(policy, tmp_path, [{"messages": said("1", "2")}], template=template)
