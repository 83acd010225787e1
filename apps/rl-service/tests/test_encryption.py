"""Downloads that only their client can read."""

import pytest

from rl_rollout.gateway import RefusedError
from rl_service.encryption import MAX_RECIPIENTS, encrypt_files

pyrage = pytest.importorskip("pyrage", reason="rl-service[service] is not installed")


def test_each_recipient_can_read_the_files_and_nothing_is_left_unencrypted(tmp_path):
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"weights")
    encrypt_files([file], [str(one.to_public()) for one in identities])
    assert [one.name for one in tmp_path.iterdir()] == ["adapter_model.safetensors.age"]
    encrypted = (tmp_path / "adapter_model.safetensors.age").read_bytes()
    assert [pyrage.decrypt(encrypted, [one]) for one in identities] == [b"weights"] * 2
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(encrypted, [pyrage.x25519.Identity.generate()])


def test_wrong_recipients_are_refused_before_a_file_is_touched(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"{}")
    key = str(pyrage.x25519.Identity.generate().to_public())
    for recipients, message in (
        ([key, "age1no"], "no key in 'age1no'"),
        (["ssh-rsa no"], "no key in 'ssh-rsa no'"),
        ([key] * (MAX_RECIPIENTS + 1), f"at most {MAX_RECIPIENTS}"),
    ):
        with pytest.raises(RefusedError, match=message):
            encrypt_files([file], recipients)
    assert file.read_bytes() == b"{}"
