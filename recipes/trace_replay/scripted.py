"""Scripted teachers: a server on loopback with the chat-completions endpoint, for the demo.

`answer` is a function from the body of a request to an assistant message.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Body = dict[str, Any]
Answer = Callable[[Body], dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    """Answers a request with what the server's `serve` returns."""

    protocol_version = "HTTP/1.1"  # keeps the connection, as real endpoints do
    server: "ScriptedTeachers"

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, text = self.server.serve(body, self.headers.get("Idempotency-Key", ""))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class ScriptedTeachers(ThreadingHTTPServer):
    """A server that answers from a script."""

    request_queue_size = 128

    def __init__(self, answer: Answer, handler: type[Handler] = Handler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.answer = answer

    @property
    def base_url(self) -> str:
        """The `base_url` of a teacher."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def serve(self, body: Body, key: str) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        return 200, json.dumps(self.completion(body)).encode()

    def completion(self, body: Body) -> dict[str, Any]:
        """The answer to a request. A token of it is a character of its JSON text."""
        message = {"role": "assistant", "content": None} | self.answer(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": message}
        written = min(len(json.dumps(message)), body["max_tokens"])
        usage = {"prompt_tokens": len(rendered(body)), "completion_tokens": written}
        return {"object": "chat.completion", "model": body["model"], "usage": usage, "choices": [choice]}


def rendered(body: Body) -> str:
    """A prompt in a simple chat template; a token of it is a character."""
    texts = [
        f"<{m['role']}>{m.get('content') or ''}{json.dumps(m.get('tool_calls'))}\n" for m in body["messages"]
    ]
    return "".join(texts) + "<assistant>"
