"""Teachers over HTTP: a recorded run, and a server of this test in the place of a model."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.smollm.over_http import LOG, PAIRS_FOLDER, app, write_pairs
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task

RECORDED = Path(__file__).parent / "recorded"

Answer = Callable[[dict[str, Any] | None], tuple[int, Any]]  # None: the list of models


class Handler(BaseHTTPRequestHandler):
    """Answers with the server's function."""

    server: "Server"

    def do_GET(self) -> None:
        """Answer a request for the list of models."""
        self.reply(*self.server.answer(None))

    def do_POST(self) -> None:
        """Answer a chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.reply(*self.server.answer(body))

    def reply(self, status: int, value: Any) -> None:
        """Send a value as JSON."""
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """A server that has no model."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = list[dict[str, Any]]()
        self.answer: Answer = scripted

    @property
    def url(self) -> str:
        """The address of the API."""
        return f"http://127.0.0.1:{self.server_port}/v1"


def scripted(body: dict[str, Any] | None) -> tuple[int, Any]:
    """The reply that the prompt shows, if it shows one; otherwise a wrong one, and a cut one to 40 + 16."""
    if body is None:
        return 200, {"data": [{"id": "first"}, {"id": "second"}]}
    text = body["messages"][-1]["content"]
    _, shown, worked = text.partition("The correct reply is exactly: ")
    content, is_cut = (worked.split("\n")[0], False) if shown else ("No idea.", "40 + 16" in text)
    choice = {"message": {"role": "assistant", "content": content}}
    return 200, {"choices": [{**choice, "finish_reason": "length" if is_cut else "stop"}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


def texts_of(pairs: Path) -> list[dict[str, str]]:
    """Question, chosen and rejected of each pair."""
    sides = {"question": "prompt", "chosen": "chosen", "rejected": "rejected"}
    rows = pq.read_table(pairs).to_pylist()
    return [{name: row[column][-1]["content"] for name, column in sides.items()} for row in rows]


def test_trace_replay_makes_the_recorded_pairs_of_the_recorded_log(tmp_path: Path) -> None:
    shutil.copy(RECORDED / LOG, tmp_path)
    write_pairs(tmp_path)
    pairs = texts_of(tmp_path / PAIRS_FOLDER / "pairs.parquet")
    assert pairs == json.loads((RECORDED / "pairs.json").read_text()) and len(pairs) == 11
    task = make_task(ARITHMETIC)
    answers = {row["prompt"][-1]["content"]: row["answer"] for row in task.rows}
    for pair in pairs:
        answer = answers[pair["question"]]
        assert (task.score(pair["chosen"], answer), task.score(pair["rejected"], answer)) == (1, 0)


def test_the_recorded_log_has_both_teachers_with_the_verifiers_reward() -> None:
    task, lines = make_task(ARITHMETIC), map(json.loads, (RECORDED / LOG).read_text().splitlines())
    rows = iter(task.rows)
    for hinted, plain in zip(lines, lines, strict=True):
        row = next(rows)
        assert (hinted["teacher"], plain["teacher"]) == ("hinted", "plain")
        assert hinted["messages"] == plain["messages"] == row["prompt"]
        for line in (hinted, plain):
            reply = line["response"]["choices"][0]["message"]["content"]
            assert line["reward"] == task.score(reply, row["answer"])


def test_one_teacher_sees_the_worked_answer_and_the_log_does_not(server: Server, tmp_path: Path) -> None:
    words = ["--url", server.url, "--questions", "3", "--seed", "5", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    hinted, plain = server.asked[::2], server.asked[1::2]
    assert {body["model"] for body in server.asked} == {"first"}
    assert [body["temperature"] for body in server.asked] == [0, 1] * 3
    assert [body.get("seed") for body in server.asked] == [None, 5, None, 6, None, 7]
    for row, shown, bare in zip(make_task(ARITHMETIC).rows, hinted, plain, strict=False):
        assert row["privileged_context"] in shown["messages"][-1]["content"]
        assert bare["messages"] == row["prompt"]
    assert "exactly" not in (tmp_path / LOG).read_text()
    # The reply to the second question that is cut at the limit of tokens makes no pair.
    pairs = texts_of(tmp_path / PAIRS_FOLDER / "pairs.parquet")
    assert [pair["question"] for pair in pairs] == ["What is 35 + 32?", "What is 42 + 45?"]
    assert {pair["rejected"] for pair in pairs} == {"No idea."} and pairs[0]["chosen"] == "35 + 32 = 67"


def failed(*words: str, out: Path) -> ConfigError:
    """The error of a command, which has written no log."""
    result = CliRunner().invoke(app, [*words, "--questions", "1", "--out", str(out)])
    assert isinstance(result.exception, ConfigError), result.output
    assert not (out / LOG).exists() and not (out / PAIRS_FOLDER).exists()
    error = result.exception
    assert str(error).count("; ") == 1 and error.problem and error.remedy
    return error


def test_an_address_where_no_server_is_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, and not listening: a connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        error = failed("--url", url, out=tmp_path)
    assert error.key == "--url" and error.problem.startswith(f"{url} cannot be reached")
    assert error.remedy == "start the server, or correct --url"


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://localhost/v1", "http://", "http://h:x/v1", ""])
def test_a_text_that_is_no_address_is_an_error(url: str, tmp_path: Path) -> None:
    error = failed("--url", url, out=tmp_path)
    assert (error.key, error.problem) == ("--url", f"{url!r} is not an address")


@pytest.mark.parametrize(("status", "remedy"), [(500, "printed"), (404, "/v1"), (401, "--api-key-env")])
def test_a_status_that_is_an_error(server: Server, status: int, remedy: str, tmp_path: Path) -> None:
    server.answer = lambda body: scripted(body) if body is None else (status, {"error": "no model"})
    error = failed("--url", server.url, out=tmp_path)
    said = f'{server.url} answers with the status {status}: \'{{"error": "no model"}}\''
    assert (error.key, error.problem) == ("--url", said) and remedy in error.remedy


OTHER_SHAPES = [{"answer": 56}, [], "56", {"choices": []}, {"choices": [{"message": "56"}]}]


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=repr)
def test_an_answer_of_another_shape_is_an_error(server: Server, shape: object, tmp_path: Path) -> None:
    server.answer = lambda body: scripted(body) if body is None else (200, shape)
    error = failed("--url", server.url, out=tmp_path)
    assert error.key == "--url" and error.problem.startswith(f"{server.url} answers, but the answer ")
    assert error.remedy == "name a server that has OpenAI's chat-completions API"


@pytest.mark.parametrize("shape", [{"models": []}, {"data": []}, {"data": [3]}, [], None], ids=repr)
def test_a_list_of_models_of_another_shape_is_an_error(server: Server, shape: object, tmp_path: Path) -> None:
    server.answer = lambda body: (200, shape)
    error = failed("--url", server.url, out=tmp_path)
    assert error.key == "--url" and "does not list its models" in error.problem
    assert error.remedy.startswith("set --model, or ")


def test_an_option_of_a_server_by_url_alone_is_an_error(tmp_path: Path) -> None:
    assert failed("--model", "qwen", out=tmp_path).key == "--model"
    assert failed("--api-key-env", "KEY", out=tmp_path).key == "--api-key-env"
