"""Redaction: no planted secret stays, and nothing else is lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_plugins.recipes.trace_replay.formats.common import Acted, assistant, json_text, tool_call

pytest.importorskip("detect_secrets")

from composer_plugins.recipes.trace_replay.redact import redacted  # noqa: E402

ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def chars(size: int, alphabet: str = ALPHANUMERIC) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=size, max_size=size)


# A secret of each form, and the text around it by which it is known. {} is the secret.
FORMS: dict[str, tuple[st.SearchStrategy[str], str]] = {
    "GitHub Token": (chars(36).map("ghp_{}".format), "Client('{}')"),
    "Anthropic API Key": (chars(40).map("sk-ant-api03-{}".format), "key {}."),
    "Hugging Face Token": (chars(34).map("hf_{}".format), "huggingface-cli login --token {}"),
    "AWS Access Key": (chars(16, "ABCDEFGHIJ234567").map("AKIA{}".format), "{}"),
    "Slack Token": (chars(20, "abcdef0123456789").map("xoxb-1234-5678-{}".format), "Bearer {}"),
    "JSON Web Token": (chars(24).map("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{}".format), "jwt={}"),
    "Basic Auth Credentials": (chars(12).map("pw-{}".format), "postgres://bob:{}@db.example/x"),
    "Secret Keyword": (chars(9).map("k1-{}".format), 'client = Client(api_key="{}")'),
    "Stripe Access Key": (chars(24).map("sk_live_{}".format), "{}"),
}
ENV_FORM = "Secret Keyword", (chars(9).map("k2-{}".format), "export DB_PASSWORD={}")
WORDS = st.sampled_from(["the build failed", "def f(x):", "a = b", "", "é ☃", '{"k": [1, 2]}', "x\ny"])


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, str, str]:
    """A kind, a secret, and a text that it can be known by."""
    kind, (secrets, form) = draw(st.sampled_from([*FORMS.items(), ENV_FORM]))
    secret = draw(secrets)
    return kind, secret, f"{draw(WORDS)}\n{form.format(secret)}\n{draw(WORDS)}"


def of(text: str, **arguments: Any) -> Acted:
    call = tool_call("c", "Bash", json_text({"command": text, **arguments}))
    tools = [{"type": "function", "function": {"name": "Bash", "description": text}}]
    messages = [{"role": "user", "content": "go"}, assistant("", [call]), {"role": "tool", "content": text}]
    return Acted(messages, tools, assistant(text, [call]), "f:1", None, "k")


@given(st.lists(planted(), min_size=1, max_size=3), st.sampled_from(ALPHANUMERIC))
def test_no_planted_secret_stays_and_arguments_stay_json(
    secrets: list[tuple[str, str, str]], other: str
) -> None:
    """Also not in another text, where nothing says that it is one."""
    bare = [f"echo {secret} >> notes{other}" for _, secret, _ in secrets]
    clean, counts = redacted([of("\n".join(text for _, _, text in secrets)), *map(of, bare)])
    written = json.dumps([acted._asdict() for acted in clean], ensure_ascii=False)
    for kind, secret, _ in secrets:
        assert secret[-8:] not in written and counts[kind] >= 1 and f"[REDACTED {kind}]" in written
    for acted in clean:
        for message in (*acted.messages, acted.observed):
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)


HARMLESS = [
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "commit 0f1e2d3c4b5a69788796a5b4c3d2e1f000112233",
    "password: str = Field()",
    "api_key = os.environ['API_KEY']",
    "secret = get_secret(name)",
    'password = "{password}"',
    "http://127.0.0.1:8000 and 8.8.8.8",
    "550e8400-e29b-41d4-a716-446655440000",
    "toolu_01A2b3C4d5E6f7G8h9",
    'secret=headers["api-key-name"];',
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    acted = of(text)
    clean, counts = redacted([acted])
    assert clean == [acted] and not counts


KEY = "-----BEGIN {0}-----\nMIIEpAIBAAKCAQEA7\nq83vq83vEjRWeA==\n-----END {0}-----"
KINDS = ("RSA ", "OPENSSH ", "", "ENCRYPTED ")
LABELS = [*(f"{kind}PRIVATE KEY" for kind in KINDS), "PGP PRIVATE KEY BLOCK"]


@pytest.mark.parametrize("label", LABELS)
def test_a_private_key_goes_whole(label: str) -> None:
    key = KEY.format(label)
    texts = [f"before\n{key}\nafter", f"two {key} {key}", key[:-40], f"{json.dumps(key)}"]
    clean, counts = redacted([of(text) for text in texts])
    written = json.dumps([acted._asdict() for acted in clean])
    assert "MIIE" not in written and "q83v" not in written and set(counts) == {"Private Key"}
    assert clean[0].messages[2]["content"].startswith("before\n") and "after" in clean[0].observed["content"]


def test_a_short_secret_or_a_plain_word_is_replaced_in_its_line_only() -> None:
    text = 'postgres://bob:password@db\nthe password is asked for\nDB_PASSWORD="abc12"\nabc123'
    (clean,), _ = redacted([of(text)])
    url, *middle, last = clean.messages[2]["content"].splitlines()
    assert "password" not in url and middle[0] == "the password is asked for" and last == "abc123"
    assert "abc12" not in middle[1]


def test_a_secret_under_a_telling_name_of_an_argument_is_found() -> None:
    (clean,), _ = redacted([of("login", password="s3cr3t-0815")])
    arguments = json.loads(clean.observed["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"command": "login", "password": "[REDACTED Secret Keyword]"}


def test_a_line_inside_an_argument_is_looked_at_as_a_line() -> None:
    acted = of("x")
    call = tool_call("c", "Write", json_text({"content": "A=1\nDB_PASSWORD=hunter2-hunter2\n"}))
    (clean,), _ = redacted([acted._replace(observed=assistant("", [call]))])
    written = json.loads(clean.observed["tool_calls"][0]["function"]["arguments"])["content"]
    assert written == "A=1\nDB_PASSWORD=[REDACTED Secret Keyword]\n"


def test_arguments_that_are_no_json_are_redacted_as_text() -> None:
    acted = of("x")
    call = tool_call("c", "Bash", '{"command": "AKIAIOSFODNN7EXAMPLE')
    (clean,), _ = redacted([acted._replace(observed=assistant("", [call]))])
    function = clean.observed["tool_calls"][0]["function"]
    assert function["arguments"] == '{"command": "[REDACTED AWS Access Key]'
