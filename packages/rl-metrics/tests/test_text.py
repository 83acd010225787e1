import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics.trackers.console import plain_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\frac{1}{2} [bold]é 数 <b>", r"\frac{1}{2} [bold]é 数 <b>"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31mred\x07\x00", r"\x1b[31mred\x07\x00"),
        ("abc\u202edef\u2028\ud800", r"abc\u202edef\u2028\ud800"),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_is_escaped(text, shown):
    assert plain_text(text, limit=100) == shown


def test_the_middle_of_a_long_text_is_cut():
    assert plain_text("0123456789" * 100, limit=15) == "01234 ... 56789"
    assert plain_text("x" * 15, limit=15) == "x" * 15
    assert plain_text("\n" * 15, limit=15) == r"\n\n\ ... n\n\n"


@given(text=st.text(), limit=st.integers(5, 40))
def test_it_is_one_line_that_fits(text, limit):
    shown = plain_text(text, limit=limit)
    assert len(shown) <= limit
    assert shown.isprintable()
