"""A mock of a vLLM server for TRL's client: it answers over HTTP, from a model of its own.

vLLM itself and its NCCL engine need a GPU. So the names that TRL imports from vLLM are mocks too: the
weights go from TRL's client to the server in this process. All else is TRL's own client and its requests.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from trl.generation import vllm_client, vllm_generation

from parity_tests.rigs import tiny

UNKNOWN = 2  # every so many tokens the server has no log-probability


class Engine:
    """What the server samples from: completions by `tiny.rollout`, at the log-probabilities of its own model.

    Its logits are `sharpness` times those of the weights that it got, as another engine rounds otherwise.
    """

    sharpness = 1.3

    def __init__(self) -> None:
        self.model = tiny.model(seed=7)  # other weights than the trainer's, until it gets these
        self.requests: list[str] = []  # the path of every request, in order
        self.announced: list[dict[str, Any]] = []
        self.sampled: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def answer(self, path: str, body: Any) -> Any:
        """The JSON of a response; KeyError for a path that no vLLM server has."""
        self.requests.append(path)
        if path == "/v1/completions":
            return {"choices": [c for prompt in body["prompt"] for c in self.choices(prompt, body)]}
        if path == "/update_weights":
            self.announced.append(body["update_info"])
            return {}
        config = {"weight_transfer_config": {"backend": "nccl"}}
        config["model_config"] = {"logprobs_mode": "processed_logprobs"}
        return {
            **dict.fromkeys(("/health", "/start_weight_update", "/finish_weight_update"), {}),
            **dict.fromkeys(("/init_weight_transfer_engine", "/reset_prefix_cache"), {}),
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": 1},
        }[path]

    def receive(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take the weights of the trainer, which the tied head shares with the embeddings."""
        weights = {name: weight.clone() for name, weight in iterator}
        found = self.model.to(next(iter(weights.values())).dtype).load_state_dict(weights, strict=False)
        assert not found.unexpected_keys and found.missing_keys in ([], ["lm_head.weight"])

    def choices(self, prompt: list[int], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The completions of one prompt."""
        words = tiny.tokenizer()
        trainer = SimpleNamespace(accelerator=SimpleNamespace(process_index=0), processing_class=words)
        for ids in tiny.rollout([words.decode(prompt)] * body["n"], trainer)["completion_ids"]:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            scaled = (self.sharpness * logits / body["temperature"]).log_softmax(-1)
            found = scaled.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            found[::UNKNOWN] = [float("nan")] * len(found[::UNKNOWN])
            self.sampled[tuple(prompt), tuple(ids)] = found
            names = [f"token_id:{one}" for one in ids]
            logprobs = {"tokens": names, "token_logprobs": found, "top_logprobs": [None] * len(ids)}
            yield {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # TRL's client keeps its connection

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null"))

        def _answer(self, body: Any) -> None:
            try:
                status, found = 200, engine.answer(self.path.partition("?")[0], body)
            except KeyError as error:
                status, found = 404, {"error": f"no path {error}"}
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def running() -> Iterator[tuple[Engine, str]]:
    """A server on a free port, with mocks of vLLM's names; its engine and its address."""
    engine = Engine()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(engine))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    joined, real = vllm_client.VLLMClient.init_communicator, SimpleNamespace(group=SimpleNamespace())
    nccl = SimpleNamespace(
        trainer_init=lambda _: real,
        trainer_send_weights=lambda iterator, trainer_args: engine.receive(iterator),
    )
    doubles = {
        "is_vllm_available": lambda **_: True,
        "get_ip": lambda: "127.0.0.1",
        "NCCLWeightTransferEngine": nccl,
        "NCCLTrainerSendWeightsArgs": SimpleNamespace,
    }
    try:
        with (
            patch.multiple(vllm_client, create=True, **doubles),
            patch.object(vllm_generation, "is_vllm_available", doubles["is_vllm_available"]),
            # The client refuses a device that is not CUDA. It uses the device for nothing but NCCL.
            patch.object(vllm_client.VLLMClient, "init_communicator", lambda self, **_: joined(self, "cuda")),
        ):
            yield engine, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
