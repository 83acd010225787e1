"""Fingerprint of a model folder, which identifies a teacher without reading all of its weights."""

import hashlib
import json
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.files import open_plain, read_json_object, read_plain, read_safetensors_header
from rl_core.record_fields import converts_arguments
from rl_distill.teacher.protocol import TeacherTraits

SAMPLE_BYTES = 4096
MAX_CONFIG_BYTES = 1 << 26


@converts_arguments
def model_fingerprint(folder: Path) -> str:
    """Return a hex digest of a folder's config.json and of each tensor's name, dtype, shape and three byte samples.

    Training changes all of a tensor, so samples from its beginning, middle and end suffice; reading a 70B model in full
    would take minutes at every start. File names and times are not included, so a copy is the same teacher.

    Raises:
        SettingsError: The folder has no config.json or no readable safetensors.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    try:
        if not files or not all(file.is_file() for file in (*files, folder / "config.json")):
            raise ValueError("a file is missing")
        config = read_plain(folder / "config.json", max_bytes=MAX_CONFIG_BYTES, error=SettingsError)
        digest.update(hashlib.sha256(config).digest())
        tensors: dict[str, bytes] = {}
        for file in files:
            tensors |= _tensors(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"{folder} must be a model folder with config.json and safetensors, so that its cached scores can be "
            f"found: {error}"
        ) from None
    for name in sorted(tensors):
        digest.update(hashlib.sha256(name.encode(errors="surrogatepass")).digest() + tensors[name])
    return digest.hexdigest()


def _tensors(file: Path) -> dict[str, bytes]:
    """Return a 32-byte digest of each tensor in a file, by name."""
    found = {}
    header = read_safetensors_header(file)
    with open_plain(file) as (stream, _):
        for name, tensor in header.items():
            digest = hashlib.sha256(json.dumps([tensor.dtype, tensor.shape]).encode())
            start, stop = tensor.start, tensor.stop
            for place in (start, (start + stop - SAMPLE_BYTES) // 2, stop - SAMPLE_BYTES):
                stream.seek(max(place, start))
                digest.update(stream.read(min(SAMPLE_BYTES, stop - start)))
            found[name] = digest.digest()
    return found


@converts_arguments
def model_traits(folder: Path) -> TeacherTraits:
    """Read a model's traits from the `config.json` of its folder.

    Raises:
        SettingsError: The file is unreadable or lacks one of the traits.
    """
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "max_tokens": "max_position_embeddings"}
    try:
        config = read_json_object(folder / "config.json")
        found = {ours: config[theirs] for ours, theirs in names.items()}
        if not all(type(value) is int and value > 0 for value in found.values()):
            raise ValueError(f"they must be whole numbers of at least 1; found {found}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SettingsError(
            f"{folder / 'config.json'} must have {', '.join(names.values())}, which a teacher with cached scores "
            f"needs ({type(error).__name__}: {error})."
        ) from None
    return TeacherTraits(**found)
