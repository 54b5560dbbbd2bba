"""A rollout engine: transformers' model in a Ray actor. The same prompt and weights give the same samples.

The weights that the trainer sends after each step are left in the folder $VERL_CPU_OUT, if it is set, which
is how a test sees the parameters. A response ends with a token that the model's generation config names.
`Ordered` sorts each batch, whose rows otherwise come in the order of arrival.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from composer_plugins.recipes.verl.on_a_cpu import KEPT

NAME = "transformers_cpu"


class Server:
    """A server that samples responses, one request at a time."""

    def __init__(self, path: str, length: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = {*ends} if isinstance(ends, list) else {ends}
        self.length, self.step, self.lock = length, 0, asyncio.Lock()
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def load(self, weights: dict[str, Tensor], step: int | None) -> None:
        """Load the trainer's weights, and restart the count of requests."""
        self.model.load_state_dict(weights)
        self.step = self.step if step is None else step
        self.asked.clear()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample one response, seeded by the step, the prompt and how often it was asked for."""
        async with self.lock:
            prompt = tuple(prompt_ids)
            seed = crc32(repr((self.step, prompt, self.asked[prompt])).encode())
            self.asked[prompt] += 1
            ids, logprobs = self.sample(
                torch.tensor([prompt]),
                sampling_params.get("max_tokens") or self.length,
                sampling_params.get("temperature", 1.0),
                torch.Generator().manual_seed(seed),
            )
            return TokenOutput(
                token_ids=ids,
                log_probs=logprobs,
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )

    @torch.no_grad()
    def sample(
        self, ids: Tensor, length: int, temperature: float, generator: torch.Generator
    ) -> tuple[list[int], list[float]]:
        """Sample tokens and log-probabilities until a token ends the response; temperature 0 is greedy."""
        tokens, logprobs, past = [], [], None
        for _ in range(length):
            output = self.model(ids, past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[0, -1]
            spread = (logits / (temperature or 1.0)).log_softmax(-1)
            greedy = not temperature
            token = int(spread.argmax() if greedy else spread.exp().multinomial(1, generator=generator))
            tokens.append(token)
            logprobs.append(float(spread[token]))
            if token in self.ends:
                break
            ids = torch.tensor([[token]])
        return tokens, logprobs

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no cache and no memory to release."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    """The handle that verl has of the server."""

    server: type[Server] = Server

    async def launch_servers(self) -> None:
        """Start the server and wait until it has the model."""
        actor: Any = ray.remote(num_cpus=0)(self.server)
        options = actor.options(name=f"{NAME}_{self.replica_rank}", max_concurrency=64)
        handle = options.remote(self.model_config.path, self.config.response_length)
        await handle.nothing.remote()
        self.servers, self._server_handle = [handle], handle
        self._server_address = f"{NAME}-{self.replica_rank}"


class Sender(BaseRollout):
    """Sends the weights from the actor's worker to the server."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing: there is no memory to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send every parameter, unsharded and in float32, and save them for the tests."""
        assert wire_format == "named_tensors", wire_format
        whole = {name: value.detach().float().cpu().clone() for name, value in weights}
        rank = os.environ.get("RANK", "0")
        if rank == "0" and KEPT in os.environ:
            torch.save(whole, Path(os.environ[KEPT], f"step_{global_steps}.pt"))
        await ray.get_actor(f"{NAME}_{rank}").load.remote(whole, global_steps)


def register(name: str, replica: type[Replica]) -> None:
    """Make `rollout.name` choose this replica."""
    RolloutReplicaRegistry.register(name, lambda: replica)
    _ROLLOUT_REGISTRY[(name, "async")] = f"{__name__}.{Sender.__name__}"


register(NAME, Replica)
