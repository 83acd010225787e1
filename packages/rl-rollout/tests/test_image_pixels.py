"""What the model sees of an image: how it is decoded, and how many tokens it takes."""

import io
import json

import numpy as np
import pytest
from image_families import IMAGE_FAMILIES, make_image_family
from PIL import Image

from rl_core.errors import DataError
from rl_core.images import ImageProcessor, ImageStore, open_image
from rl_rollout.prompts import PromptOptions, PromptTokenizer, load_prompts

WHITE, RED = (255, 255, 255), (200, 0, 0)
SIZES = ((28, 28), (100, 3), (3, 100), (1, 1), (57, 111), (640, 480), (333, 1000), (1200, 31))
"""Widths and heights; the families' own limits are 56 x 56 and 112 x 112 pixels."""


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def blank(size):
    return encoded(Image.new("RGB", size, RED))


@pytest.fixture(scope="module")
def processor(vision_folder):
    return ImageProcessor.load(vision_folder)


def test_grayscale_of_16_bits_keeps_its_shades():
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    seen = np.asarray(open_image(encoded(Image.fromarray(values))))
    assert seen.tolist() == [[[shade] * 3 for shade in (0, 0, 1, 128, 255)]]
    seen = np.asarray(open_image(encoded(Image.fromarray(values), transparency=256)))
    assert seen[0, :, 0].tolist() == [0, 0, 255, 128, 255]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_of_an_unknown_range_are_refused(monkeypatch, mode):
    monkeypatch.setattr("rl_core.images.store.FORMATS", ("TIFF",))
    with pytest.raises(DataError, match=rf"Pillow's mode '{mode}', whose range is unknown"):
        open_image(encoded(Image.new(mode, (2, 2)), "TIFF"))


def test_transparent_pixels_are_white():
    colors = Image.new("RGBA", (3, 1))
    for place, alpha in enumerate((0, 255, 51)):
        colors.putpixel((place, 0), (*RED, alpha))
    expected = [WHITE, RED, (244, 204, 204)]
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        assert [open_image(encoded(colors, kind, **options)).getpixel((place, 0)) for place in range(3)] == expected
    gray = Image.new("LA", (1, 1), (10, 0))
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([*WHITE, *RED])
    for data in (encoded(gray), encoded(palette, transparency=1), encoded(palette, "GIF", transparency=1)):
        assert open_image(data).getpixel((0, 0)) == WHITE
    assert open_image(encoded(palette)).getpixel((0, 0)) == RED


def test_the_error_of_a_damaged_image_is_the_same_in_each_process():
    with pytest.raises(DataError, match=r"decoded \(UnidentifiedImageError: cannot identify image file\); expected"):
        open_image(b"no image")


def test_an_image_that_the_processor_refuses_is_named(processor):
    refused = r"processor refuses an image of 1 x 400 pixels \(ValueError: absolute aspect ratio .*\). Change its size"
    for of_image in (processor.num_tokens, processor.pixels):
        with pytest.raises(DataError, match=refused):
            of_image(blank((1, 400)))


def test_a_prompt_whose_image_the_processor_refuses_is_named(vision_folder, tmp_path):
    (tmp_path / "thin.png").write_bytes(blank((1, 400)))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "<image>?"}], "images": ["thin.png"]}))
    options = PromptOptions(max_tokens=50, requires_ground_truth=False)
    with pytest.raises(DataError, match=r"rows.jsonl, line 1, field `prompt`: .* refuses an image of 1 x 400 pixels"):
        load_prompts([path], PromptTokenizer.load(vision_folder), options)


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_tokens_are_counted_as_the_processor_computes_them(name, tmp_path):
    """Qwen's and GLM's images need no pixels to be counted; the text around an image of others is computed."""
    make_image_family(name, tmp_path)
    processor = ImageProcessor.load(tmp_path)
    for size in SIZES:
        text, count = processor._computed(size)
        assert (processor.expanded(processor._processor.image_token, [blank(size)])) == text
        assert processor.num_tokens(blank(size)) == count == (processor._tokens(text) == processor.token_id).sum()
        assert processor.pixels(blank(size))
    assert processor._is_counted == (name not in ("gemma3", "internvl"))


def test_counting_computes_no_pixels(processor, monkeypatch):
    assert processor.num_tokens(blank((84, 56))) == 6
    monkeypatch.setattr(processor._processor, "image_processor", CountsOnly(processor._processor.image_processor))
    assert processor.num_tokens(blank((56, 84))) == 6


class CountsOnly:
    """Counts patches as another processor does."""

    def __init__(self, processor):
        self.merge_size = processor.merge_size
        self.get_number_of_image_patches = processor.get_number_of_image_patches


def test_a_processor_that_counts_otherwise_than_it_computes_is_not_asked(vision_folder, monkeypatch):
    processor = ImageProcessor.load(vision_folder)
    monkeypatch.setattr(processor._processor.image_processor, "get_number_of_image_patches", lambda *_: 8)
    assert processor.num_tokens(blank((84, 56))) == 6


def test_a_count_that_is_wrong_for_some_sizes_reaches_no_model(vision_folder, monkeypatch):
    processor = ImageProcessor.load(vision_folder)
    counted = processor._processor.image_processor.get_number_of_image_patches
    off = {(56, 84): 4}
    monkeypatch.setattr(
        processor._processor.image_processor,
        "get_number_of_image_patches",
        lambda height, width, kwargs: counted(height, width, kwargs) + off.get((height, width), 0),
    )
    assert processor.pixels(blank((56, 84)))
    with pytest.raises(DataError, match="gives an image of 84 x 56 pixels other placeholders than it counts"):
        processor.pixels(blank((84, 56)))


def test_a_refused_image_is_not_kept(vision_folder, tmp_path):
    images = PromptTokenizer.load(vision_folder, image_folder=tmp_path / "images").images
    with pytest.raises(DataError, match="1 x 400"):
        images.put(blank((1, 400)))
    assert not (tmp_path / "images").exists()
    assert ImageStore(tmp_path / "images").get(images.put(blank((56, 56)))) == blank((56, 56))
