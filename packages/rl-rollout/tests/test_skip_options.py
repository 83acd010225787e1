"""Invalid options of a skip cache, and their error messages."""

import pytest

from rl_core.errors import SettingsError
from rl_rollout.skip import SkipCache, SkipOptions


def test_the_defaults_are_possible_and_do_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SkipOptions().check()
    SkipCache(SkipOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "replay"}, "action of .* must be one of 'cache', 'repeat', 'repeat_last'; found 'replay'"),
        ({"on_mismatch": "warn"}, "on_mismatch of .* must be one of 'error', 'regenerate', 'accept'; found 'warn'"),
        ({"on_broken": "accept"}, "on_broken of .* must be one of 'regenerate', 'error'; found 'accept'"),
        ({"directory": ""}, "directory must name a folder or a URL; found ''"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, or none; found 0"),
        ({"max_bytes": True}, "max_bytes of .* must be a whole number or a string or None"),
        ({"max_bytes": "2X"}, "max_bytes: expected a size such as 500000, 500M, 1.5GB or 20Gi; found '2X'"),
        ({"directory": "a\0b"}, "directory must name a folder or a URL"),
        ({"steps": "4-2"}, "ascending ranges"),
        ({"steps": []}, "steps must be numbers from 1 or ascending ranges; found ''"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_it_must_be(tmp_path, options, message):
    with pytest.raises(SettingsError, match=message):
        SkipCache(SkipOptions(**{"directory": str(tmp_path), **options}))


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(SettingsError) as caught:
        SkipOptions(directory="", steps="c", max_bytes=-1).check()
    assert len(str(caught.value).splitlines()) == 3
