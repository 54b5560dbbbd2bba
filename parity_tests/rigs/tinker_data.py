"""Data as Tinker's SDK has them, without the SDK, and a random batch of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import mark_pairs
from composer_plugins.frameworks.tinker import TINKER
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss

POLICIES = [one for one in losses() if one.kind == "policy" and TINKER.runs(one)]


def numbers(tensor: Tensor) -> Any:
    """A TensorData that keeps float64."""
    return SimpleNamespace(to_torch=lambda: tensor)


class Input:
    """A ModelInput of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "Input":
        """The input of these tokens."""
        return cls(tokens)

    def to_ints(self) -> list[int]:
        """Its tokens."""
        return self.tokens


@dataclass(frozen=True)
class Datum:
    """A Datum, which wraps its tensors as the SDK's does."""

    model_input: Any
    loss_fn_inputs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrapped = {k: numbers(x) if isinstance(x, Tensor) else x for k, x in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", wrapped)


class Future:
    """What a client returns at once."""

    def __init__(self, found: list[float | None]) -> None:
        self.found = found

    def result(self) -> list[float | None]:
        """The log-probabilities of the prompt's tokens."""
        return self.found


class Sampler:
    """A SamplingClient whose log p(token | prefix) is -(token + sum of the prefix / 100)."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def compute_logprobs(self, prompt: Input) -> Future:
        """The log-probabilities, None for the first token."""
        tokens = prompt.to_ints()
        self.seen.append(tokens)
        return Future([None, *(-(x + sum(tokens[:i]) / 100) for i, x in enumerate(tokens) if i)])


LENGTHS = (5, 3, 7, 4)
PROMPTS = (2, 1, 3, 1)


def batch(
    datum: Callable[..., Any] = Datum,
    model_input: Any = Input,
    *,
    lengths: Sequence[int] = LENGTHS,
    prompts: Sequence[int] = PROMPTS,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[list[Any], list[Tensor]]:
    """Ragged data with every entry that a channel may read, and the log-probabilities of their targets.

    The first `prompts[i]` targets are of the prompt, where the mask is 0.
    """
    g = torch.Generator().manual_seed(seed)
    data, logprobs = [], []

    def drawn(length: int, scale: float = 1.0) -> Tensor:
        return torch.randn(length, generator=g).to(dtype) * scale

    for length, prompt in zip(lengths, prompts, strict=True):
        ids = torch.randint(1, 9, (length + 1,), generator=g)
        logprob = -torch.rand(length, generator=g).to(dtype) * 2 - 0.5
        mask = (torch.arange(length) >= prompt).float()
        inputs = {"target_tokens": ids[1:], "mask": mask, "advantages": drawn(1).expand(length).clone()}
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"):
            inputs[name] = (logprob + drawn(length, 0.3)).clamp(max=-1e-3)
        data.append(datum(model_input=model_input.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
        logprobs.append(logprob)
    return data, logprobs


def without(datum: Any, *names: str) -> Any:
    """The datum without these entries."""
    inputs = {name: x for name, x in datum.loss_fn_inputs.items() if name not in names}
    return type(datum)(model_input=datum.model_input, loss_fn_inputs=inputs)


def changed(datum: Any, **entries: Tensor) -> Any:
    """The datum with these entries in place of its own."""
    inputs = {**datum.loss_fn_inputs, **entries}
    return type(datum)(model_input=datum.model_input, loss_fn_inputs=inputs)


def loss_and_gradients(
    function: Callable[..., Any], data: Sequence[Any], logprobs: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """The loss, its gradient in each datum's log-probabilities, and the metrics, as the SDK takes them."""
    leaves = [one.clone().requires_grad_() for one in logprobs]
    loss, metrics = function(data, leaves)
    return loss.detach(), list(torch.autograd.grad(loss, leaves)), metrics


def paired(
    weights: Sequence[float] = (1.0, 3.0), order: Sequence[int] = (0, 2, 4, 1, 3)
) -> tuple[list[Any], list[Tensor]]:
    """Two pairs, and one datum of the policy: the chosen ones, the policy's, the rejected ones."""
    data, logprobs = batch(lengths=(5, 3, 7, 4, 6), prompts=(2, 1, 3, 1, 2))
    whole = [*mark_pairs([data[0], data[1]], [data[2], data[3]], weights), data[4]]
    scored = [logprobs[i] for i in (0, 2, 1, 3, 4)]
    return [whole[i] for i in order], [scored[i] for i in order]


def options_of(loss: Loss) -> dict[str, Any]:
    """What a policy loss needs beside its name."""
    required = {name: loss.parameters[name].example for name, x in loss.defaults.items() if x is REQUIRED}
    found: dict[str, Any] = {"policy": loss.name, "policy_params": required}
    if loss.mode == "seq-mean-token-sum-norm":
        found["max_length"] = 6.0
    return found
