"""A mock of a vLLM server for TRL's client: it answers each HTTP request from a model of its own.

vLLM itself and its NCCL engine need a GPU. So the names that TRL imports from vLLM are mocks too: the
weights go from TRL's client to the server in this process. All else is TRL's own client and its requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

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


@contextmanager
def running() -> Iterator[tuple[Engine, str]]:
    """An engine that answers every HTTP request, and its address, with mocks of vLLM's names."""
    engine = Engine()

    def request(session: Any, method: str, url: str, *, json: Any = None, **_: Any) -> SimpleNamespace:
        found = engine.answer(urlsplit(url).path, json)
        return SimpleNamespace(status_code=200, headers={}, json=lambda: found)

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
    with (
        patch("requests.Session.request", request),
        patch.multiple(vllm_client, create=True, **doubles),
        patch.object(vllm_generation, "is_vllm_available", doubles["is_vllm_available"]),
        # The client refuses a device that is not CUDA. It uses the device for nothing but NCCL.
        patch.object(vllm_client.VLLMClient, "init_communicator", lambda self, **_: joined(self, "cuda")),
    ):
        yield engine, "http://127.0.0.1:8000"
