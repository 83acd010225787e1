"""Text and stop strings of streamed tokens, and streams of engines that die, leave or are abandoned."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rl_core.cluster import Methods
from rl_core.errors import EngineDiedError, EngineError
from rl_rollout.engines import process
from rl_rollout.engines.process import EngineClient, EngineServer
from rl_rollout.engines.protocol import GenerateRequest, Generation, NewTokens, SamplingParams
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.response_text import ResponseText
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.engines.streaming import stream

PROMPT = np.array([5, 9, 14], dtype=np.int32)
ASKED = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=100, seed=0))
TEXTS = ("a", " b", "é", "\N{GRINNING FACE}", "中文", "~~", "x\n")


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with byte fallback: token i is byte i, and tokens from 256 on are whole texts."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)}
    vocab |= {text: 256 + index for index, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def level_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer, the other common kind, without tokens for whole texts."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    shown = dict(zip(printable, map(chr, printable), strict=True)) | {
        value: chr(256 + index) for index, value in enumerate(others)
    }
    tokenizer = Tokenizer(models.BPE(vocab={shown[value]: value for value in range(256)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_tokens(seed: int, *, has_texts: bool) -> list[int]:
    """Draw texts as bytes, mixed with whole-text tokens or with invalid bytes, which byte fallback cannot isolate."""
    draw = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 60:
        text = draw.choice(TEXTS)
        if draw.randrange(3):
            tokens += list(text.encode())
        elif has_texts:
            tokens.append(256 + TEXTS.index(text))
        else:
            tokens += [draw.randrange(128, 256) for _ in range(draw.randrange(1, 12))]
    return tokens


@pytest.mark.parametrize("make", [byte_tokenizer, level_tokenizer])
def test_text_in_pieces_is_the_text_of_all_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for seed in range(200):
        tokens = random_tokens(seed, has_texts=make is byte_tokenizer)
        draw = random.Random(-seed)
        text, position, shown = ResponseText(tokenizer.decode, []), 0, ""
        while position < len(tokens):
            size = draw.randrange(1, 4)
            shown += text.feed(tokens[position : position + size])
            position += size
        assert shown + text.finish() == tokenizer.decode(tokens)


def test_a_character_is_shown_once_it_is_whole() -> None:
    text = ResponseText(level_tokenizer().decode, [])
    assert [text.feed([token]) for token in "a\N{GRINNING FACE}b".encode()] == [
        "a",
        "",
        "",
        "",
        "\N{GRINNING FACE}",
        "b",
    ]


def test_a_stop_string_is_found_across_tokens_and_not_shown() -> None:
    decode, stop = level_tokenizer().decode, "é\N{GRINNING FACE}!"
    for context in (b"", b"a long prompt, much longer than what is decoded again"):
        text = ResponseText(decode, list(context), stop=["nowhere", stop])
        shown = [text.feed([token]) for token in f"one é\N{GRINNING FACE}{stop} more".encode()]
        assert "".join(shown) + text.finish() == "one é\N{GRINNING FACE}"
        assert text.matched_stop == stop


def test_of_two_stop_strings_in_one_token_the_one_that_begins_first_ends_the_text() -> None:
    vocabulary = {"x": 0, "ab": 1, "zabcab": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    text = ResponseText(tokenizer.decode, [1], stop=["cab", "bc", "abab"])
    assert text.feed([0, 2]) == "xza"
    assert text.matched_stop == "bc"


def test_what_begins_in_the_prompt_does_not_match() -> None:
    decode = level_tokenizer().decode
    text = ResponseText(decode, list(b"sto"), stop=["stop"])
    assert text.feed(list(b"p it")) + text.finish() == "p it"
    assert text.matched_stop is None
    character = "\N{GRINNING FACE}".encode()
    text = ResponseText(decode, list(character[:2]))
    assert text.feed(list(character[2:])) == "\N{GRINNING FACE}"  # the sampled bytes complete it


# -- streams


class Pace:
    """Lets a script return one token per release of `allowed`; raises `death` if it is set."""

    def __init__(self) -> None:
        self.allowed = asyncio.Semaphore(0)
        self.death: Exception | None = None

    async def __call__(self, request: GenerateRequest, index: int, position: int) -> None:
        await self.allowed.acquire()
        if self.death is not None:
            raise self.death


def says(*tokens: int) -> Callable[[GenerateRequest, int], Sequence[int]]:
    return lambda request, index: list(tokens)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(go())


def test_a_script_streams_as_it_is_paced_and_an_abort_keeps_what_was_said() -> None:
    async def work() -> list[NewTokens]:
        pace = Pace()
        engine = ScriptedEngine(says(7, 8, 9), pace=pace)
        await engine.start()
        pieces = stream(engine, replace(ASKED, request_id="r"))
        found = []
        for _ in range(2):
            pace.allowed.release()
            found.append(await anext(pieces))
        await engine.abort(["r"])
        return [*found, *[piece async for piece in pieces]]

    first, second, last = run(work)
    assert (first.token_ids.tolist(), second.token_ids.tolist(), last.token_ids.tolist()) == ([7], [8], [])
    assert last.ended.finish_reason == "abort"
    assert last.ended.token_ids.tolist() == [7, 8]


def test_a_script_ends_at_a_stop_string() -> None:
    async def work() -> list[Generation]:
        engine = ScriptedEngine(says(*"one\N{GRINNING FACE}two".encode()), decode=level_tokenizer().decode)
        await engine.start()
        sampling = SamplingParams(max_tokens=100, stop=("\N{GRINNING FACE}",))
        return await engine.generate(replace(ASKED, sampling=sampling))

    (sample,) = run(work)
    assert bytes(sample.token_ids.tolist()).decode() == "one\N{GRINNING FACE}"
    assert (sample.finish_reason, sample.matched_stop) == ("stop", "\N{GRINNING FACE}")


def test_a_stream_moves_to_another_replica_before_its_first_token_alone() -> None:
    async def work(num_tokens: int) -> list[NewTokens]:
        pace = Pace()
        engine = ReplicatedEngine([ScriptedEngine(says(1, 2, 3), pace=pace), ScriptedEngine(says(4))])
        await engine.start()
        pieces = stream(engine, ASKED)
        reading = asyncio.ensure_future(anext(pieces))
        found = []
        for _ in range(num_tokens):
            pace.allowed.release()
            found.append(await reading)
            reading = asyncio.ensure_future(anext(pieces))
        pace.death = EngineDiedError("the GPU fell off the bus.")
        pace.allowed.release()
        found.append(await reading)
        return [*found, *[piece async for piece in pieces]]

    assert run(lambda: work(0))[-1].ended.token_ids.tolist() == [4]
    with pytest.raises(EngineDiedError, match=r"a part of the response was streamed.* the GPU fell off the bus"):
        run(lambda: work(1))


def test_a_stream_does_not_move_from_a_replica_that_is_removed() -> None:
    async def work() -> None:
        pace = Pace()
        engine = ReplicatedEngine([ScriptedEngine(says(1, 2, 3), pace=pace), ScriptedEngine(says(4))])
        await engine.start()
        pieces = stream(engine, ASKED)
        pace.allowed.release()
        await anext(pieces)
        await engine.remove(0, deadline_s=0.0)
        await anext(pieces)

    with pytest.raises(EngineDiedError, match=r"a part of the response was streamed.* replica 0 was removed"):
        run(work)


def test_a_caller_elsewhere_that_goes_cancels_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[str]:
        pace, calls, got = Pace(), list[str](), asyncio.Event()
        engine = ScriptedEngine(says(1, 2, 3), pace=pace)
        monkeypatch.setattr(process, "engine_class", lambda _: lambda *_: engine)
        server = EngineServer("scripted", Path(), None)
        await server.start()

        async def call(method: str, *args: Any) -> Any:
            calls.append(method)
            return await getattr(server, method)(*args)

        request = replace(ASKED, on_tokens=lambda _: got.set())
        running = asyncio.ensure_future(EngineClient(cast(EngineServer, Methods(call))).generate(request))
        pace.allowed.release()
        await got.wait()
        running.cancel()
        while engine._waiting:  # until the cancelled request has left the engine
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="lost its streams"):
            await server.more_tokens("another")
        return calls

    assert run(work) == ["begin_stream", "more_tokens", "drop_stream"]
