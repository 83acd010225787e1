"""Collect wheels for a GPU machine without a network: `nox -s gpu -- --wheels DIR --python 3.12 [--have NAME,NAME]`.

The folder gets the wheels of locks/gpu.txt as a tar split into small pieces, their checksums, and install.sh, which
joins the pieces and installs the wheels beside the machine's own torch. It needs only pip.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "locks" / "gpu.txt"
PLATFORMS = (
    *(f"{name}_x86_64" for name in ("linux", "manylinux1", "manylinux2010", "manylinux2014")),
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 32, 34, 35, 36, 38, 39)),
)
"""Platform tags to pass to pip, which cannot detect those of another machine."""
THEIRS = re.compile(r"(torch|triton|nvidia[-_].*|cuda[-_].*)-")
"""Names of wheels that depend on the machine's GPU and must not replace its own."""
PIECE_MB = 45
CHUNK = 1 << 20
INSTALL = """\
#!/bin/sh
# sh install.sh [FOLDER]: installs the wheels for Python {python} and torch 2.11 or newer on x86_64 into a folder, by
# default site beside this file.
# PYTHON=/path/to/python names the interpreter that has torch; python3 where none is named.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
site=${{1:-$here/site}}
torn() {{ echo "a piece is missing or torn; copy it again" >&2; exit 1; }}
(cd "$here" && sha256sum --quiet --check SHA256SUMS) || torn
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = {python} ] || {{ echo "these wheels are for Python {python}; $python is $found" >&2; exit 1; }}
wheels=$here/wheels
rm -rf "$wheels" && mkdir "$wheels"
cat "$here"/wheels.tar.* | tar -x -C "$wheels"
"$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
rm -rf "$wheels"
site=$(cd "$site" && pwd)
PYTHONPATH="$site" "$python" -c 'import {checked}'
echo "installed; in the checkout: export PYTHONPATH=$site && $python benchmarks/gpu.py --bench"
"""
CHECKED = ("torch", "megatron.core", "transformers", "zarr", "structlog", "pydantic", "pytest")


def main(words: Sequence[str]) -> int:
    """Collect the wheels; return 0 if the folder is complete."""
    parser = argparse.ArgumentParser(prog="nox -s gpu -- --wheels")
    parser.add_argument("folder", type=Path, help="output folder; must be empty or new")
    parser.add_argument(
        "--python", default="3.12", choices=["3.11", "3.12", "3.13"], help="Python version of the machine"
    )
    parser.add_argument("--have", default="numpy", help="comma-separated packages that the machine already has")
    parser.add_argument("--lock", type=Path, default=LOCK, help="file of name==version")
    parser.add_argument("--piece-mb", type=float, default=PIECE_MB, help="maximum size of a piece in MB")
    parser.add_argument("--check", default=",".join(CHECKED), help="modules that install.sh imports as a check")
    options = parser.parse_args(words)
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} must be empty; found {next(folder.iterdir()).name} in it. Name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    have = {name.strip().lower() for name in options.have.split(",")}
    pins = [pin for pin in options.lock.read_text().split() if pin.partition("==")[0] not in have]
    with tempfile.TemporaryDirectory() as place:
        if error := download(pins, Path(place), python=options.python):
            sys.stderr.write(f"error: {error}\n")
            return 1
        wheels = sorted(Path(place).glob("*.whl"))
        if theirs := [wheel.name for wheel in wheels if THEIRS.match(wheel.name)]:
            sys.stderr.write(
                f"error: {', '.join(theirs)} would shadow the machine's packages; remove them from the lock\n"
            )
            return 1
        pieces = write_pieces(wheels, folder, most=int(options.piece_mb * 1e6))
        names = [f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB" for wheel in wheels]
    sums = [f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}\n" for piece in pieces]
    (folder / "SHA256SUMS").write_text("".join(sums))
    checked = ", ".join(options.check.split(","))
    (folder / "install.sh").write_text(INSTALL.format(python=options.python, checked=checked))
    (folder / "README.md").write_text(readme(names, pieces, python=options.python))
    total = sum(piece.stat().st_size for piece in pieces) / 1e6
    print(f"{len(names)} wheels, {total:.0f} MB in {len(pieces)} pieces; on the machine: sh {folder.name}/install.sh")
    return 0


def download(pins: Sequence[str], folder: Path, *, python: str) -> str:
    """Download the wheels for another interpreter with pip; return the error, or "" on success."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *target, *pins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    return "" if done.returncode == 0 else "pip could not fetch all of locks/gpu.txt:\n" + "\n".join(said[-10:])


class Pieces(io.RawIOBase):
    """A writable stream that is split into files of a maximum size.

    Attributes:
        made: The files written so far.
    """

    def __init__(self, stem: Path, *, most: int) -> None:
        """Start without files.

        Args:
            stem: Path of the files, to which a number is added.
            most: Maximum size of a file in bytes.
        """
        self.made: list[Path] = []
        self._stem, self._most, self._left = stem, most, 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append, and start the next file when one is full."""
        rest = memoryview(data)
        while rest:
            if not self._left:
                self.made.append(self._stem.with_name(f"{self._stem.name}.{len(self.made):02d}"))
                self._left = self._most
            part, rest = rest[: self._left], rest[self._left :]
            with self.made[-1].open("ab") as file:
                file.write(part)
            self._left -= len(part)
        return len(data)


def write_pieces(wheels: Sequence[Path], folder: Path, *, most: int) -> list[Path]:
    """Write the wheels as one tar in several files, to be concatenated in the order of their names."""
    out = Pieces(folder / "wheels.tar", most=most)
    with tarfile.open(fileobj=out, mode="w|", bufsize=CHUNK) as tar:
        for wheel in wheels:
            tar.add(wheel, arcname=wheel.name)
    return out.made


def readme(names: Sequence[str], pieces: Sequence[Path], *, python: str) -> str:
    """Return the folder's README."""
    lines = [
        f"Wheels for an x86_64 GPU machine with Python {python}, torch 2.11 or newer, and no network.",
        "",
        f"Copy the whole folder ({len(pieces)} pieces, install.sh, SHA256SUMS) and run `sh install.sh`. It joins the",
        "pieces, installs the wheels into the folder site here, and imports them; `sh install.sh FOLDER` installs them",
        "into another folder. The torch of the machine stays as it is.",
        "",
        *(f"- {name}" for name in names),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
