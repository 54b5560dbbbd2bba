"""Log-probabilities of given tokens under a model on PRIME-RL's inference server.

    POST {url}/inference/v1/generate    {"model", "token_ids", "sampling_params": {"prompt_logprobs": 1}}

This is the request of PRIME-RL's own opd and opsd. One request scores a whole branch.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any
from urllib.request import Request, urlopen

Score = Callable[[list[int]], Awaitable[list[float]]]

SECONDS = 300


def server(url: str, model: str) -> Score:
    """Return a function from token ids to the model's log-probability of each, 0.0 for the first."""

    async def score(token_ids: list[int]) -> list[float]:
        return await asyncio.to_thread(_ask, f"{url.rstrip('/')}/inference/v1/generate", model, token_ids)

    return score


async def scores_of(trace: Any, score: Score, prefix: Sequence[int] = ()) -> list[tuple[Any, list[float]]]:
    """Each sampled node of `trace` with the teacher's log-probabilities of its sampled tokens.

    `prefix` is what only the teacher sees before the conversation: the tokens of the hint. The completion is
    scored as it was sampled, and is not rendered again. A node in two branches is scored in the first one,
    because PRIME-RL trains it there.
    """
    scored: dict[int, tuple[Any, list[float]]] = {}
    for branch in trace.branches:
        scores = (await score([*prefix, *branch.token_ids]))[len(prefix) :]
        start = 0
        for node in branch.nodes:
            own = scores[start : start + len(node.token_ids)]
            start += len(node.token_ids)
            if node.sampled and any(node.mask):
                sampled = [x for x, is_sampled in zip(own, node.mask, strict=True) if is_sampled]
                scored.setdefault(id(node), (node, sampled))
    return list(scored.values())


def system_tokens(model: str, text: str) -> list[int]:
    """The tokens of a system message, which the teacher sees before the conversation that was sampled."""
    message = [{"role": "system", "content": text}]
    tokens: list[int] = renderer_of(model).render_ids(message, add_generation_prompt=False)
    return tokens


@cache
def renderer_of(model: str) -> Any:
    """The renderer that PRIME-RL runs the policy with: [orchestrator.renderer] of the TOML."""
    from renderers import PrimeQwen3RendererConfig
    from renderers.base import create_renderer, load_tokenizer

    return create_renderer(load_tokenizer(model), PrimeQwen3RendererConfig())


def _ask(url: str, model: str, token_ids: list[int]) -> list[float]:
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": model, "token_ids": token_ids, "sampling_params": sampling}
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=SECONDS) as response:
        return token_logprobs(token_ids, json.load(response)["prompt_logprobs"])


def token_logprobs(token_ids: Sequence[int], entries: Sequence[dict[str, Any] | None]) -> list[float]:
    """The log-probability of each token in vLLM's `prompt_logprobs`, 0.0 for the first, which has none.

    There is one entry per token. Its keys are ids as text: the token's own and the most likely.
    """
    return [
        0.0 if entry is None else float(entry[str(token)]["logprob"])
        for token, entry in zip(token_ids, entries, strict=True)
    ]
