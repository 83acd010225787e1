import base64
import functools
import http.server
import io
import json
import shutil
import threading

import numpy as np
import pytest
from PIL import Image

from rl_core.errors import DataError, SettingsError
from rl_core.images import ImageStore, open_image
from rl_core.images.store import image_size
from rl_rollout.prompts import PromptOptions, PromptTokenizer, fetched_images, load_prompts

PAD = 5


def picture(seed, *, width=84, height=56):
    encoded = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


@pytest.fixture(scope="module")
def tokenizer(vision_folder):
    return PromptTokenizer.load(vision_folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for seed in range(3):
        (tmp_path / f"images/{seed}.png").write_bytes(picture(seed))
    return tmp_path


@pytest.fixture
def load(folder, tokenizer):
    def load(*rows, **options):
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
        return load_prompts([path], tokenizer, PromptOptions(**{"max_tokens": 200, **options}))

    return load


def user(*content):
    return [{"role": "user", "content": list(content) if content and not isinstance(content[0], str) else content[0]}]


NAME = "images/0.png"
DATA = "data:image/png;base64," + base64.b64encode(picture(0)).decode()
TEXT = {"type": "text", "text": "how many?"}
SAME = [
    {"prompt": user({"type": "image"}, TEXT), "images": [NAME]},
    {"prompt": user({"type": "image", "text": None}, TEXT), "image": NAME},
    {"prompt": user({"type": "image", "image": NAME}, TEXT)},
    {"prompt": user({"type": "image", "path": NAME}, TEXT)},
    {"prompt": user({"type": "image", "url": f"file://{NAME}"}, TEXT)},
    {"prompt": user({"type": "image", "url": f"file://{NAME.replace('0', '%30')}"}, TEXT)},
    {"prompt": user({"type": "image_url", "image_url": {"url": DATA}}, TEXT)},
    {"prompt": user({"type": "image_url", "image_url": DATA}, TEXT)},
    {"prompt": user("<image>how many?"), "images": [{"path": NAME, "bytes": None}]},
    {"prompt": user("how many?"), "images": [{"image": NAME}]},
    {"prompt": user("how many?"), "images": [{"bytes": DATA.partition(",")[2]}]},
]


@pytest.mark.parametrize("row", SAME)
def test_every_form_of_an_image_gives_the_same_prompt(load, folder, tokenizer, row):
    (prompt,) = load(row)
    (span,) = prompt.images
    text = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>how many?<|im_end|>\n"
    assert tokenizer.decode([prompt.input_ids], skip_special_tokens=False) == [text + "<|im_start|>assistant\n"]
    assert (prompt.input_ids[span.start : span.start + span.length] == PAD).all()
    assert span.length == (prompt.input_ids == PAD).sum() == 6
    assert prompt.messages[0]["content"] == [{"type": "image", "digest": span.digest}, TEXT]
    json.dumps(dict(prompt.columns))


def test_the_images_of_prompts_that_are_taken_are_kept_by_digest(load, folder):
    prompts = load({"prompt": user("<image> or <image>?"), "images": [NAME, "images/1.png"]}, {"prompt": user("1?")})
    assert prompts.num_images == 2
    store = ImageStore(folder / "run")
    assert prompts[0].images
    assert not store.folder.exists()
    prompts.keep_images(store)
    first, second = prompts[0].images
    assert [store.get(first.digest), store.get(second.digest)] == [picture(0), picture(1)]
    assert first.start + first.length < second.start
    assert prompts[0].columns["images"] == [first.digest, second.digest]
    assert prompts[1].images == ()
    (folder / NAME).write_bytes(picture(9))
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: its images have changed"):
        prompts[0]


def test_tokens_of_images_count_for_the_limit(load):
    row = {"prompt": user("<image>?"), "images": [NAME]}
    (prompt,) = load(row)
    with pytest.raises(DataError, match=r"6 of them for images, more than max_tokens"):
        load(row, max_tokens=len(prompt.input_ids) - 1)
    assert load(row, {"prompt": user("?")}, max_tokens=len(prompt.input_ids) - 1, overlong="drop").num_dropped == 1


REFUSED = [
    ({"images": ["images/9.png"]}, r"line 2, field `images\[0\]`: .*9.png does not exist"),
    ({"images": ["rows.jsonl"]}, r"line 2, field `images\[0\]`: an image cannot be decoded .*expected one of PNG"),
    ({"images": ["/etc/hostname"]}, r"field `images\[0\]`: .* is not in .*prompts.image_folders"),
    ({"images": ["../x.png"]}, r"field `images\[0\]`: .* is not in "),
    ({"images": ["https://a.b/c.png"]}, r"field `images\[0\]`: 'https://a.b/c.png' is a URL, which is not fetched"),
    ({"images": [7]}, r"field `images\[0\]`: expected the bytes or the path of an image; found 7"),
    ({"images": ["data:image/png;base64,!"]}, r"field `images\[0\]`: a `data:` URL must have base64"),
    (
        {"images": ["data:image/png,x"]},
        r"field `images\[0\]`: a `data:` URL must have base64; found 'data:image",
    ),
    ({"images": ["data:image/png;base64,"]}, r"field `images\[0\]`: an image must have 1 to .*; found 0"),
    ({"images": [NAME] * 2}, r"field `images`: 2 images, but the messages have places for 1"),
    ({"images": [NAME] * 17, "prompt": user("<image>" * 17)}, "17 images, more than prompts.max_images = 16"),
    ({"prompt": user({"type": "image"}, {"type": "image"})}, r"field `prompt\[0\].content\[1\]`: a place for an image"),
    ({"prompt": user({"type": "video", "video": "a"})}, r"`prompt\[0\].content\[1\]`: expected a part of type 'text'"),
    (
        {"prompt": user("<image><|image_pad|>")},
        r"field `prompt`: a prompt with 1 images must have as many placeholders",
    ),
    (
        {"images": [{"image": NAME, "max_pixels": 100}]},
        r"field `images\[0\]`: max_pixels of one image is not supported",
    ),
    ({"image": NAME}, r"images must be in one column; found images and image"),
    ({"videos": ["a.mp4"], "images": []}, r"field `videos`: videos are not supported"),
    (
        {"prompt": user("how<|image_pad|> many?"), "images": []},
        r"field `prompt`: token 5 stands for an image, and the row",
    ),
    ({"prompt": "<image>?"}, r'field `prompt`: a prompt with images must be a list of .*plain_prompts = "chat"'),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_an_image_that_cannot_be_used_is_refused_with_file_row_and_field(load, row, reason):
    if reason.startswith((r"`prompt\[0\].content\[1\]`", r"field `prompt\[0\]")):
        row = {**row, "prompt": user({"type": "image"}, *row["prompt"][0]["content"][-1:])}
    with pytest.raises(DataError, match=r"rows.jsonl, line 2.*" + reason.removeprefix("line 2, ")):
        load({"prompt": user("1?")}, {"prompt": user("<image>?"), "images": [NAME], **row})


def test_images_in_other_folders_are_read_if_allowed(load, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "a.png").write_bytes(picture(4))
    row = {"prompt": "<image>?", "images": [str(other / "a.png")]}
    (prompt,) = load(row, image_folders=(other,), plain_prompts="chat")
    assert len(prompt.images) == 1


def test_a_crashing_decoder_ends_only_its_trial(load, folder, monkeypatch):
    script = folder / "crash.py"
    script.write_text(
        "import os, signal\n\ndef main(files):\n    print(f'decoding the image at {files[0][1]}')\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setattr("rl_rollout.prompts.row_images.TRIAL", script)
    with pytest.raises(DataError, match=r"the image at .*rows.jsonl, line 1, field `images\[0\]` crashed .* SIGSEGV"):
        load({"prompt": user("<image>?"), "images": [NAME]})


def test_a_model_of_text_refuses_images_and_keeps_other_columns(folder, tied_model_dir):
    path = folder / "rows.jsonl"
    text = PromptTokenizer.load(tied_model_dir, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"prompt": user({"type": "text", "text": "1"}, {"type": "text", "text": "+1"}), "answer": "2", "image": "x"}
    path.write_text(json.dumps(row))
    (prompt,) = load_prompts([path], text, PromptOptions(max_tokens=50))
    assert (prompt.messages[0]["content"], prompt.columns["image"]) == ("1+1", "x")
    path.write_text(json.dumps({"prompt": user("1+1"), "answer": "2", "images": [NAME]}))
    with pytest.raises(DataError, match=r"line 1, field `prompt`: .* takes no images"):
        load_prompts([path], text, PromptOptions(max_tokens=50))


def test_parquet_and_saved_datasets_with_images_are_read_undecoded(folder, tokenizer):
    datasets = pytest.importorskip("datasets")
    images = [
        [{"bytes": picture(0), "path": None}],
        [{"bytes": None, "path": str(folder / NAME)}, {"bytes": picture(2), "path": "x"}],
    ]
    rows = {"prompt": [user("<image>?"), user("<image><image>?")], "images": images, "answer": ["1", "2"]}
    features = datasets.Features(
        prompt=[{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        images=datasets.Sequence(datasets.Image(decode=True)),
        answer=datasets.Value("string"),
    )
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(str(folder / "rows.parquet"))
    table.save_to_disk(str(folder / "saved"))
    for name in ("rows.parquet", "saved"):
        one, two = load_prompts([folder / name], tokenizer, PromptOptions(max_tokens=200))
        (first,), others = one.images, two.images
        assert [span.digest == first.digest for span in others] == [True, False]


def test_the_uid_of_a_prompt_follows_from_its_images(load):
    uids = [load({"prompt": user("<image>?"), "images": [f"images/{seed}.png"]}).uids for seed in (0, 1, 0)]
    assert uids[0] == uids[2] != uids[1]


@pytest.fixture
def site(folder, monkeypatch):
    """Serve the folder; return its address and the paths that were asked for."""
    asked, released = [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            elif self.path == "/page.png" and asked.count(self.path) == 1:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<html>busy</html>")
            elif self.path == "/slow":
                while not released.wait(0.05):
                    self.wfile.write(b"H")
            elif self.path == "/torn":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"x")
            else:
                super().do_GET()

        def log_message(self, *_):
            """Say nothing."""

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        released.set()
        server.shutdown()
        thread.join()


def test_images_at_allowed_urls_are_fetched_once(load, site, folder):
    address, asked = site
    (folder / "a..b.png").write_bytes(picture(0))
    row = {"prompt": user("<image> <image>"), "images": [f"{address}a..b.png", f"{address}to/{address}{NAME}"]}
    for _ in range(2):
        (prompt,) = load(row, image_urls=(address,))
        assert prompt.images[0].digest == prompt.images[1].digest
    assert asked == ["/a..b.png", f"/to/{address}{NAME}", f"/{NAME}"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1.evil/a.png", "is a URL, which is not fetched.*prompts.image_urls"),
        ("to/http://127.0.0.1:1/a.png", "cannot be fetched .*redirects to 'http://127.0.0.1:1/a.png', which prompts"),
        ("none.png", "cannot be fetched .*404"),
        ("torn", "cannot be fetched .*99 bytes are missing"),
        ("page.png", "page.png': an image cannot be decoded"),
        ("images/../rows.jsonl", "is a URL, which is not fetched"),
        ("images/%2e%2e/rows.jsonl", "is a URL, which is not fetched"),
        ("slow", "slow' took longer than 0.3 s"),
    ],
)
def test_a_url_that_cannot_be_fetched_is_refused_with_its_row(load, site, url, reason, monkeypatch):
    if url == "slow":
        monkeypatch.setattr(fetched_images, "DEADLINE_S", 0.3)
    address, _ = site
    url = url if url.startswith("http:") else address + url
    with pytest.raises(DataError, match=r"line 1, field `images\[0\]`.*" + reason):
        load({"prompt": user("<image>?"), "images": [url]}, image_urls=(address,))


def test_a_page_instead_of_an_image_is_not_kept(load, site, folder):
    address, asked = site
    (folder / "page.png").write_bytes(picture(0))
    row = {"prompt": user("<image>?"), "images": [f"{address}page.png"]}
    with pytest.raises(DataError, match="cannot be decoded"):
        load(row, image_urls=(address,))
    assert load(row, image_urls=(address,)).num_images == 1
    assert asked == ["/page.png"] * 2


@pytest.mark.parametrize("place", ["https:///", "http:// /", "https://a.b", "file:///", "/images/", "https://"])
def test_a_beginning_of_urls_ends_with_a_slash(load, place):
    with pytest.raises(SettingsError, match=r"prompts.image_urls must have beginnings of URLs"):
        load({"prompt": "1?"}, image_urls=(place,))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_image_is_turned_as_its_metadata_says(orientation):
    """A camera writes what its sensor saw, and how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = io.BytesIO()
    pixels = np.asarray(Image.open(io.BytesIO(picture(0, width=3, height=2))))
    Image.fromarray(pixels).save(encoded, "PNG", exif=exif)
    turns = {1: pixels, 3: pixels[::-1, ::-1], 6: pixels[::-1].swapaxes(0, 1), 8: pixels.swapaxes(0, 1)[::-1]}
    turned = open_image(encoded.getvalue())
    assert image_size(encoded.getvalue()) == turned.size
    assert np.array_equal(np.asarray(turned), turns[orientation])


def test_an_image_whose_file_is_torn_is_written_again(tmp_path):
    store = ImageStore(tmp_path)
    digest = store.put(picture(0))
    (file,) = tmp_path.glob("*/*")
    file.write_bytes(bytes(file.stat().st_size))
    assert store.put(picture(0)) == digest
    assert store.get(digest) == picture(0)
    assert [one.name for one in tmp_path.glob("*/*")] == [digest]


def test_another_image_processor_gives_another_fingerprint(load, folder, vision_folder, tmp_path):
    rows = [{"prompt": user("<image>?"), "images": [NAME]}]
    changed = tmp_path / "changed"
    shutil.copytree(vision_folder, changed)
    settings = json.loads((changed / "preprocessor_config.json").read_text())
    (changed / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4] * 3}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": "1"}) + "\n" for row in rows))
    found = []
    for model in (vision_folder, vision_folder, changed):
        tokenizer = PromptTokenizer.load(model, image_folder=tmp_path)
        prompts = load_prompts([folder / "rows.jsonl"], tokenizer, PromptOptions(max_tokens=200))
        found.append((prompts.fingerprint, tokenizer.fingerprint["images"]))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]
    assert "images" not in PromptTokenizer.load(vision_folder).fingerprint


def test_places_for_images_without_a_column_are_counted(load):
    misnamed = {"prompt": user("<image>how many?"), "img": [NAME]}
    assert load(misnamed, {"prompt": user("<image>?"), "images": [NAME]}, {"prompt": "1?"}).num_unplaced == 1
