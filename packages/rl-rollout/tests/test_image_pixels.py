"""What the model sees of an image: how it is decoded."""

import io

import numpy as np
import pytest
from PIL import Image

from rl_core.errors import DataError
from rl_core.images import open_image

WHITE, RED = (255, 255, 255), (200, 0, 0)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


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
