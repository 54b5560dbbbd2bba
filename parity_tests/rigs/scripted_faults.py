"""The scripted teachers of recipes/trace_replay, with an account of every request, and with faults.

The server bills a request once for each Idempotency-Key: it answers a repeated key with the answer it gave
before, as an endpoint that keeps to such keys does.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer_plugins.recipes.trace_replay.scripted import Answer, Body, Handler, ScriptedTeachers

STATUSES = ("400", "401", "402", "403", "404", "429", "500")


class Dropped(Exception):
    """The connection closes without an answer."""


class PatientHandler(Handler):
    """Tells a refused client how long to wait before it asks again."""

    server: "FaultyTeachers"

    def do_POST(self) -> None:
        try:
            super().do_POST()
        except (Dropped, json.JSONDecodeError):  # a client that is killed sends half a request
            self.close_connection = True

    def do_GET(self) -> None:
        """Answer with the list of models, where the server has one."""
        text = self.server.models if self.path == "/v1/models" else b""
        self.send_response(200 if text else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def end_headers(self) -> None:
        self.send_header("Retry-After", "1")
        self.send_header("Retry-After-Ms", "5")
        super().end_headers()


class FaultyTeachers(ScriptedTeachers):
    """A server that answers from a script, and counts.

    `faults` has, by model, what goes wrong with its next requests, one after the other (None: nothing):
    a status, of which "429" and "500" ask the client to try again; "truncated" is half of the JSON; "schema"
    is a completion without choices; "hang" never ends; "drop" bills and closes the connection; "no_usage"
    does not say what was billed.
    """

    def __init__(
        self, answer: Answer, *, delay: float = 0.0, faults: Mapping[str, Iterable[str | None]] | None = None
    ) -> None:
        super().__init__(answer, PatientHandler)
        self.delay = delay
        self.faults = {model: iter(of_model) for model, of_model in (faults or {}).items()}
        self.requests: list[Body] = []  # the bodies, in the order of arrival
        self.asked = Counter[str]()  # how often each Idempotency-Key arrived
        self.billed: dict[str, dict[str, int]] = {}  # the usage that each key was billed, once
        self.given: dict[str, bytes] = {}
        self.models = b""  # the answer to GET /models
        self.costs: Callable[[dict[str, int]], float] | None = None  # what a usage costs, which it then says
        self.closing = threading.Event()  # ends requests that hang
        self.lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        super().__exit__()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that was killed, or has given up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def serve(self, body: Body, key: str) -> tuple[int, bytes]:
        with self.lock:
            self.requests.append(body)
            self.asked[key] += 1
            fault = next(self.faults.get(str(body["model"]), iter(())), None)
        if fault == "hang":
            self.closing.wait()
            raise Dropped
        time.sleep(self.delay)
        if fault in STATUSES:
            return int(fault), json.dumps({"error": {"message": f"scripted {fault}"}}).encode()
        with self.lock:
            if key not in self.given:
                text = json.dumps(self.with_fault(body, key, fault)).encode()
                self.given[key] = text[: len(text) // 2] if fault == "truncated" else text
        if fault == "drop":
            raise Dropped
        return 200, self.given[key]

    def with_fault(self, body: Body, key: str, fault: str | None) -> dict[str, Any]:
        """The completion, which is billed here."""
        limit = body.get("max_tokens") or body["max_completion_tokens"]
        completion = self.completion({**body, "max_tokens": limit})
        if self.costs is not None:
            completion["usage"] |= {"cost": self.costs(completion["usage"])}
        self.billed[key] = completion["usage"]
        removed = {"schema": "choices", "no_usage": "usage"}.get(fault or "")
        return {name: value for name, value in completion.items() if name != removed}
