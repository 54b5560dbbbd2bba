"""A policy loss for `ServiceClient.create_custom_loss`: one datum at a time, traced by torch.fx.

The graph may call torch alone, and knows nothing of the other data: the denominator of the step is an entry
of each datum, which `CustomLoss.data` writes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss.loss import Loss
from composer_plugins.adapters.tinker_loss.options import DEFAULT_POLICY, parse
from composer_plugins.adapters.tinker_loss.upstream import Batch, with_entries
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.tinker import TINKER
from composer_plugins.kernels.masking import keep, traced_in_float32
from composer_plugins.losses.calling import call_unchecked
from composer_plugins.objective.objective import NORM

DENOMINATOR = "denominator"  # the entry with the count of the step


class CustomLoss(NamedTuple):
    """A function for `create_custom_loss(custom.function, custom.input_ranks)`, and the data for it."""

    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    input_ranks: dict[str, int]
    loss: Loss

    def data(self, data: Sequence[Any]) -> list[Any]:
        """The data of a whole step, with the entries that the function takes; cut them into calls after it.

        The denominator of the step is one of the entries.
        """
        counts, layout = self.loss.count(data), self.loss.layout(data)
        batch = Batch.of(data, [torch.zeros(len(one)) for one in layout.rows], layout.mask)
        found = self.loss.policy_inputs(batch, layout) | {"mask": layout.policy.float()}
        count = counts.tokens if self.loss.parsed.mode == "token-mean" else counts.sequences
        names = [name for name in self.input_ranks if name in found and name != "logprobs"]
        added = []
        for row, (one, mask) in enumerate(zip(data, layout.rows, strict=True)):
            entries = {name: found[name][row, : len(mask)] for name in names}
            if DENOMINATOR in self.input_ranks:
                entries[DENOMINATOR] = torch.tensor(float(max(count, 1)))
            added.append(with_entries(one, entries))
        return added


def custom_loss(policy: str = DEFAULT_POLICY, **options: Any) -> CustomLoss:
    """The policy loss of these options of `loss_fn` as a function that Tinker traces.

    It takes the log-probabilities and the inputs of one datum, [tokens] each, and returns its part of the
    loss [], and metrics: each is a sum over the tokens, `custom/<name>:sum`.
    Raises ConfigError for a channel that the graph cannot have: it sees one datum.
    """
    loss = Loss(parse({"policy": policy, **options}))
    parsed, choice = loss.parsed, loss.asked.choice
    for name in ("hint_weight", "replay_weight", "rollout_correction"):
        if getattr(parsed.options, name):
            problem = "the traced function has the policy loss alone"
            raise ConfigError(name, problem, "remove it, or pass loss_fn(...) to forward_backward_custom")
    apart = ["logprobs", "mask", *(["old_logprobs"] if parsed.options.old_policy == "current" else [])]
    names = ["logprobs", *(one for one in choice.loss.needs if one not in apart), "mask"]
    names += [one for one in choice.optional if one in TINKER.provides["policy"]]
    names += [DENOMINATOR] if parsed.mode != "token-sum" else []

    def run(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        given = dict(zip(names, tensors, strict=True))
        mask = given["mask"] = given["mask"] > 0
        given.setdefault("old_logprobs", given["logprobs"].detach())
        with traced_in_float32():
            token = call_unchecked(choice, given)
            summed = keep(token.loss, mask).sum()
        reduced = summed
        if parsed.mode == "seq-mean-token-mean":
            reduced = reduced / mask.sum().clamp(min=1)
        if parsed.mode == NORM:
            reduced = reduced / max(parsed.options.max_length or 1, 1)
        if DENOMINATOR in given:
            reduced = reduced / given[DENOMINATOR]
        metrics = {"loss": summed, "tokens": mask.sum()}
        for name, (value, where) in token.metrics.items():
            metrics[name] = torch.where(where, value, 0.0).sum()
        named = {f"custom/policy/{name}:sum": x.detach() for name, x in metrics.items()}
        return parsed.options.policy_weight * reduced, named

    # torch.fx and Tinker read the names of the inputs from the signature.
    arguments = ", ".join(names)
    function = eval(f"lambda {arguments}: run({arguments})", {"run": run})
    function.__name__ = f"composer_{choice.loss.name.replace(':', '_').replace('.', '_')}"
    return CustomLoss(function, {name: int(name != DENOMINATOR) for name in names}, loss)
