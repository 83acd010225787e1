import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_metrics.cli import main
from rl_metrics.comparison.plot import COLORS, Plot, ReferenceLine, plot_runs

SVG = "{http://www.w3.org/2000/svg}"
ACC = "val-core/arithmetic/acc/mean@1"


@pytest.fixture
def runs(tmp_path):
    """Write two runs of five steps; the second has no entropy."""
    for name, scale in (("grpo", 0.1), ("distilled", 0.2)):
        rows = [{"step": step, "time": 1000.0 + 10 * step, ACC: scale * step} for step in range(1, 6)]
        if name == "grpo":
            rows = [{**row, "actor/entropy": 3.0, "timing_s/step": 4.0} for row in rows]
        write(tmp_path / name, rows)
    return [tmp_path / "grpo", tmp_path / "distilled"]


def write(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def drawn(folders, tmp_path, **plot):
    output = tmp_path / "plot.svg"
    plot_runs(folders, output, plot=Plot(**{"metrics": [ACC], **plot}))
    return output.read_text()


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def curves(svg):
    """Return the points of each coloured curve, in the picture's units."""
    found = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        color = re.search("stroke: (#[0-9a-f]{6})", path.get("style", ""))
        points = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
        if color and color[1].upper() in COLORS[:2] and len(points) > len(found.get(color[1].upper(), [])):
            found[color[1].upper()] = points
    return found


def test_a_panel_shows_a_line_a_run_with_names_unit_and_step(runs, tmp_path):
    svg = drawn(runs, tmp_path, metrics=[ACC, "actor/entropy"])
    shown = texts(svg)
    assert shown.count("grpo") == 2
    assert shown.count("distilled") == 1  # only in one panel: it has no entropy
    assert {ACC, "actor/entropy", "step", "nats", "value"} <= set(shown)


def test_points_stand_where_their_values_are(runs, tmp_path):
    found = curves(drawn(runs, tmp_path))
    low, high = (found[color] for color in COLORS[:2])
    assert len(low) == len(high) == 5
    assert [x for x, _ in low] == pytest.approx([x for x, _ in high])
    steps = [b - a for (a, _), (b, _) in pairwise(low)]
    assert steps == pytest.approx([steps[0]] * 4)
    rises = [points[0][1] - points[-1][1] for points in (low, high)]  # y grows downwards
    assert rises[1] == pytest.approx(2 * rises[0], rel=1e-4)


def test_time_runs_from_the_beginning_of_the_first_step(runs, tmp_path):
    svg = drawn(runs, tmp_path, across="wall_s")
    assert "time since the first step began (s)" in texts(svg)
    low, high = (curves(svg)[color] for color in COLORS[:2])
    gap = low[1][0] - low[0][0]  # 10 s
    assert low[0][0] - high[0][0] == pytest.approx(0.4 * gap, rel=1e-3)  # the other run does not record its step time


def test_labels_and_reference_lines_are_named_as_they_are_given(runs, tmp_path):
    lines = [ReferenceLine.parse(text) for text in ("0.9:teacher, 7B", f"{ACC}=0.81:0.9 of it", "actor/entropy=1e-1")]
    shown = texts(drawn(runs, tmp_path, metrics=[ACC, "actor/entropy"], labels=["_a $x", "b <&>"], lines=lines))
    assert shown.count("teacher, 7B") == 2
    assert shown.count("0.9 of it") == 1
    assert shown.count("0.1") >= 1
    assert shown.count("_a $x") == 2
    assert shown.count("b <&>") == 1


def test_the_same_runs_give_the_same_bytes_whatever_the_users_matplotlib_is_told(runs, tmp_path):
    import matplotlib

    first = {suffix: picture(runs, tmp_path / f"first.{suffix}") for suffix in ("svg", "png")}
    before = matplotlib.rcParams["lines.linewidth"], matplotlib.rcParams["font.size"]
    try:
        matplotlib.rcParams.update({"font.size": 20, "svg.hashsalt": None})
        again = {suffix: picture(runs, tmp_path / f"again.{suffix}") for suffix in ("svg", "png")}
        assert matplotlib.rcParams["font.size"] == 20
    finally:
        matplotlib.rcParams.update({"lines.linewidth": before[0], "font.size": before[1]})
    assert first == again
    assert b"matplotlib.org" not in first["png"]
    assert not re.search(rb"20\d\d-\d\d-\d\d", first["svg"])


def picture(runs, output):
    plot_runs(runs, output, plot=Plot(metrics=[ACC]))
    return output.read_bytes()


def test_another_process_gives_the_same_bytes(runs, tmp_path):
    output = tmp_path / "deeper" / "other.svg"
    output.parent.mkdir()
    command = [sys.executable, "-m", "rl_metrics", "plot", *map(str, runs), "--metric", ACC, "--output", str(output)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert output.read_bytes() == picture(runs, tmp_path / "here.svg")
    assert [file.name for file in output.parent.iterdir()] == ["other.svg"]


def test_a_torn_last_line_and_repeated_steps_are_read_as_the_run_stands(runs, tmp_path):
    expected = picture(runs, tmp_path / "whole.svg")
    file = runs[0] / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    wrong = json.dumps({"step": 4, "time": 1040.0, ACC: 0.99}) + "\n"  # overwritten by a resume from step 3
    file.write_text("".join([*lines[:3], wrong, *lines[3:]]) + '{"step": 6, "val-core/ari')
    assert picture(runs, tmp_path / "torn.svg") == expected


def test_values_that_are_not_finite_leave_a_gap_not_a_point(tmp_path):
    values = [0.1, None, 0.3, math.nan, 0.5]
    write(tmp_path / "run", [{"step": i, "time": 1.0 * i, ACC: value} for i, value in enumerate(values)])
    assert len(curves(drawn([tmp_path / "run"], tmp_path))[COLORS[0]]) == 3


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write(tmp_path / parent / "run", [{"step": 1, "time": 1.0, ACC: 0.5}])
    shown = texts(drawn([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path))
    assert {"a/run", "b/run"} <= set(shown)


def test_a_glob_is_a_panel_for_each_metric_that_fits(tmp_path):
    names = ["actor/lr", "actor/entropy", "critic/x", "val-core/a/acc/mean@1", "val-core/a/acc/mean@1/ci_low"]
    write(tmp_path / "run", [{"step": step, "time": 1.0, **dict.fromkeys(names, 0.5)} for step in (1, 2)])
    shown = texts(drawn([tmp_path / "run"], tmp_path, metrics=["critic/x", "actor/*", "actor/lr", "val-core/*"]))
    titles = [text for text in shown if text in names]
    assert titles == ["critic/x", "actor/entropy", "actor/lr", "val-core/a/acc/mean@1"]


def test_a_metric_with_a_star_in_its_name_is_itself(tmp_path):
    write(tmp_path / "run", [{"step": 1, "time": 1.0, "actor/*": 0.5, "actor/lr": 0.5}])
    shown = texts(drawn([tmp_path / "run"], tmp_path, metrics=["actor/*"]))
    assert ("actor/*" in shown, "actor/lr" in shown) == (True, False)


def test_names_that_are_no_text_are_shown_with_the_replacement_character(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    write(folder, [{"step": 1, "a\ud800b": 1.0, "c\x00d": 1.0, "😀": 1.0}])
    write(other, [{"step": 1, "😀": 2.0}])
    svg = drawn([folder, other], tmp_path, metrics=["*"], labels=["a\udcff", "b"])
    assert {"a\ufffdb", "c\ufffdd", "😀", "a\ufffd"} <= set(texts(svg))


def test_a_file_of_metrics_is_a_run(runs, tmp_path):
    file = runs[0] / "metrics.jsonl"
    assert drawn([file, runs[1]], tmp_path) == drawn(runs, tmp_path)
    file.rename(runs[0] / "old.jsonl")
    assert {"old", "distilled"} <= set(texts(drawn([runs[0] / "old.jsonl", runs[1]], tmp_path)))


def test_globs_that_fit_nothing_or_too_much_are_refused(tmp_path):
    write(tmp_path / "run", [{"step": 1, "time": 1.0, **{f"a/{index}": 0.5 for index in range(51)}}])
    with pytest.raises(SettingsError, match=r"at most 50 panels; found 51 metrics that match a/\*"):
        drawn([tmp_path / "run"], tmp_path, metrics=["a/*"])
    with pytest.raises(DataError, match=r"'b/\*' has no value in run"):
        drawn([tmp_path / "run"], tmp_path, metrics=["b/*"])


def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(runs, tmp_path):
    empty = tmp_path / "empty"
    write(empty, [{"event": "no step"}])
    with pytest.raises(DataError, match=r"nowhere must be a run's folder with a metrics\.jsonl"):
        drawn([tmp_path / "nowhere"], tmp_path)
    with pytest.raises(DataError, match="must have lines of steps"):
        drawn([empty], tmp_path)
    with pytest.raises(DataError, match=r"'actor/entropi' has no value in grpo, distilled; .* 'actor/entropy'"):
        drawn(runs, tmp_path, metrics=["actor/entropi"])
    with pytest.raises(SettingsError, match="found 1 for 2 runs"):
        drawn(runs, tmp_path, labels=["one"])
    with pytest.raises(SettingsError, match="labels must differ; found 'one' more than once"):
        drawn(runs, tmp_path, labels=["one", "one"])
    with pytest.raises(SettingsError, match="each run must be given once"):
        drawn([runs[0], runs[0]], tmp_path)
    with pytest.raises(SettingsError, match="which is not drawn"):
        drawn(runs, tmp_path, lines=[ReferenceLine(value=1.0, metric="actor/lr")])
    with pytest.raises(SettingsError, match=r"end in \.svg or \.png; found 'plot.pdf'"):
        plot_runs(runs, tmp_path / "plot.pdf", plot=Plot(metrics=[ACC]))
    assert not list(tmp_path.glob("*plot*"))


@pytest.mark.parametrize("text", ["teacher", "nan", "=0.5", "a=b=0.5", "0.5:", ""])
def test_a_line_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match=r"such as 0\.9:teacher"):
        ReferenceLine.parse(text)


def test_without_matplotlib_the_error_says_what_to_install(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-metrics\[plot\]"):
        drawn(runs, tmp_path)


def test_the_command_says_what_is_wrong_and_exits_with_2(runs, tmp_path, capsys):
    output = str(tmp_path / "plot.svg")
    assert main(["plot", str(runs[0]), "--metric", "actor/entropi", "--output", output]) == 2
    assert "the nearest recorded metric is 'actor/entropy'" in capsys.readouterr().err
    assert main(["plot", str(runs[0]), "--metric", ACC, "--line", "high", "--output", output]) == 2
    assert "found 'high'" in capsys.readouterr().err
    words = ["--label", "a", "--label", "b", "--x", "wall_s", "--line", "0.5:half"]
    assert main(["plot", *map(str, runs), *words, "--metric", ACC, "--output", output]) == 0
    assert {"a", "b", "half"} <= set(texts((tmp_path / "plot.svg").read_text()))
