"""Scripted teachers: a server on loopback with the chat-completions endpoint, for the demo and the tests.

    with ScriptedTeachers(answer) as server:
        teacher = Teacher(base_url=server.base_url, ...)

`answer` is a function from the body of a request to an assistant message. The server bills a request once for
each Idempotency-Key: it answers a repeated key with the answer it gave before, as an endpoint that keeps to
such keys does.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from composer_plugins.errors import unknown

STATUSES = ("401", "402", "404", "429", "500")
FAULTS = (*STATUSES, "truncated", "schema", "hang", "drop", "no_usage", "overbill", "no_logprobs")
PAUSE_MS = "5"  # how long a refused client is told to wait before it asks again

Body = dict[str, Any]
Answer = Callable[[Body], dict[str, Any]]


class ScriptedTeachers:
    """A server that answers from a script.

    `faults` has, by model, what goes wrong with its next requests, one after the other (None: nothing):
    a status, of which "429" and "500" ask the client to try again; "truncated" is half of the JSON; "schema"
    is a completion without choices; "hang" never ends; "drop" bills and closes the connection; "no_usage"
    does not say what was billed; "overbill" bills more than the limit of tokens; "no_logprobs" leaves out the
    log-probabilities of the prompt.
    """

    def __init__(
        self, answer: Answer, *, delay: float = 0.0, faults: Mapping[str, Iterable[str | None]] | None = None
    ) -> None:
        self.answer, self.delay = answer, delay
        self.faults: dict[str, Iterator[str | None]] = {
            model: map(_known, of_model) for model, of_model in (faults or {}).items()
        }
        self.requests: list[Body] = []  # the bodies, in the order of arrival
        self.asked = Counter[str]()  # how often each Idempotency-Key arrived
        self.billed: dict[str, dict[str, int]] = {}  # the usage that each key was billed, once
        self._given: dict[str, bytes] = {}
        self.closing = threading.Event()  # ends requests that hang
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def base_url(self) -> str:
        """The `base_url` of a teacher."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def serve(self, body: Body, key: str) -> tuple[int, bytes] | None:
        """Status and body of the answer to a request; None closes the connection without an answer."""
        with self._lock:
            self.requests.append(body)
            self.asked[key] += 1
            fault = next(self.faults.get(str(body["model"]), iter(())), None)
        if fault == "hang":
            self.closing.wait()
            return None
        time.sleep(self.delay)
        if fault in STATUSES:
            return int(fault), json.dumps({"error": {"message": f"scripted {fault}"}}).encode()
        with self._lock:
            if key not in self._given:
                completion = self._completion(body, fault)
                self.billed[key] = completion["usage"]
                if fault == "no_usage":
                    del completion["usage"]
                text = json.dumps(completion).encode()
                self._given[key] = text[: len(text) // 2] if fault == "truncated" else text
            return None if fault == "drop" else (200, self._given[key])

    def _completion(self, body: Body, fault: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": None} | self.answer(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        prompt, said = _rendered(body), json.dumps(message)
        limit = next(value for name, value in body.items() if name in ("max_tokens", "max_completion_tokens"))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": min(len(said), limit)}
        if fault == "overbill":
            usage["completion_tokens"] = 1000 * limit
        choice = {"index": 0, "finish_reason": finish, "message": message}
        completion: dict[str, Any] = {"object": "chat.completion", "model": body["model"], "usage": usage}
        if fault != "schema":
            completion["choices"] = [choice]
        if body.get("return_token_ids") and fault != "no_logprobs":
            completion["prompt_token_ids"] = prompt
        if "prompt_logprobs" in body and fault != "no_logprobs":
            entries = [{str(token): {"logprob": logprob(token)}} for token in prompt]
            completion["prompt_logprobs"] = [None, *entries[1:]]
        return completion


def logprob(token: int) -> float:
    """The log-probability that every scripted teacher gives to a token."""
    return -(1 + token % 7) / 8


def _rendered(body: Body) -> list[int]:
    """The tokens of a prompt, one for each character of a simple chat template."""
    texts = [
        f"<{m['role']}>{m.get('content') or ''}{json.dumps(m.get('tool_calls'))}\n" for m in body["messages"]
    ]
    if body.get("add_generation_prompt", True):
        texts.append("<assistant>")
    return [ord(character) for character in "".join(texts)]


def _known(fault: str | None) -> str | None:
    if fault is not None and fault not in FAULTS:
        raise unknown("faults", fault, FAULTS, noun="fault")
    return fault


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that was killed, or has given up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(server: ScriptedTeachers) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps the connection, as real endpoints do

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            sent = self.rfile.read(length)
            answer = None
            if len(sent) == length:  # the client was not killed meanwhile
                answer = server.serve(json.loads(sent), self.headers.get("Idempotency-Key", ""))
            if answer is None:
                self.close_connection = True
                return
            status, text = answer
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status == 429:
                self.send_header("Retry-After", "1")
            self.send_header("Retry-After-Ms", PAUSE_MS)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
