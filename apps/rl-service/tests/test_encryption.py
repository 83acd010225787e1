"""Downloads are encrypted for those whom the client names."""

import sys

import pytest

from rl_core.errors import MissingExtraError
from rl_rollout.gateway import RefusedError
from rl_service.encryption import encrypt_files


def test_files_are_replaced_by_encrypted_ones(tmp_path):
    pyrage = pytest.importorskip("pyrage", reason="pyrage is not installed (pip install pyrage)")
    identity, file = pyrage.x25519.Identity.generate(), tmp_path / "weights"
    file.write_bytes(b"secret")
    encrypt_files([file], [str(identity.to_public())])
    assert [one.name for one in tmp_path.iterdir()] == ["weights.age"]
    assert pyrage.decrypt((tmp_path / "weights.age").read_bytes(), [identity]) == b"secret"
    with pytest.raises(RefusedError, match="has no key in 'age1nobody'"):
        encrypt_files([], ["age1nobody"])
    with pytest.raises(RefusedError, match="at most 10; found '11'"):
        encrypt_files([], [str(identity.to_public())] * 11)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(MissingExtraError, match="encrypted downloads need `pyrage`"):
        encrypt_files([tmp_path / "weights"], ["age1"])
