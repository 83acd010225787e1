"""The tree of a session: sampled tokens never change, and each trains once, in its own context."""

import random
from dataclasses import replace

import numpy as np
import pytest
from chat_model import CHATML, THINKING, TOOLS, encode, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data import ImageSpan
from rl_core.errors import DataError
from rl_rollout.audit import audit_session
from rl_rollout.engines.protocol import Generation
from rl_rollout.gateway.messages import Call, ChatMessage, context_digests
from rl_rollout.gateway.placing import ConversationEncoder
from rl_rollout.gateway.replies import ReplyReader
from rl_rollout.gateway.tree import Sample, SessionTree, Turn, _likeliest, digest_of
from rl_rollout.tools.parsers import resolve_parser

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2.0]}}</tool_call>'


def user(text):
    return ChatMessage(role="user", content=text)


class Talk:
    """A session without HTTP: it places and encodes requests, and the test chooses the sampled texts."""

    def __init__(self, template=CHATML, *, keeps_reasoning=True):
        self.tokenizer = make_tokenizer(template)
        self.encoder = ConversationEncoder(self.tokenizer)
        self.reader = ReplyReader.of(self.tokenizer, resolve_parser("hermes"), ())
        self.tree = SessionTree()
        self.keeps_reasoning = keeps_reasoning
        self.places = []
        self.num_encoded = 0

    def ask(self, messages, *texts, tools=(), **fields):
        messages = self.tree.with_dropped_text(context_digests(tools, ())[0], messages)
        digests = context_digests(tools, messages)
        place = self.tree.place(digests, messages)
        self.places.append(place)
        named = {"tools": tools, "toolset": digests[0]}
        if place.turn is not None:
            new_ids = place.turn.new_ids
        elif place.after is None:
            new_ids = self.encoder.opening_ids(messages, **named)
        else:
            last = int(place.after.generation.token_ids[-1])
            new_ids = self.encoder.following_ids(messages, after=place.num_matched, last_token=last, **named)
        self.num_encoded += len(new_ids)
        turn = Turn(after=place.after, new_ids=new_ids, asked_by=messages[-1].role, key=place.key)
        turn = self.tree.open_turn(turn, digests)
        replies = []
        for text in texts:
            ids = encode(self.tokenizer, text + "<|im_end|>")
            experts = np.full((len(turn.input_ids) + len(ids), 1, 2), len(self.tree.samples), np.int16)
            experts[-1] = -1  # engines report none for the last token
            generation = Generation(
                token_ids=ids,
                routed_experts=experts,
                logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) - len(self.tree.samples) / 64,
                policy_versions=np.full(len(ids), len(self.tree.samples)),
                finish_reason="stop",
            )
            message = self.reader.read(ids, after=new_ids, tools=tools)
            kept = generation.token_ids
            if not self.keeps_reasoning:
                kept = self.reader.without_reasoning(kept, after=new_ids)
            sample = Sample(
                turn=turn,
                message=message,
                generation=generation,
                asked_digest=digest_of(turn.input_ids),
                kept_ids=kept,
                request_index=len(self.places),
                **fields,
            )
            self.tree.add(sample, digests)
            replies.append(message)
        return replies[0] if len(replies) == 1 else replies

    def trajectories(self):
        rows = self.tree.trajectories("p", 0)
        audit_session(rows, self.tree.spans())
        return rows

    def trained(self, row):
        (text,) = self.tokenizer.decode([row.input_ids[row.loss_mask]], skip_special_tokens=False)
        return text

    def text(self, row):
        (text,) = self.tokenizer.decode([row.input_ids], skip_special_tokens=False)
        return text


def test_turns_of_one_conversation_are_one_trajectory():
    talk = Talk()
    history = [user("1+2?")]
    history += [talk.ask(history, "3"), user("and 4?")]
    history += [talk.ask(history, "  7 \n"), user("thanks")]  # sampled white space stays, though the client strips it
    talk.ask(history, "bye")
    (row,) = talk.trajectories()
    assert talk.text(row) == (
        "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\nand 4?<|im_end|>\n<|im_start|>assistant\n  7 \n<|im_end|>\n"
        "<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>"
    )
    assert talk.trained(row) == "3<|im_end|>  7 \n<|im_end|>bye<|im_end|>"
    assert sorted(set(row.policy_versions.tolist())) == [-1, 0, 1, 2]
    assert row.parent is None


@pytest.mark.parametrize(
    "arguments", ['{"b":[2],"a":1}', '{ "a" : 1.0, "b" : [ 2.0 ] }', '{"a": 1, "b": [2.0]}', '{"\\u0061": 1, "b": [2]}']
)
def test_a_call_matches_however_the_client_writes_its_arguments(arguments):
    talk = Talk()
    history = [user("1+2?")]
    reply = talk.ask(history, f"Let me see. {CALL}", tools=TOOLS)
    assert reply.content == "Let me see."
    assert [call.name for call in reply.calls] == ["add"]
    call = Call(name="add", arguments=arguments, call_id="renamed")
    sent = ChatMessage(role="assistant", content="Let me see.\n", calls=(call,))
    talk.ask([*history, sent, ChatMessage(role="tool", content="3", call_id="renamed")], "3!", tools=TOOLS)
    (row,) = talk.trajectories()
    assert talk.text(row).endswith(
        f"Let me see. {CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3!<|im_end|>"
    )
    assert talk.trained(row) == f"Let me see. {CALL}<|im_end|>3!<|im_end|>"


def test_parallel_calls_are_one_turn_and_their_results_the_next():
    talk = Talk()
    history = [user("?")]
    reply = talk.ask(history, CALL + CALL, tools=TOOLS)
    assert len({call.call_id for call in reply.calls}) == 2
    results = [
        ChatMessage(role="tool", content=text, call_id=c.call_id) for text, c in zip("xy", reply.calls, strict=True)
    ]
    talk.ask([*history, reply, *results], "done", tools=TOOLS)
    (row,) = talk.trajectories()
    assert talk.trained(row) == f"{CALL}{CALL}<|im_end|>done<|im_end|>"


def test_reasoning_that_neither_template_nor_client_keeps_stays_in_the_context():
    talk = Talk(THINKING)
    history = [user("1+2?")]
    reply = talk.ask(history, "<think>one, two</think>3")
    assert (reply.reasoning, reply.content) == ("one, two", "3")
    history += [ChatMessage(role="assistant", content="3"), user("sure?")]
    talk.ask(history, "yes")
    (row,) = talk.trajectories()
    assert talk.trained(row) == "<think>one, two</think>3<|im_end|>yes<|im_end|>"
    assert not talk.places[-1].is_fork


def test_reasoning_may_be_dropped_from_later_contexts_and_still_trains_once_where_it_was_thought():
    talk = Talk(keeps_reasoning=False)
    history = [user("1+2?")]
    history += [talk.ask(history, "<think>one, two</think>3"), user("sure?")]
    history += [talk.ask(history, "<think>hm</think>yes"), user("really?")]
    talk.ask(history, "really")
    first, second, third = talk.trajectories()
    assert talk.trained(first) == "<think>one, two</think>3<|im_end|>"
    assert talk.trained(second) == "<think>hm</think>yes<|im_end|>"
    assert talk.trained(third) == "really<|im_end|>"
    assert "think" not in talk.text(third)
    assert "3<|im_end|>" in talk.text(third)
    assert [row.parent for row in (first, second, third)] == [None, 0, 1]


def test_an_edited_history_forks_where_it_was_edited():
    talk = Talk()
    history = [user("a")]
    history += [talk.ask(history, "A"), user("b")]
    second = talk.ask(history, "B")
    edited = [*history[:-1], user("c")]
    talk.ask([*history, second, user("d")], "D")
    talk.ask(edited, "C")
    assert [place.is_fork for place in talk.places] == [False, False, False, True]
    one, two = talk.trajectories()
    assert talk.trained(one) == "A<|im_end|>B<|im_end|>D<|im_end|>"
    assert talk.trained(two) == "C<|im_end|>"
    assert "A<|im_end|>\n<|im_start|>user\nc<|im_end|>" in talk.text(two)
    assert (one.parent, two.parent) == (None, 0)


def test_an_edited_reply_is_prompt_after_the_last_reply_that_was_sampled():
    talk = Talk()
    history = [user("a")]
    history += [talk.ask(history, "A"), user("b")]
    talk.ask(history, "B")
    talk.ask([*history, ChatMessage(role="assistant", content="B, as it ought to be"), user("c")], "C")
    one, two = talk.trajectories()
    assert talk.trained(one) == "A<|im_end|>B<|im_end|>"
    assert talk.trained(two) == "C<|im_end|>"
    assert "assistant\nB, as it ought to be<|im_end|>\n<|im_start|>user\nc<|im_end|>" in talk.text(two)


def test_a_compaction_and_a_subagent_are_roots_with_their_first_difference():
    talk = Talk()
    system = ChatMessage(role="system", content="You are an agent.")
    history = [system, user("a")]
    history += [talk.ask(history, "A"), user("b")]
    talk.ask(history, "B")
    talk.ask([system, user("so far: A and B")], "fine")
    talk.ask([ChatMessage(role="system", content="You are a subagent."), user("a")], "sub")
    talk.ask([user("with tools")], "tools", tools=TOOLS)
    assert [place.num_known for place in talk.places] == [0, 3, 1, 0, 0]
    assert [place.after is None for place in talk.places] == [True, False, True, True, True]
    assert [talk.trained(row) for row in talk.trajectories()] == [
        "A<|im_end|>B<|im_end|>", "fine<|im_end|>", "sub<|im_end|>", "tools<|im_end|>",
    ]  # fmt: skip


def test_of_a_request_made_twice_the_sample_trains_that_the_agent_went_on_from():
    talk = Talk()
    first, second = (talk.ask([user("a")], text) for text in ("A", "A2"))
    assert talk.places[1].turn is not None
    assert [talk.trained(row) for row in talk.trajectories()] == ["A2<|im_end|>"]  # the retry replaces the first sample
    talk.ask([user("a"), first, user("b")], "B")
    assert [talk.trained(row) for row in talk.trajectories()] == ["A<|im_end|>B<|im_end|>"]
    talk.ask([user("a"), second, user("b")], "B2")  # now both are continued
    one, two = talk.trajectories()
    assert (talk.trained(one), talk.trained(two)) == ("A<|im_end|>B<|im_end|>", "A2<|im_end|>B2<|im_end|>")


def test_choices_that_the_agent_did_not_use_do_not_train():
    talk = Talk()
    choices = talk.ask([user("a")], "A0", "A1", "A2")
    assert [talk.trained(row) for row in talk.trajectories()] == ["A0<|im_end|>"]
    talk.ask([user("a"), choices[1], user("b")], "B")
    assert [talk.trained(row) for row in talk.trajectories()] == ["A1<|im_end|>B<|im_end|>"]


def test_equal_samples_of_one_request_are_told_apart_by_the_ids_of_their_calls():
    talk = Talk()
    first, _ = talk.ask([user("a")], CALL, CALL, tools=TOOLS)
    results = [ChatMessage(role="tool", content="3", call_id=first.calls[0].call_id)]
    talk.ask([user("a"), first, *results], "B", tools=TOOLS)
    (row,) = talk.trajectories()
    assert sorted(set(row.policy_versions.tolist())) == [-1, 0, 2]


def foreign(content="x", *, reasoning="", ids=("c", "d"), arguments="{}"):
    calls = tuple(Call(name="add", arguments=arguments, call_id=one) for one in ids)
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, calls=calls)


def tool(call_id):
    return ChatMessage(role="tool", content="3", call_id=call_id)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([foreign()], [foreign(" x")]),
        ([foreign("x\n")], [foreign("x")]),
        ([foreign(reasoning="hm")], [foreign(reasoning="so")]),
        ([foreign(arguments='{"a":1, "b":2}')], [foreign(arguments='{"b": 2, "a": 1}')]),
        ([foreign(), tool("c"), tool("d")], [foreign(), tool("d"), tool("c")]),
        ([foreign(), tool("d")], [foreign(), tool("c")]),
    ],
)
def test_messages_that_the_model_did_not_write_must_be_exactly_those_of_the_context(first, second):
    talk = Talk()
    histories = [[user("a"), *said, user("b")] for said in (first, second, first)]
    replies = [talk.ask(history, "A", tools=TOOLS) for history in histories]
    assert [place.turn is not None for place in talk.places] == [False, False, True]
    for history, reply in zip(histories[:2], replies, strict=False):
        talk.ask([*history, reply, user("c")], "B", tools=TOOLS)
    assert [place.after.turn for place in talk.places[3:]] == [one.turn for one in talk.tree.samples[:2]]
    assert len(talk.trajectories()) == 2


def test_the_same_history_with_other_call_ids_is_the_same_turn():
    talk = Talk()
    talk.ask([user("a"), foreign(), tool("d"), tool("c")], "A", tools=TOOLS)
    talk.ask([user("a"), foreign(ids=("1", "2")), tool("2"), tool("1")], "A", tools=TOOLS)
    assert talk.places[-1].turn is not None


def test_what_never_reached_the_agent_does_not_train():
    talk = Talk()
    talk.ask([user("a")], "lost", is_delivered=False)
    assert talk.trajectories() == ()
    reply = talk.ask([user("a")], "A")
    talk.ask([user("a"), reply, user("b")], "gone", never_trains=True)
    (row,) = talk.trajectories()
    assert talk.trained(row) == "A<|im_end|>"


def test_no_text_of_a_client_becomes_a_control_token():
    talk = Talk()
    reply = talk.ask([user("a<|im_end|>")], "A")
    talk.ask([user("a<|im_end|>"), reply, user("<|im_start|>assistant\nyes")], "B")
    (row,) = talk.trajectories()
    assert int((row.input_ids == talk.tokenizer.eos_token_id).sum()) == 4


def test_the_audit_finds_a_tree_that_has_other_tokens_than_the_engine_was_given():
    talk = Talk()
    talk.ask([user("a")], "A")
    rows = talk.tree.trajectories("p", 0)
    talk.tree.samples[0].turn.new_ids = talk.tree.samples[0].turn.new_ids[1:]
    with pytest.raises(DataError, match="differ from the engine's input"):
        audit_session(rows, talk.tree.spans())


def test_a_long_history_is_neither_rendered_nor_encoded_again_and_takes_little_memory():
    talk = Talk()
    history = [user("x" * 700)]
    for index in range(40):
        history += [talk.ask(history, f"{index} " + "y" * 40), user(f"{index} " + "x" * 700)]
    (row,) = talk.trajectories()
    assert len(row.input_ids) > 30_000
    assert talk.num_encoded + sum(len(sample.generation.token_ids) for sample in talk.tree.samples) == len(
        row.input_ids
    )


def turns(row):
    return [list(told) for told in row.extras["turns"]]


def test_the_turns_of_a_trajectory_say_who_asked_what_trains_where_and_what_was_sampled_in_vain():
    talk = Talk()
    history = [user("a")]
    history += [talk.ask(history, CALL, tools=TOOLS), ChatMessage(role="tool", content="3")]
    choices = talk.ask(history, "B", "other", tools=TOOLS)
    talk.ask(history, "again", tools=TOOLS)
    talk.ask(history, "title", tools=TOOLS, never_trains=True)
    talk.ask(history, "gone", tools=TOOLS, is_delivered=False)
    end = [*history, choices[0]]
    talk.ask([*end, user("c")], "C", tools=TOOLS)
    title = talk.ask([*end, user("d")], "title", tools=TOOLS, never_trains=True)
    talk.ask([*end, user("d"), title, user("e")], "E", tools=TOOLS)
    one, two = talk.trajectories()
    length = {text: len(encode(talk.tokenizer, text + "<|im_end|>")) for text in ("other", "again", "title", "gone")}
    vain = dict(zip(("choice", "retry", "probe", "disconnected"), length.values(), strict=True))
    assert [told[0] for told in turns(two)] == ["user", "tool", "user", "user"]
    assert [told[3:] for told in turns(one)] == [[0, ["add"], {}], [0, [], vain], [0, [], {}]]
    assert [told[3:] for told in turns(two)] == [[0, ["add"], {}], [0, [], vain], ["probe", [], {}], [1, [], {}]]
    assert turns(one)[:2] == turns(two)[:2]
    for row in (one, two):
        trained = [range(start, stop) for _, start, stop, where, *_ in turns(row) if where == row.output_index]
        assert [place for places in trained for place in places] == np.flatnonzero(row.loss_mask).tolist()


def test_names_of_tools_that_people_are_shown_are_bounded():
    talk = Talk()
    calls = "".join(f'<tool_call>{{"name": "{"x" * 90}{i}", "arguments": {{}}}}</tool_call>' for i in range(12))
    talk.ask([user("a")], calls, tools=TOOLS)
    (row,) = talk.trajectories()
    assert turns(row)[0][4] == ["x" * 64] * 8


def test_what_is_shared_and_masked_has_the_experts_of_the_context_that_trains():
    talk = Talk()
    history = [user("a")]
    history += [talk.ask(history, "A"), user("b")]
    talk.ask(history, "B")
    talk.ask([*history[:-1], user("c")], "C")
    one, two = talk.trajectories()  # audits the experts too
    shared = len(talk.tree.samples[0].turn.input_ids) + len(talk.tree.samples[0].generation.token_ids) - 1
    assert not two.loss_mask[: shared + 1].any()
    assert one.routed_experts[:shared].ravel().tolist() == [0] * (2 * shared)
    assert two.routed_experts[:-1].ravel().tolist() == [2] * (2 * (len(two.input_ids) - 1))  # C's forward pass


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_an_agent_does_each_token_trains_at_most_once_in_its_own_context(data):
    talk = Talk(keeps_reasoning=data.draw(st.booleans()))
    histories = [[user("a")]]
    for number in range(data.draw(st.integers(1, 8))):
        history = data.draw(st.sampled_from(histories))
        change = data.draw(st.sampled_from(["none", "edit", "compact", "forget reasoning"]))
        if change == "edit":
            place = data.draw(st.integers(0, len(history) - 1))
            history = [*history[:place], replace(history[place], content=f"edited {number}"), *history[place + 1 :]]
        elif change == "compact":
            history = [user(f"so far {number}"), *history[-1:]]
        elif change == "forget reasoning":
            history = [replace(message, reasoning="") for message in history]
        texts = data.draw(st.lists(st.sampled_from(["A", "<think>t</think>B", CALL]), min_size=1, max_size=2))
        replies = talk.ask(history, *texts, tools=TOOLS, is_delivered=data.draw(st.booleans()))
        for reply in replies if isinstance(replies, list) else [replies]:
            following = user(f"u{data.draw(st.integers(0, 1))}")
            if reply.calls:
                following = ChatMessage(role="tool", content="3", call_id=reply.calls[0].call_id)
            histories.append([*history, reply, following])
    rows = talk.trajectories()  # audits them
    assert [row.output_index for row in rows] == list(range(len(rows)))
    assert all(row.parent is None or row.parent < row.output_index for row in rows)
    assert all(row.loss_mask.any() for row in rows)
    assert all((row.routed_experts[:-1] >= 0).all() for row in rows)  # for every token but the last
    for row in rows:
        places = [place for told in turns(row) if told[3] == row.output_index for place in range(told[1], told[2])]
        assert places == np.flatnonzero(row.loss_mask).tolist()
        for _, start, stop, where, *_ in turns(row):
            if where not in ("probe", row.output_index):  # trained by another trajectory
                owner = rows[where]
                assert owner.loss_mask[start]
                assert owner.input_ids[:start].tolist() == row.input_ids[:start].tolist()
                assert stop <= len(row.input_ids)
    trained = talk.tree.trained()
    assert talk.tree.num_untrained_tokens == sum(
        len(one.generation.token_ids) for one in talk.tree.samples if one not in trained
    )
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(one.generation.token_ids) for one in trained)


def test_a_call_whose_text_the_client_drops_is_the_sample_with_its_ids():
    talk = Talk()
    history = [user("1+2?")]
    for text in (f"I add. {CALL}{CALL}", f"Again. {CALL}"):
        reply = talk.ask(history, text, tools=TOOLS)
        calls = tuple(replace(call, arguments='{"b":[2],"a":1}') for call in reply.calls)
        results = [ChatMessage(role="tool", content="3", call_id=call.call_id) for call in calls]
        history += [ChatMessage(role="assistant", content=" ", calls=calls), *results]
    talk.ask(history, "3", tools=TOOLS)
    (row,) = talk.trajectories()
    assert talk.trained(row) == f"I add. {CALL}{CALL}<|im_end|>Again. {CALL}<|im_end|>3<|im_end|>"


@pytest.mark.parametrize(
    "change", [{"call_id": "other"}, {"name": "multiply"}, {"arguments": '{"a": 2}'}, {"content": "I subtract."}]
)
def test_a_call_that_the_client_changes_is_another_message(change):
    talk = Talk()
    first = talk.ask([user("1+2?")], f"I add. {CALL}", tools=TOOLS)
    (call,) = first.calls
    content, other = change.get("content", ""), {key: one for key, one in change.items() if key != "content"}
    sent = ChatMessage(role="assistant", content=content, calls=(replace(call, **other),))
    talk.ask([user("1+2?"), sent, ChatMessage(role="tool", content="3", call_id=call.call_id)], "3", tools=TOOLS)
    assert talk.places[1].after is None


def test_a_call_in_another_conversation_gets_no_text():
    talk = Talk()
    reply = talk.ask([user("1+2?")], f"I add. {CALL}", tools=TOOLS)
    sent = ChatMessage(role="assistant", calls=reply.calls)
    talk.ask([user("Compacted."), sent, ChatMessage(role="tool", content="3")], "3", tools=TOOLS)
    assert "I add." not in talk.text(talk.trajectories()[1])


def make_sample(turn, token_ids=(1,), *, ids=(), reasoning="", **fields):
    tokens = np.array(token_ids, np.int32)
    versions = np.zeros(len(tokens), np.int32)
    generation = Generation(token_ids=tokens, logprobs=versions - 1.0, policy_versions=versions, finish_reason="stop")
    fields = {"request_index": 0, "asked_digest": b"", "kept_ids": tokens, **fields}
    return Sample(turn=turn, message=foreign(ids=ids, reasoning=reasoning), generation=generation, **fields)


@pytest.mark.parametrize(
    ("sent", "candidates", "expected"),
    [
        ({}, [{}, {}], 1),
        ({"ids": ("c", "d")}, [{"ids": ("c", "d")}, {"ids": ("d", "c")}], 0),
        ({"ids": ("c", "d")}, [{"ids": ("c", "d"), "never_trains": True}, {"reasoning": "hm"}], 0),
        ({"ids": ("c",)}, [{}, {"ids": ("d",)}], 1),
        ({}, [{}, {"ids": ("c",)}], 1),
        ({"reasoning": " hm"}, [{"reasoning": "hm\n"}, {"reasoning": "so"}], 0),
        ({"reasoning": "hm", "ids": ("c",)}, [{"ids": ("c",)}, {"reasoning": "hm"}], 0),
        ({"reasoning": "hm"}, [{"reasoning": "hm", "is_delivered": False}, {}], 0),
        ({}, [{}, {"reasoning": "so"}], 1),
        ({}, [{}, {"is_delivered": False}], 0),
        ({}, [{}, {"never_trains": True}], 0),
        ({}, [{"is_delivered": False}, {"never_trains": True}], 1),
    ],
)
def test_of_equivalent_samples_the_client_means_the_one_whose_ids_or_reasoning_it_repeats(sent, candidates, expected):
    turn = Turn(after=None, new_ids=np.array([1], np.int32))
    samples = [make_sample(turn, **fields) for fields in candidates]
    assert (
        samples.index(_likeliest(samples, foreign(ids=sent.get("ids", ()), reasoning=sent.get("reasoning", ""))))
        == expected
    )


def test_a_prompt_of_tokens_follows_the_longest_sample_with_which_it_begins():
    forks = 0
    for seed in range(20):
        draw, tree, turns = random.Random(seed), SessionTree(), []
        for number in range(25):
            said = [[*one.turn.input_ids, *one.kept_ids] for one in tree.samples]
            start = draw.choice([[], *said])
            prompt = np.array([*start, *draw.choices([1, 2], k=draw.randint(0 if start else 1, 2))], np.int32)
            place, num_said = tree.place_tokens(prompt)
            matching = [index for index, one in enumerate(said) if one == prompt[: len(one)].tolist()]
            longest = max(matching, key=lambda index: (len(said[index]), index), default=None)
            assert num_said == (0 if longest is None else len(said[longest]))
            assert place.after is (None if longest is None else tree.samples[longest])
            beside = [turn for turn in turns if turn.after is place.after]
            same = [turn for turn in beside if turn.input_ids.tolist() == prompt.tolist()]
            assert place.turn is (same[0] if same else None)
            assert place.is_fork == (longest is not None and bool(beside) and not same)
            assert (place.num_matched, place.num_known, place.knows_tools) == (0, 0, True)
            forks += place.is_fork
            turn = tree.open_turn(Turn(after=place.after, new_ids=prompt[num_said:], key=place.key), [b"tools"])
            assert turn.input_ids.tolist() == prompt.tolist()
            assert turn is place.turn or not same
            turns += [] if same else [turn]
            kept = draw.choices([1, 2], k=draw.randint(1, 2))
            tree.add(make_sample(turn, kept, request_index=number), [b"tools"])
    assert forks > 20


def test_a_prompt_of_tokens_follows_a_sample_of_messages():
    talk = Talk()
    talk.ask([user("Hi")], "Hello")
    (sample,) = talk.tree.samples
    said = np.concatenate([sample.turn.input_ids, sample.kept_ids])
    place, num_said = talk.tree.place_tokens(np.append(said, said[:2]))
    assert place.after is sample
    assert num_said == len(said)


def test_a_trajectory_has_the_times_of_the_samples_that_it_trains_and_the_end_of_its_last():
    talk = Talk()
    history = [user("a")]
    history += [talk.ask(history, "A", generate_s=1.0), user("b")]
    reply = talk.ask(history, "B", generate_s=2.0)
    talk.ask([*history[:-1], user("c")], "C", generate_s=4.0)
    talk.ask([*history, reply, user("d")], "D", generate_s=8.0, never_trains=True)
    for number, sample in enumerate(talk.tree.samples):
        reasons = ("stop", "length", "stop", "stop")
        sample.generation = replace(sample.generation, num_preempted=10**number, finish_reason=reasons[number])
    one, two = talk.tree.trajectories("p", 3)
    assert (one.timings.generate_s, one.timings.preemptions, one.finish_reason) == (3.0, 11, "length")
    assert (two.timings.generate_s, two.timings.preemptions, two.finish_reason) == (4.0, 100, "stop")
    assert [(row.prompt_uid, row.session_index, row.output_index) for row in (one, two)] == [("p", 3, 0), ("p", 3, 1)]
    plain = Talk()
    plain.ask([user("a")], "A")
    (row,) = plain.tree.trajectories("p", 0)
    assert (row.timings.generate_s, row.timings.preemptions) == (0.0, 0)
    assert SessionTree().is_empty
    assert not talk.tree.is_empty


def test_images_lie_after_the_tokens_of_all_turns_before_them():
    def image(digest, start):
        return ImageSpan(digest=digest * 64, start=start, length=2)

    first = Turn(after=None, new_ids=np.zeros(5, np.int32), new_images=(image("a", 1), image("b", 3)))
    second = Turn(after=make_sample(first, [1, 2, 3]), new_ids=np.zeros(4, np.int32), new_images=(image("c", 2),))
    third = Turn(after=make_sample(second, [1]), new_ids=np.zeros(3, np.int32), new_images=(image("d", 0),))
    assert [(one.digest[0], one.start, one.length) for one in third.images] == [
        ("a", 1, 2),
        ("b", 3, 2),
        ("c", 5 + 3 + 2, 2),
        ("d", 5 + 3 + 4 + 1, 2),
    ]
    assert first.images == first.new_images
    digests = {digest_of(np.arange(3), images) for images in ((), first.images, (image("a", 2),), (image("b", 1),))}
    assert len(digests) == 4
