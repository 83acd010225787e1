import asyncio
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rl_core.data import Batch
from rl_core.errors import DataError
from rl_core.images import ImageStore
from rl_rollout import PromptOptions, PromptTokenizer, RewardScorer, Rollout, SamplingParams, load_prompts
from rl_rollout.audit import SampledSpan, audit_images, audit_session
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops.conversation import TurnLimits
from rl_rollout.loops.single_turn import SingleTurnLoop
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.tools import TextAndImages, ToolBox, tool

PAD, END = 5, 2
CALL = f"<tool_call>{json.dumps({'name': 'zoom', 'arguments': {}})}</tool_call>"


def picture(seed, *, width=84, height=56):
    encoded = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


@tool
def zoom() -> list:
    """Shows a part of the picture."""
    return [{"type": "text", "text": "<|image_pad|>Closer:"}, {"type": "image", "image": picture(7)}]


class SeeingEngine(ScriptedEngine):
    """Says its turns one after the other, and reports the pixel values of each request's images."""

    def __init__(self, tokenizer, *turns, max_model_len=4096):
        said = [[*ids, END] for ids in tokenizer.encode(turns, add_special_tokens=False)]
        super().__init__(
            lambda _request, _index: said[min(len(self.requests), len(said)) - 1],
            end_token_ids=[END],
            traits=EngineTraits(name="seeing", max_model_len=max_model_len, vocab_size=300, max_images=9),
        )
        self.images = EngineImages(tokenizer.images.processor, tokenizer.images.store)
        self.scored = []

    async def generate(self, request):
        digest = self.images.placed(request.input_ids, request.images)[1] if request.images else ""
        return [replace(one, pixel_digest=digest) for one in await super().generate(request)]

    async def score(self, sequences, *, images=(), **options):
        self.scored += images
        return await super().score(sequences, images=images, **options)


@pytest.fixture
def tokenizer(vision_folder, tmp_path):
    return PromptTokenizer.load(vision_folder, image_folder=tmp_path / "run/images")


@pytest.fixture
def prompt(tokenizer, tmp_path):
    for seed in range(2):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed))
    row = {"prompt": [{"role": "user", "content": "<image> or <image>?"}], "images": ["0.png", "1.png"], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    prompts = load_prompts([tmp_path / "rows.jsonl"], tokenizer, PromptOptions(max_tokens=200))
    prompts.keep_images(tokenizer.images.store)
    return prompts[0]


def run(loop, engine, prompt, tokenizer, *, num_sessions=1, max_tokens=400):
    async def judge(given):
        return float(given.response_text == "It is 1.")

    async def work():
        await engine.start()
        rollout = Rollout(engine, loop, scorer=RewardScorer(judge), decode=tokenizer.decode, tokenizer=tokenizer)
        try:
            return await rollout.run(
                [prompt], num_sessions=num_sessions, sampling=SamplingParams(max_tokens=max_tokens)
            )
        finally:
            rollout.close()

    (group,) = asyncio.run(work())
    return group


def test_a_single_turn_carries_the_prompts_images_from_request_to_rows(prompt, tokenizer):
    engine = SeeingEngine(tokenizer, "It is 1.")
    group = run(SingleTurnLoop(), engine, prompt, tokenizer, num_sessions=3)
    assert (group.failures, group.num_audited) == ((), 3)
    assert [request.images for request in engine.requests] == [prompt.images]
    assert all(one.images == prompt.images for one in group.trajectories)
    batch = Batch.from_trajectories(group.trajectories)
    assert batch.images == (prompt.images,) * 3
    assert group.trajectories[0].reward == 1.0


def places(ids):
    """First placeholders of images, and their numbers."""
    starts = np.flatnonzero(np.diff((ids == PAD).astype(int), prepend=0) == 1)
    stops = np.flatnonzero(np.diff((ids == PAD).astype(int), append=0) == -1) + 1
    return [(int(start), int(stop - start)) for start, stop in zip(starts, stops, strict=True)]


def test_images_of_prompt_and_tools_stay_through_all_turns(prompt, tokenizer):
    engine = SeeingEngine(tokenizer, f"Look. {CALL}", f"Again. {CALL}", "It is 1.")
    loop = ToolsLoop(ToolsOptions(), toolbox=ToolBox([zoom]))
    group = run(loop, engine, prompt, tokenizer)
    assert (group.failures, group.num_audited) == ((), 1)
    (trajectory,) = group.trajectories
    assert [len(request.images) for request in engine.requests] == [2, 3, 4]
    assert [(one.start, one.length) for one in trajectory.images] == places(trajectory.input_ids)
    assert trajectory.images[2].digest == trajectory.images[3].digest
    assert tokenizer.images.store.get(trajectory.images[2].digest) == picture(7)
    assert [one.digest for one in trajectory.images[:2]] == [one.digest for one in prompt.images]
    (text,) = tokenizer.decode([trajectory.input_ids], skip_special_tokens=False)
    shown = f"< |image_pad|>Closer:<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|><|im_end|>\n"
    assert text.count(f"<|im_start|>tool\n{shown}<|im_start|>assistant\n") == 2


def test_a_new_trajectory_keeps_the_prompts_images_and_those_of_its_turns(prompt, tokenizer):
    engine = SeeingEngine(tokenizer, *[f"Look. {CALL}"] * 5, "It is 1.", max_model_len=760)
    limits = TurnLimits(on_context_full="new_trajectory")
    group = run(ToolsLoop(ToolsOptions(limits=limits), toolbox=ToolBox([zoom])), engine, prompt, tokenizer)
    assert group.failures == ()
    assert len(group.trajectories) > 1
    for trajectory in group.trajectories:
        assert [(one.start, one.length) for one in trajectory.images] == places(trajectory.input_ids)
        assert [one.digest for one in trajectory.images[:2]] == [one.digest for one in prompt.images]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([{"type": "image", "image": b"no picture"}], "returned an image that cannot be used: an image cannot be dec"),
        ([{"type": "image", "image": picture(0, width=1, height=400)}], "used: .* refuses an image of 1 x 400 pixels"),
        ([{"type": "image", "path": "a.png"}], r"a tool's parts must be .* found parts of type \['image'\]"),
    ],
)
def test_an_image_of_a_tool_that_cannot_be_used_is_told_to_the_model(prompt, tokenizer, parts, told):
    @tool(name="zoom")
    def broken() -> list:
        """Returns something else."""
        return parts

    engine = SeeingEngine(tokenizer, CALL, "It is 1.")
    group = run(ToolsLoop(ToolsOptions(), toolbox=ToolBox([broken])), engine, prompt, tokenizer)
    (text,) = tokenizer.decode([group.trajectories[0].input_ids])
    assert re.search(f"Error: .*{told}", text)
    assert group.trajectories[0].extras["tool_calls"] == {"raised": 1}


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("", "raised", "Error: look returned an image, which this model does not take."),
        ("seen", "ok", "seen\n[images are left out, because this run shows none: 1]"),
    ],
)
def test_a_model_of_text_is_told_that_it_cannot_see(text, outcome, told):
    class Look:
        name, description, parameters = "look", "Looks.", {"type": "object"}

        async def call(self, _arguments):
            return TextAndImages(text, (picture(0),))

    from rl_rollout.tools import ToolCall, ToolRunner

    (result,) = asyncio.run(ToolRunner(ToolBox([Look()])).run([ToolCall(name="look")]))
    assert (result.outcome, result.images, result.text) == (outcome, (), told)


def test_sessions_with_images_are_scored_again_with_them(prompt, tokenizer):
    from rl_rollout.score_audit import ScoreAudit

    engine = SeeingEngine(tokenizer, "It is 1.")
    group = run(SingleTurnLoop(), engine, prompt, tokenizer)
    asyncio.run(ScoreAudit(engine, None, tolerance=1e-3).check(group.trajectories))
    assert engine.scored == [prompt.images]


@pytest.fixture
def session(prompt, tokenizer):
    """A session of three requests with images from prompt and tool, its spans, and the learner's images."""
    recorded = []

    class Recorded(SeeingEngine):
        async def generate(self, request):
            generations = await super().generate(request)
            recorded.extend(SampledSpan.of(request.input_ids, one, images=request.images) for one in generations)
            return generations

    engine = Recorded(tokenizer, f"Look. {CALL}", f"Again. {CALL}", "It is 1.")
    group = run(ToolsLoop(ToolsOptions(), toolbox=ToolBox([zoom])), engine, prompt, tokenizer)
    images = EngineImages(tokenizer.images.processor, tokenizer.images.store)
    return group.trajectories[0], recorded, images


def changed(images, index, **changes):
    return (*images[:index], replace(images[index], **changes), *images[index + 1 :])


def swapped(images):
    first, second, *others = images
    return (replace(first, digest=second.digest), replace(second, digest=first.digest), *others)


def test_a_turn_before_the_first_image_is_audited(prompt, tokenizer):
    """Only a tool shows an image, so the first request has none."""
    text = replace(prompt, input_ids=prompt.input_ids[prompt.input_ids != PAD], images=(), messages=())
    engine = SeeingEngine(tokenizer, f"Look. {CALL}", "It is 1.")
    group = run(ToolsLoop(ToolsOptions(), toolbox=ToolBox([zoom])), engine, text, tokenizer)
    assert (group.failures, group.num_audited) == ((), 1)
    assert [len(request.images) for request in engine.requests] == [0, 1]


def image_faults(trajectory, spans, other, missing):
    """Changes of the images of a trajectory or of one of its requests, with words of the message."""
    for place in range(4):
        mine, here = trajectory.images, f"image {place} "
        first = next(index for index, span in enumerate(spans) if place < len(span.images))
        yield "mine", None, mine[:place] + mine[place + 1 :], "an image is missing"
        yield "mine", None, changed(mine, place, digest=other), f"{here}is .* in its place"
        yield "mine", None, changed(mine, place, digest=missing), f"{missing}.* does not exist"
        yield "mine", None, changed(mine, place, start=mine[place].start + 1), "needs 6 tokens of id 5; found 5"
        yield "mine", None, changed(mine, place, length=5), "needs 6 tokens of id 5; found 5"
        sent = spans[first].images
        yield "sent", first, sent[:place] + sent[place + 1 :], f"image {place} .*is missing in the request"
        yield "sent", first, changed(sent, place, digest=other), f"{here}is .* in its place"
        yield "sent", first, changed(sent, place, start=sent[place].start + 1), f"{here}has 6 tokens from"
    for index in range(3):
        sent = spans[index].images
        yield "sent", index, swapped(sent), "image 0 .* is swapped"
        yield "sent", index, (*sent, replace(sent[0], start=1)), "which is missing in the trajectory"
        yield "sent", index, (), "image 0 .* is missing in the request"
        yield "pixels", index, "0" * 64, r"other pixel values \(digest 000000000000\)"
        yield "pixels", index, "", r"other pixel values \(digest none\)"
    mine = trajectory.images
    yield "mine", None, swapped(mine), "image 0 .* is swapped"
    yield "mine", None, (), "an image is missing"
    yield "mine", None, (*mine, replace(mine[0], start=0)), "one after the other"


def test_all_of_50_faults_in_images_are_named(session, tokenizer):
    trajectory, spans, images = session
    other, missing = tokenizer.images.store.put(picture(11)), "f" * 64
    audit_session([trajectory], spans, images=images)
    found = list(image_faults(trajectory, spans, other, missing))
    assert len(found) == 50
    for number, (what, index, value, words) in enumerate(found):
        row, sent = trajectory, list(spans)
        if what == "mine":
            row = replace(trajectory, images=value)
        elif what == "sent":
            _, digest = images.placed(spans[index].input_ids, spans[index].images)
            sent[index] = replace(spans[index], images=value, pixel_digest=digest)
        else:
            sent[index] = replace(spans[index], pixel_digest=value)
        with pytest.raises(DataError, match=words) as refused:
            audit_session([row], sent, images=images)
        assert "/0/0: " in str(refused.value), number


def test_wrong_pixels_of_an_engine_are_named(session, tokenizer, monkeypatch):
    trajectory, spans, images = session
    audit_images(trajectory, spans, images)  # which keeps the true pixel values
    processor = tokenizer.images.processor
    true_pixels = processor.pixels
    monkeypatch.setattr(processor, "pixels", lambda data: {**true_pixels(data), "pixel_values": np.zeros((24, 1176))})
    wrong = EngineImages(processor, tokenizer.images.store)
    told = [replace(one, pixel_digest=wrong.placed(one.input_ids, one.images)[1]) for one in spans]
    with pytest.raises(DataError, match=r"computed the request with \d+ input tokens with other pixel values"):
        audit_images(trajectory, told, images)


def test_the_fault_that_is_named_is_of_a_request_that_is_needed(session):
    trajectory, spans, images = session
    again = replace(spans[0], images=swapped(spans[0].images))  # proves what the first request proves
    wrong = replace(spans[1], pixel_digest="0" * 64)
    audit_images(trajectory, [spans[0], again, *spans[1:]], images)
    with pytest.raises(DataError, match=f"computed the request with {len(wrong.input_ids)} input tokens with other"):
        audit_images(trajectory, [spans[0], again, wrong, spans[2]], images)


def test_an_image_whose_file_has_changed_is_named(session, tokenizer):
    trajectory, spans, _ = session
    store = tokenizer.images.store
    digest = trajectory.images[1].digest
    (store.folder / digest[:2] / digest).write_bytes(picture(1)[:-1] + b"x")
    images = EngineImages(tokenizer.images.processor, ImageStore(store.folder))
    with pytest.raises(DataError, match="its bytes have changed"):
        audit_images(trajectory, spans, images)


def test_a_session_that_samples_a_placeholder_fails(prompt, tokenizer):
    engine = SeeingEngine(tokenizer, "It is <|image_pad|> 1.")
    group = run(SingleTurnLoop(), engine, prompt, tokenizer)
    (reason,) = group.failures
    assert reason == "the policy sampled token 5, the placeholder of images, which stands for no image here"
    assert group.num_audit_failures == 0
