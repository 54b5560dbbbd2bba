"""Redaction: no planted secret stays, and nothing else is lost."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from composer_plugins.recipes.trace_replay.formats.common import Acted, assistant, json_text, tool_call
from composer_plugins.recipes.trace_replay.redact import redacted

ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def chars(size: int, alphabet: str = ALPHANUMERIC) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=size, max_size=size)


# A secret of each form, and the text around it by which it is known. {} is the secret.
FORMS: list[tuple[str, st.SearchStrategy[str], str]] = [
    ("GitHub Token", chars(36).map("ghp_{}".format), "Client('{}')"),
    ("GitLab Token", chars(20).map("glpat-{}".format), "git clone with {}."),
    ("AWS Access Key", chars(16, "ABCDEFGHIJ234567").map("AKIA{}".format), "{}"),
    ("Slack Token", chars(20, "abcdef0123456789").map("xoxb-1234-5678-{}".format), "Bearer {}"),
    ("JSON Web Token", chars(24).map("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{}".format), "jwt={}"),
    ("Basic Auth Credentials", chars(12).map("pw-{}".format), "postgres://bob:{}@db.example/x"),
    ("Secret Keyword", chars(9).map("k1-{}".format), 'client = Client(api_key="{}")'),
    ("OpenAI Token", chars(20).map("sk-proj-a{0}T3BlbkFJ{0}".format), "key {} or"),
    ("Stripe Access Key", chars(24).map("sk_live_{}".format), "{}"),
    ("Anthropic Token", chars(30).map("sk-ant-api03-{}".format), "{}"),
    ("Hugging Face Token", chars(34).map("hf_{}".format), "HF_TOKEN={}"),
    ("Google API Key", chars(35).map("AIza{}".format), "?key={}&x"),
    ("Authorization Header", chars(12).map("k3-{}".format), 'curl -H "Authorization: Bearer {}"'),
    ("Secret Keyword", chars(9).map("k2-{}".format), "export DB_PASSWORD='{}'"),
]
WORDS = st.sampled_from(["the build failed", "def f(x):", "a = b", "", "é ☃", '{"k": [1, 2]}', "x\ny"])


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, str, str]:
    """A kind, a secret, and a text that it can be known by."""
    kind, secrets, form = draw(st.sampled_from(FORMS))
    secret = draw(secrets)
    return kind, secret, f"{draw(WORDS)}\n{form.format(secret)}\n{draw(WORDS)}"


def of(text: str, **arguments: Any) -> Acted:
    call = tool_call("c", "Bash", json_text({"command": text, **arguments}))
    tools = [{"type": "function", "function": {"name": "Bash", "description": text}}]
    messages = [{"role": "user", "content": "go"}, assistant("", [call]), {"role": "tool", "content": text}]
    return Acted(messages, tools, assistant(text, [call]), "f:1", None, "k")


def arguments_of(acted: Acted) -> list[str]:
    """The arguments of each tool call; the observed one is the last."""
    messages = [*acted.messages, acted.observed]
    return [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())]


@given(st.lists(planted(), min_size=1, max_size=3), st.sampled_from(ALPHANUMERIC))
def test_no_planted_secret_stays_and_arguments_stay_json(
    secrets: list[tuple[str, str, str]], other: str
) -> None:
    """Also not in another text, where nothing says that it is one."""
    keys = json.dumps(of("")._asdict())  # some of Hypothesis' texts are words of this file: "arguments"
    assume(not any(secret[-8:] in keys for _, secret, _ in secrets))
    bare = [f"echo {secret} >> notes{other}" for _, secret, _ in secrets]
    clean, counts = redacted([of("\n".join(text for _, _, text in secrets)), *map(of, bare)])
    written = json.dumps([acted._asdict() for acted in clean], ensure_ascii=False)
    for kind, secret, _ in secrets:
        assert secret[-8:] not in written and counts[kind] >= 1 and f"[REDACTED {kind}]" in written
    assert all(isinstance(json.loads(one), dict) for acted in clean for one in arguments_of(acted))


KEY = "-----BEGIN {0}-----\nMIIEpAIBAAKCAQEA7\nq83vq83vEjRWeA==\n-----END {0}-----"
KINDS = ("RSA ", "OPENSSH ", "ENCRYPTED ", "")
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f'{{"x": "a glcbt-{"1z" * 12} b"}}', '{"x": "a [REDACTED GitLab Token] b"}'),
        ('{"password": "s3cr3t-0815"}', '{"password": "[REDACTED Secret Keyword]"}'),
        ('{"password": "hunter", "user": "bob"}', '{"password": "[REDACTED Secret Keyword]", "user": "bob"}'),
        (
            '{"content": "A=1\\nDB_PASSWORD=\\"hunter2-hunter2\\"\\n"}',  # a line inside an argument
            '{"content": "A=1\\nDB_PASSWORD=\\"[REDACTED Secret Keyword]\\"\\n"}',
        ),
        ('{"command": "AKIAIOSFODNN7EXAMPLE', '{"command": "[REDACTED AWS Access Key]'),  # no JSON
        ('{"password": "line1\\nline2"}', '{"password": "[REDACTED Secret Keyword]"}'),
        ('{"password": "hun\\"ter2x9"}', '{"password": "[REDACTED Secret Keyword]"}'),
        ('{"apiKey": "$KEY", "n": 1}', '{"apiKey": "[REDACTED Secret Keyword]", "n": 1}'),
        ('{"credentials": {"value": ["abc"]}}', '{"credentials": {"value": ["[REDACTED Secret Keyword]"]}}'),
        ('{"x-auth-token": 12345678901}', '{"x-auth-token": "[REDACTED Secret Keyword]"}'),
        ('{"AKIAIOSFODNN7EXAMPLE": 1}', '{"[REDACTED AWS Access Key]": 1}'),
        ('{"token": "hunter2x9", "token": ""}', '{"token": ""}'),
        ('{"max_tokens": 4096, "tokenizer": "a/b-1"}', '{"max_tokens": 4096, "tokenizer": "a/b-1"}'),
    ],
)
def test_a_secret_in_the_arguments_of_a_call_is_found(arguments: str, expected: str) -> None:
    acted = of("x")._replace(observed=assistant("", [tool_call("c", "Write", arguments)]))
    (clean,), _ = redacted([acted])
    assert arguments_of(clean)[-1] == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"body": "{\\"password\\": \\"hunter2x9\\"}"}',
        'curl -d "{\\"password\\": \\"hunter2x9\\"}"',
        '"{\\"a\\": \\"{\\\\\\"password\\\\\\": \\\\\\"hunter2x9\\\\\\"}\\"}"',
        '{"password": "hun\\"hunter2x9"}',
        '{"password": "hunter2x9',
        'password := "hunter2x9"',
        "api_key: str = b'hunter2x9'",
        'passphrase="hunter2x9"',
        'password="$hunter2x9"',
        '{"access_token": "hunter2x9"}',
        "redis://:hunter2x9@host/0",
        "postgres://u:s3/hunter2x9@host/db",
        "postgres://u:p@hunter2x9@host/db",
        "github_pat_11hunter2x9_1a1a1a1a1a1a1a",
    ],
)
def test_a_secret_in_a_text_is_found(text: str) -> None:
    (clean,), _ = redacted([of(text)])
    assert "hunter2x9" not in json.dumps(clean._asdict())


# What the README says is not found: values without quotes, and placeholders.
NOT_FOUND = [
    "DB_PASSWORD=hunter2-hunter2",
    "password: hunter2-hunter2",
    "mysql --password hunter2-hunter2",
    "curl -u bob:hunter2-hunter2 https://x.example",
    '{"token": "abcdef123456"}',
    '{"password": {"value": "abcdef123456"}}',
    'password = "{hunter2-hunter2}"',
]
NO_SECRET = [
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "password: str = Field()",
    "api_key = os.environ['API_KEY']",
    "secret = get_secret(name)",
    'password = "{password}"',
    'password = "$PASSWORD"',
    'curl -d "{\\"password\\": \\"$password\\"}"',
    "{ Authorization: `Bearer ${token}` }",
    "http://127.0.0.1:5173/@vite/client and postgres://$USER:$PGPASSWORD@db and http://{user}:{password}@db",
    "hf_hub_download_with_many_retries()",
    'api_key = "abc"',
    "http://127.0.0.1:8000 and 8.8.8.8",
    "550e8400-e29b-41d4-a716-446655440000",
    "login(user=user, password=self.password, token=settings.hf_token)",
    "<label>Password:</label>",
    "max_tokens: 4096",
    "glcbt- is the prefix of a token",
]


@pytest.mark.parametrize("text", [*NO_SECRET, *NOT_FOUND])
def test_what_is_not_found_stays_as_it_is(text: str) -> None:
    acted = of(text)
    clean, counts = redacted([acted])
    assert clean == [acted] and not counts
