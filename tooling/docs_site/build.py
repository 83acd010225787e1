"""Build the site: `python -m tooling.docs_site.build`, in the environment of locks/docs.txt."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sphinx.cmd.build import main as run_sphinx

from tooling.docs_site.stage import stage

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Stage and build the site, and print its path; a broken link or reference is an error."""
    parser = argparse.ArgumentParser(prog="nox -s docs --", description="Build the documentation site.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".nox/site", help="output folder")
    parser.add_argument("--serve", action="store_true", help="then serve it on loopback until Ctrl-C")
    options = parser.parse_args()
    started = time.monotonic()
    pages, made, read = (options.folder / name for name in ("pages", "html", "read"))
    for folder in (pages, made, read):  # Sphinx warns only about pages that it reads
        shutil.rmtree(folder, ignore_errors=True)
    if problems := stage(ROOT, pages):
        sys.stderr.write("\n".join(["Docstrings are wrong:", *problems, ""]))
        return 1
    words = ["-c", str(Path(__file__).parent), "-d", str(read), "--fail-on-warning", "--quiet", "-b", "html"]
    if failed := run_sphinx([*words, str(pages), str(made)]):
        return failed
    sys.stdout.write(f"Built in {time.monotonic() - started:.0f} s: {made / 'index.html'}\n")
    if options.serve:
        serve(made)
    return 0


def serve(folder: Path) -> None:
    """Serve a folder on loopback, on a port that the system chooses."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}/\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    sys.exit(main())
