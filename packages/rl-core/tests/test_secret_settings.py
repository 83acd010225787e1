"""Secrets in settings are read from the environment and never written."""

import re

import pytest

from rl_core.errors import SettingsError
from rl_core.secret_settings import REDACTED, hide, redact, redact_option, redacted_names, resolve_secrets

OPTIONS = {
    "url": "https://judge:s3cret@example.org/score",
    "headers": {"Authorization": "Bearer $JUDGE_KEY", "X-Team": "blue team"},
    "retries": 3,
    "parts": [{"options": {"api_key": "sk-123456", "template": "costs $HOME {response}"}}],
    "mcp_servers": {"files": {"command": ["files"], "env": {"TOKEN": "${JUDGE_KEY}", "MODE": "a$b", "PORT": 12345}}},
}


def test_references_are_read_and_other_text_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-9")
    found = resolve_secrets(OPTIONS, where="reward")
    assert found["headers"] == {"Authorization": "Bearer k-9", "X-Team": "blue team"}
    assert found["mcp_servers"]["files"]["env"] == {"TOKEN": "k-9", "MODE": "a$b", "PORT": 12345}
    assert found["parts"] == OPTIONS["parts"]
    assert found["url"] == OPTIONS["url"]


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    said = "reward 'http': headers.Authorization refers to the environment variable JUDGE_KEY, which is not set"
    with pytest.raises(SettingsError, match=re.escape(said)):
        resolve_secrets(OPTIONS, where="reward 'http'")


def test_literal_secrets_are_redacted_and_references_kept() -> None:
    assert redact(OPTIONS) == {
        "url": f"https://judge:{REDACTED}@example.org/score",
        "headers": {"Authorization": "Bearer $JUDGE_KEY", "X-Team": REDACTED},
        "retries": 3,
        "parts": [{"options": {"api_key": REDACTED, "template": "costs $HOME {response}"}}],
        "mcp_servers": {
            "files": {"command": ["files"], "env": {"TOKEN": "${JUDGE_KEY}", "MODE": REDACTED, "PORT": REDACTED}}
        },
    }
    compared = redact(OPTIONS, keep_references=False)
    assert compared["headers"] == {"Authorization": REDACTED, "X-Team": REDACTED}


@pytest.mark.parametrize(
    "literal",
    ["Bearer sk-1 $NAME", "sk-1$NAME", "$NAME sk-1", "a b $NAME", "$NAME\n", "$1", "$", "Bearer $NAME-sk", ""],
)
def test_what_is_more_than_a_reference_is_a_literal(literal: str) -> None:
    assert redact({"headers": {"A": literal}}) == {"headers": {"A": REDACTED}}
    assert resolve_secrets({"headers": {"A": literal}}, where="x") == {"headers": {"A": literal}}


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *(
            (name, True)
            for name in ("api_key", "judge_api_key", "API-KEY", "apikey", "token", "hf_token", "auth_token")
        ),
        *(
            (name, True)
            for name in ("client_secret", "password", "db_password", "Authorization", "secret_key", "cookie")
        ),
        *((name, False) for name in ("token_env", "eos_token", "stop_token", "tokenizer", "max_tokens", "answer_key")),
        *((name, False) for name in ("key", "environment", "header", "keyed", "secretary")),
    ],
)
def test_names_of_secrets(name: str, is_secret: bool) -> None:
    assert (redact_option(name, "value") == REDACTED) is is_secret


def test_a_secret_in_the_text_of_others_is_hidden() -> None:
    values = {"headers": {"Authorization": "Bearer sk-123456"}, "env": {"A": "C", "B": "$NAME"}}
    text = "Illegal header value b'Bearer sk-123456'; sk-123456 at C with $NAME"
    assert hide(text, values) == f"Illegal header value b'{REDACTED}'; {REDACTED} at C with $NAME"


def test_secrets_in_urls() -> None:
    assert redact("redis://:pw@host") == f"redis://:{REDACTED}@host"
    assert redact("https://me:p@ss:w@host/a?b=c") == f"https://me:{REDACTED}@host/a?b=c"
    assert redact("https://host/a:b@c?x=1&api_key=sk-1#top") == f"https://host/a:b@c?x=1&api_key={REDACTED}#top"
    assert redact("https://host?token=$NAME") == "https://host?token=$NAME"
    assert hide("tried https://host?token=sk-123456", {"url": "https://host?token=sk-123456"}).endswith(REDACTED)


def test_redacted_values_are_found_again() -> None:
    names = ["url", "headers.X-Team", "parts[0].options.api_key", "mcp_servers.files.env.MODE"]
    assert list(redacted_names(redact(OPTIONS))) == [*names, "mcp_servers.files.env.PORT"]
    assert list(redacted_names(OPTIONS)) == []
