"""vllm_mode="server": TRL's own client, whose HTTP requests are answered from a model of their own.

vLLM itself and its NCCL engine need a GPU. So the names that TRL imports from vLLM are mocks too: the
weights go from TRL's client to the server in this process. All else is TRL's own client and its requests.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
import torch
from trl.generation import vllm_client, vllm_generation

from parity_tests.rigs import by_rows, tiny

pytest.importorskip("requests", reason="TRL's client of a vLLM server needs it")

OPTIONS = {"scripted": False, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 10.0}
OPTIONS |= {"vllm_importance_sampling_clip_max": 1.1, "loss_type": "grpo", "max_steps": 2}
OPTIONS |= {"replay_params": {"beta": 0.3}}
WEIGHTS = {"policy_weight": 1.5, "hint_weight": 0.7, "replay_weight": 0.3}
CORRECTIONS = {
    "token_truncate": lambda ratio: ratio.clamp(max=1.1),
    "token_mask": lambda ratio: torch.where(ratio > 1.1, 0.0, ratio),
    "sequence_truncate": lambda ratio: ratio.prod().clamp(max=1.1),
    "sequence_mask": lambda ratio: torch.where(ratio.prod() > 1.1, 0.0, ratio.prod()),
}
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


def policy_by_rows(made: Any, inputs: dict[str, Any], engine: Engine, mode: str) -> torch.Tensor:
    """GRPO's loss row by row, without padding, from the log-probabilities that the server returned."""
    total, weights = torch.zeros((), dtype=torch.float64), []
    for i, advantage in enumerate(inputs["advantages"].double()):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        ids, mine = by_rows.completion(inputs, i), by_rows.logprobs(made.model, inputs, i)
        theirs = torch.tensor(engine.sampled[tuple(prompt.tolist()), tuple(ids.tolist())])
        ratio = torch.where(theirs.isnan(), 1.0, (mine.detach() - theirs).exp())
        weights.append(CORRECTIONS[mode](ratio))
        total = total - (advantage * weights[-1] * (mine - mine.detach()).exp()).mean()
    assert any((weight - 1).abs().max() > 0.05 for weight in weights), "the correction does nothing"
    return total / len(inputs["advantages"])


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("sequence_mask", "trl"),
        ("sequence_mask", "grpo"),
        ("token_truncate", "grpo"),
        pytest.param("sequence_truncate", "grpo", marks=pytest.mark.slow),
        pytest.param("token_mask", "grpo", marks=pytest.mark.slow),
    ],
)
def test_all_channels_with_a_server_equal_a_loop_over_unpadded_rows(mode: str, policy: str) -> None:
    """After two steps, so that the server must have got the weights of the policy."""
    with running() as (engine, url):
        initial = tiny.model(torch.float64)
        own = {"policy": policy, "vllm_server_base_url": url, "vllm_importance_sampling_mode": mode}
        made = tiny.trainer(**OPTIONS, **WEIGHTS, **own, policy_model=copy.deepcopy(initial))
        made.train()
        inputs = tiny.batch(made)
    expected = WEIGHTS["policy_weight"] * policy_by_rows(made, inputs, engine, mode)
    expected = expected + WEIGHTS["hint_weight"] * by_rows.hint(made, inputs, initial.eval())
    expected = expected + WEIGHTS["replay_weight"] * by_rows.replay(made, initial, "dpo")[0]
    tiny.assert_computes(made, inputs, expected, value=1e-5)
    assert engine.requests.count("/v1/completions") == 3
    for name, weight in made.model.named_parameters():
        assert torch.equal(weight, engine.model.get_parameter(name))
    announced = [len(update["names"]) for update in engine.announced]
    assert announced == [len(list(made.model.parameters()))] * len(announced) and len(announced) >= 3
