"""Train the arithmetic example for 20 steps with each algorithm, and draw the curves of docs/algorithms.

nox -s train -- --trainer.steps=1                  # once: prepares the example's inputs
.nox/workspace/bin/python -m tooling.algorithm_curves [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_distill import ALGORITHMS
from rl_metrics.run_files import open_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "algorithms"
SETTINGS = "examples/arithmetic/settings.toml"
COMMON = ("--run.if_exists=archive", "--metrics.console=quiet", "--metrics.report=false", "--prompts.test=none")
OWN = {
    "ppo": ("--critic.learning_rate=3e-4",),
    "gdpo": (
        "--reward.function=",
        '--reward.parts=[{function = "examples/arithmetic/reward.py:reward", name = "right"}]',
        "--algorithm.weights={right = 1.0}",
    ),
}
"""Settings that an algorithm needs."""
CURVES = {"reward": "critic/rewards/mean", "validation": "val-core/arithmetic/reward/mean@1"}

WIDTH, HEIGHT, LEFT, BOTTOM = 480, 180, 34, 22


def main(names: Sequence[str]) -> None:
    """Train with these algorithms, or with all, and write a drawing for each."""
    for name in names or ALGORITHMS.names():
        history = open_run(train(name)).history
        curves = {
            label: dict(zip(history.steps.tolist(), history.values[metric].tolist(), strict=True))
            for label, metric in (
                ("reward", "critic/rewards/mean"),
                ("validation", "val-core/arithmetic/reward/mean@1"),
            )
        }
        (PAGES / "curves").mkdir(exist_ok=True)
        (PAGES / "curves" / f"{name}.svg").write_text(drawing(curves))
        sys.stdout.write(f"| [{ALGORITHMS.get(name).title}]({name}.md) | {first_and_last(curves['validation'])} |\n")


def train(name: str) -> Path:
    """Train 20 steps in a temporary folder, and return the run's folder."""
    parent = tempfile.mkdtemp(prefix="curves-")
    words = (f"--algorithm.name={name}", f"--run.directory={parent}", f"--run.name={name}")
    # The example's own choices for GRPO are not part of the other algorithms.
    paper = ALGORITHMS.get(name)
    kept = (f"--algorithm.aggregation={paper.aggregation}", f"--algorithm.kl_coefficient={paper.kl_coefficient}")
    program = (sys.executable, "-m", "rl_sync_trainer.main", "train", SETTINGS)
    subprocess.run((*program, *words, *kept, *COMMON, *OWN.get(name, ())), cwd=ROOT, check=True)
    return Path(parent, name)


def first_and_last(curve: Mapping[int, float]) -> str:
    """Return the first and the last value that is a number."""
    values = [value for value in curve.values() if value == value]
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def drawing(curves: Mapping[str, Mapping[int, float]]) -> str:
    """Return an SVG of curves between 0 and 1 over the steps."""
    last = max(step for curve in curves.values() for step in curve)
    across, up = (WIDTH - LEFT - 90) / last, HEIGHT - BOTTOM - 10

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + step * across, 10 + (1 - value) * up

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for value in (0.0, 0.5, 1.0):
        x, y = place(0, value)
        parts.append(f'<path d="M{x:.0f} {y:.0f}H{place(last, 0)[0]:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="4" y="{y + 4:.0f}" fill="#555">{value:.1f}</text>')
    steps = {step: place(step, 0)[0] - 4 for step in range(0, last + 1, 5)}
    parts += [f'<text x="{x:.0f}" y="{HEIGHT - 6}" fill="#555">{step}</text>' for step, x in steps.items()]
    for (label, curve), color in zip(curves.items(), ("#999999", "#1f6feb"), strict=True):
        points = [place(step, value) for step, value in curve.items() if value == value]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{points[-1][0] + 6:.0f}" y="{points[-1][1] + 4:.0f}" fill="{color}">{label}</text>')
    return "\n".join((*parts, "</svg>\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
