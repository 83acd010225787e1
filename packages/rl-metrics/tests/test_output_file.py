import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_metrics.report.writing import check_output


@pytest.mark.parametrize("name", ["a.html", "A.HTML", "b.jsonl.html"])
def test_files_with_an_ending_are_taken(tmp_path, name):
    assert refusal(check_output, tmp_path / name) is None


@pytest.mark.parametrize("name", ["a", "a.jsonl", "a.html.part", ".html"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(SettingsError, match=r"the report must end in \.html; found .*Name another file"):
        check_output(tmp_path / name)


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "a.html").mkdir()
    for folder in (tmp_path, tmp_path / "a.html"):
        with pytest.raises(SettingsError, match=r"is a folder. Name a file in it, such as .*/report\.html"):
            check_output(folder)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"existing folder; found .*missing\. Create it first"):
        check_output(tmp_path / "missing" / "a.html")
