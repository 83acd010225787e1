"""A rollout in a browser: turns, blocks, forks, two responses side by side, and copying."""

import json
import math

import pytest
from report_pages import report_of, show, write_run

from rl_metrics.run_files.rollout_log import RolloutRow

ASKED = (
    "<|im_start|>system\nYou may call tools.<|im_end|>\n<|im_start|>user\nWhat is 6*7?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"left": 6, "right": 7}}\n</tool_call>'
HOSTILE = "<img src=x onerror='window.hacked = 1'>\u202e"
REPLY = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def row(response, *, session=0, output=0, prompt=ASKED, masked=(), **more):
    """Return a trajectory with one token per character; the tokens of masked texts are not sampled."""
    mask = [True] * len(response)
    for text in masked:
        start = response.index(text)
        mask[start : start + len(text)] = [False] * len(text)
    columns = {"policy_logprobs": tuple(-0.5 if is_sampled else math.nan for is_sampled in mask)}
    of = {"reward": 1.0, "tokens": tuple(response), "mask": tuple(mask), "columns": columns} | more
    return RolloutRow(step=1, time=1.0, prompt_uid="u", problem="p", prompt=prompt, response=response,
                      session=session, output=output, **of)  # fmt: skip


ROWS = (
    row(f"<think>\nI multiply.\n</think>\n{CALL}<|im_end|>{REPLY}It is 42.<|im_end|>", masked=(REPLY,), session=0,
        components={"acc": 1.0, "format": 0.5}, extras={"answer": "42", "parts": [6, 7]}),
    row(f"<think>\nI multiply.\n</think>\n{CALL}<|im_end|>{REPLY}It is 24.<|im_end|>", masked=(REPLY,), session=1,
        reward=0.0, components={"acc": 0.0, "format": 0.5}),
    row("It is 41.<|im_end|>", session=2, reward=0.0, components={"acc": 0.0}),
    row("It is 41, no: 42.<|im_end|>", session=2, output=1, tokens=(), mask=(), columns={}),
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, rows=ROWS)
    return report_of(folder)


TURNS = """
[...document.querySelectorAll('.pane:first-child .turn')].map((turn) => [
  turn.querySelector('.role strong').textContent,
  [...turn.children].slice(1).map((one) => `${one.className}|${one.textContent}`)])
"""


def test_the_first_one_is_selected(page, report):
    show(page, report, "view=rollouts&sort=worst")
    page.wait("document.querySelector('.token') && document.querySelector('[aria-selected=true]').dataset.row === '1'")
    assert page.run("document.querySelector('[role=option]').getAttribute('aria-selected')") == "true"
    assert page.run("location.hash") == "#view=rollouts&sort=worst"
    page.run("document.querySelector('.list').focus()")
    page.press("ArrowDown")
    page.wait("document.querySelector('[aria-selected=true]').dataset.row === '2'")
    page.run("location.hash = 'view=rollouts&r0=7'")
    page.wait("document.querySelector('.pane').textContent === 'No trajectory matches the filters.'")


def test_a_conversation_is_turns_and_blocks(page, report):
    show(page, report, "view=rollouts")
    turns = page.wait(f"document.querySelector('.token') && {TURNS}")
    assert turns == [
        ["system", ["said|You may call tools.", "marker|<|im_end|>\n"]],
        ["user", ["said|What is 6*7?", "marker|<|im_end|>\n"]],
        [
            "assistant",
            [
                "block reasoning|Reasoning, 4 words<think>↵\nI multiply.↵\n</think>",
                "said|↵\n",
                f"block call|Tool call: multiply{CALL}".replace("\n", "↵\n"),
                "marker|<|im_end|>↵\n",
            ],
        ],
        ["user", ["block result|Result<tool_response>↵\n42↵\n</tool_response>", "marker|<|im_end|>↵\n"]],
        ["assistant", ["said|It is 42.", "marker|<|im_end|>"]],
    ]
    assert page.run("document.querySelector('.reasoning').open") is False
    page.run("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")  # the first token is in a folded block
    page.wait("document.querySelector('.reasoning').open && document.querySelector('.token.current') !== null")


@pytest.mark.parametrize(
    ("prompt", "response", "masked", "roles"),
    [
        ("1+1=", "2", (), ["prompt", "response"]),
        ("6*7=", "<tool_call>x</tool_call><eos>[42]42<eos>", ("[42]",), ["prompt", "response", "reply", "response"]),
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "Hello<|eot_id|>",
            (),
            ["system", "user", "assistant"],
        ),
        (
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            "Hello<end_of_turn>",
            (),
            ["user", "assistant"],
        ),
        ("<s>[INST] Hi [/INST]", " Hello</s>", (), ["user", "assistant"]),
        (
            "<|start|>developer<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant",
            "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
            (),
            ["system", "user", "assistant", "assistant"],
        ),
    ],
)
def test_roles_of_common_chat_templates(page, tmp_path, prompt, response, masked, roles):
    write_run(tmp_path / "run", rows=[row(response, prompt=prompt, masked=masked)])
    show(page, report_of(tmp_path / "run"), "view=rollouts")
    turns = page.wait(f"document.querySelector('.token') && {TURNS}")
    assert [role for role, _ in turns] == roles
    shown = page.run("[...document.querySelectorAll('.token')].map((token) => token.textContent).join('')")
    assert shown.replace("↵", "") == response
    if "analysis" in response:
        assert turns[2][1][0] == "block reasoning|Reasoning, 1 wordGreet."


def test_reasoning_that_the_prompt_began_is_shown_apart(page, tmp_path):
    write_run(tmp_path / "run", rows=[row("I add.\n</think>\n2<|im_end|>", prompt=f"{ASKED}<think>\n")])
    show(page, report_of(tmp_path / "run"), "view=rollouts")
    turns = page.wait(f"document.querySelector('.token') && {TURNS}")
    assert turns[2][1][0] == "block reasoning|Reasoning, 3 wordsI add.↵\n</think>"


def test_tokens_read_as_the_response_does(page, tmp_path):
    one = row("", columns={}, tokens=("das", "\ufffd", "\ufffd", "ist", "!"), mask=(True,) * 5)
    write_run(tmp_path / "run", rows=[RolloutRow.from_json(one.to_json() | {"response": " das é ist!"})])
    show(page, report_of(tmp_path / "run"), "view=rollouts")
    page.wait("document.querySelectorAll('.token').length === 5")
    assert page.run("document.querySelector('.turn.assistant .said').textContent") == " das é ist!"


def test_a_group_is_a_tree_of_forks(page, report):
    show(page, report, "view=rollouts")
    page.wait("document.querySelector('.group .tree') !== null")
    tree = """(function told(list) {
      return [...list.children].map((item) => [
        item.querySelector(':scope > a')?.textContent ?? item.querySelector('span').textContent,
        ...[...item.querySelectorAll(':scope > ul')].map(told)]);
    })(document.querySelector('.group .tree'))"""
    assert page.run(tree) == [
        [
            "system, user, shared by 4: What is 6*7?",
            [
                [
                    "assistant, user, shared by 2: <tool_response> 42 </tool_response>",
                    [["session 0"], ["session 1"]],
                ],
                ["session 2, output 0"],
                ["session 2, output 1"],
            ],
        ]
    ]
    page.run("[...document.querySelectorAll('.tree a')].at(-1).click()")
    page.wait("document.querySelector('[aria-selected=true]').dataset.row === '3'")


def test_rewards_by_component_are_shown_beside_the_group(page, report):
    show(page, report, "view=rollouts")
    cells = page.wait(
        "[...document.querySelectorAll('.pane table')[0].rows].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert cells == [
        ["part", "value", "", "group's mean"],
        ["acc", "1", "", "0.3333"],
        ["format", "0.5", "", "0.5"],
    ]


def test_what_the_reward_said_beside_its_value(page, report):
    show(page, report, "view=rollouts")
    facts = "[...document.querySelectorAll('.extras dl > *')].map((one) => one.innerText)"
    assert page.wait(f"{facts}.length && {facts}") == ["answer", "42", "parts", "[6,7]"]


def test_two_responses_of_a_group_side_by_side(page, report):
    show(page, report, "view=rollouts")
    select = "document.querySelector('select[aria-label=\"Compare with\"]')"
    page.wait(f"{select} !== null")
    options = page.run(f"[...{select}.options].map((one) => one.text)")
    assert options == [
        "none", "session 1: reward 0", "session 2, output 0: reward 0", "session 2, output 1: reward 1"
    ]  # fmt: skip
    page.run(f"{select}.value = '1'; {select}.dispatchEvent(new Event('change'))")
    page.wait("document.querySelectorAll('.pane').length === 2 && document.querySelectorAll('.tokens').length === 2")
    differing = """[...document.querySelectorAll('.pane')].map((pane) => [...pane.querySelectorAll('.token, mark')]
      .filter((one) => one.localName === 'mark' || one.style.backgroundColor).map((one) => one.textContent).join(''))"""
    assert page.run(differing) == ["42", "24"]
    assert page.run("location.hash") == "#view=rollouts&with=1"
    page.run("location.hash = 'view=rollouts&row=2&with=3'")
    page.wait("document.querySelector('mark') !== null")
    assert page.run(differing) == ["", ", no: 42"]  # the second one has no tokens
    page.run(f"{select}.value = ''; {select}.dispatchEvent(new Event('change'))")
    page.wait("document.querySelectorAll('.pane').length === 1")


def test_it_is_copied_as_a_line_of_the_file(page, report):
    show(page, report, "view=rollouts")
    page.wait("document.querySelector('.actions button') !== null")
    page.run("navigator.clipboard.writeText = async (text) => void (window.copied = text)")
    page.run("document.querySelector('.actions button').click()")
    copied = page.wait("window.copied")
    read = RolloutRow.from_json(json.loads(copied)).to_json()
    assert read | {"time": 1.0} == ROWS[0].to_json()  # the log sets its own time
    page.wait("document.querySelector('.actions button').textContent === 'Copied'")


def test_a_link_leads_to_it_and_to_its_token(page, report):
    show(page, report, "view=rollouts&sort=worst&r1=0.5")
    page.wait("document.querySelector('.token') !== null")
    page.run("document.querySelector('.token[data-place=\"3\"]').click()")
    page.wait("location.hash.includes('token=3')")
    address = page.run("document.querySelector('.actions a').hash")
    assert address == "#view=rollouts&row=1"
    show(page, report, f"{address[1:]}&token=3")
    page.wait("document.querySelector('.token.current')?.dataset.place === '3'")
    assert page.run("document.querySelector('[aria-selected=true]').dataset.row") == "1"


def test_very_long_responses_are_compared_too(page, tmp_path):
    words = [f"w{number} " for number in range(5000)]
    texts = ["".join(words), "".join([*words[:2500], "other ", *words[2500:]])]
    rows = [row(text, session=session, tokens=(), mask=(), columns={}) for session, text in enumerate(texts)]
    write_run(tmp_path / "run", rows=rows)
    show(page, report_of(tmp_path / "run"), "view=rollouts&row=1&with=0")
    assert page.wait("document.querySelector('mark')?.textContent").strip() == "other"


SESSION = """[...document.querySelectorAll('.session .tree li')].map((one) =>
  [...one.childNodes].filter((node) => node.tagName !== 'UL').map((node) => node.textContent).join(''))"""
ADD = '<tool_call>{"name": "add"}</tool_call>'


def test_a_session_is_a_tree_of_turns_and_tools(page, tmp_path):
    first, last = f"{ADD}<|im_end|>", "It is 3.<|im_end|>"
    reply = "<|im_start|>tool\n3<|im_end|><|im_start|>assistant\n"
    begin, middle = 40, 40 + len(first)
    end = middle + len(reply)
    shared = ("user", begin, middle, 0, ["add"], {"retry": 1, "choice": 5})
    rows = [
        row(f"{first}{reply}{last}", masked=(reply,), turns=(shared, ("tool", end, end + len(last), 0, [], {}))),
        row(last, output=1, prompt=f"{ASKED}{first}{reply}", turns=(
            shared, ("tool", end, end + 3, "probe", [], {}), ("user", end + 9, end + 9 + len(last), 1, [], {}))),
        row(last, output=2, prompt="<|im_start|>system\nYou sum up.", turns=(("user", 9, 9 + len(last), 2, [], {}),)),
        row(last, session=1, failure="the agent <b>died</b>", turns=(("user", 9, 9 + len(last), 0, [HOSTILE], {}),)),
    ]  # fmt: skip
    write_run(tmp_path / "run", rows=rows)
    show(page, report_of(tmp_path / "run"), "view=rollouts&row=0")
    size = len(last)
    assert page.wait(f"document.querySelector('.session') && {SESSION}") == [
        f"user → assistant {len(first)} tokens, trained in output 0, shared by 2; 1 token more, untrained (sampled "
        f"again); 5 tokens more, untrained (another choice) calls add {ADD}",
        f"tool → assistant {size} tokens, trained in output 0 It is 3.",
        "session 0, output 0 1 It is 3.",
        "tool → assistant 3 tokens, masked: outside the task",
        f"user → assistant {size} tokens, trained in output 1 It is 3.",
        "session 0, output 1 1 It is 3.",
        f"user → assistant {size} tokens, trained in output 2 It is 3.",
        "session 0, output 2 1 It is 3.",
    ]
    title = page.run("document.querySelector('.session h3').textContent")
    assert title == "Session 0: 5 turns in 3 recorded trajectories"
    show(page, tmp_path / "run.html", "view=rollouts&row=3")
    page.wait("document.querySelector('.session')?.textContent.includes('Failed: the agent <b>died</b>')")
    assert page.run("document.querySelector('.session code').textContent") == HOSTILE.replace("\u202e", "⟨U+202E⟩")


def test_the_session_of_a_loop_with_tools_is_a_chain(page, report):
    show(page, report, "view=rollouts&row=0")
    assert page.wait(f"document.querySelector('.session') && {SESSION}") == [
        f"prompt → assistant {ROWS[0].response.index(REPLY)} tokens, trained calls multiply <think> I multiply. "
        '</think> <tool_call> {"name": "multiply", "arguments": {"lef…',
        "reply → assistant 19 tokens, trained It is 42.",
        "session 0 1 It is 42.",
    ]
    show(page, report, "view=rollouts&row=2")
    page.wait("document.querySelector('.group [aria-current=true]')?.textContent === 'session 2, output 0'")
    assert page.run("document.querySelector('.session')") is None  # a single turn
