import pytest

from rl_core.errors import SettingsError
from rl_metrics.output_file import check_output


@pytest.mark.parametrize("name", ["a.svg", "A.PNG", "b.jsonl.png"])
def test_files_with_an_ending_are_taken(tmp_path, name):
    check_output(tmp_path / name, what="the image", endings=(".svg", ".png"))


@pytest.mark.parametrize("name", ["a", "a.jsonl", "a.svg.part", ".svg"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(SettingsError, match=r"the image must end in \.svg or \.png; found .*Name another file"):
        check_output(tmp_path / name, what="the image", endings=(".svg", ".png"))


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "a.svg").mkdir()
    for folder in (tmp_path, tmp_path / "a.svg"):
        with pytest.raises(SettingsError, match=r"is a folder. Name a file in it, such as .*/image\.svg"):
            check_output(folder, what="the image", endings=(".svg", ".png"))


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"existing folder; found .*missing\. Create it first"):
        check_output(tmp_path / "missing" / "a.svg", what="the image", endings=(".svg", ".png"))
