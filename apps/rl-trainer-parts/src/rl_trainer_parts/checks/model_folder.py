"""What can be refused of a model's folder before it is loaded."""

from collections.abc import Iterator
from pathlib import Path

from rl_core.errors import DataError
from rl_core.files import read_json_object


def check_policy_folder(path: Path, *, setting: str) -> Iterator[str]:
    """Problems of a Hugging Face folder, in words."""
    if not path.is_dir():
        yield f"{setting}: {path} is not a folder (looked in {Path.cwd()})."
        return
    config = path / "config.json"
    if not config.is_file():
        yield f"{setting}: {path} has no config.json, so it is not a Hugging Face model folder."
    else:
        try:
            read_json_object(config)
        except DataError as error:
            yield f"{setting}: {error}"
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield (
            f"{setting}: {path} has no tokenizer (tokenizer.json); copy the tokenizer's files of the model that it "
            "came from into it."
        )
    if not any(path.glob("*.safetensors")):
        yield f"{setting}: {path} has no *.safetensors weights; other formats can run code and are not read."
