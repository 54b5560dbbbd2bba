"""A loss by its name or by a table, and reductions of upstreams that the catalogue does not have."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.frameworks.contract import Framework
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.choosing import choose, find_one
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, of_kind
from composer_plugins.objective.by_table import ByTable, nested


def kernel(kind: Kind, name: str, **params: Any) -> Callable[..., Any]:
    """The kernel of a catalogue row, or of a dialect ("cispo@trl"), with its parameters and `params`."""
    choice = choose(kind, name, params)
    return partial(choice.loss.kernel(), **choice.params)


def mean(name: str, **counts: float | None) -> Callable[..., Tensor]:
    """The kernel of an aggregation mode or a dialect, with the counts that it takes, unless they are None."""
    taken = find_one(name, "aggregation").loss.parameters
    given = {key: x for key, x in counts.items() if key in taken and x is not None}
    return kernel("aggregation", name, **given)


def in_our_words(framework: Framework, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a framework that act with our loss, and our options for the ones of its own loss."""
    named = ByTable(framework).named("policy", nested(options))
    assert named is not None
    own = {one.key: one.default for one in framework.options_of("policy") if one.acts_by_parameters}
    given = {key: value for key, value in options.items() if value != own.get(key, value)}
    params = framework.parameters(find_one(named.row, "policy").loss, given)
    kept = {key: value for key, value in options.items() if key not in own}
    return nested(kept), {"policy": named.row, "policy_params": params}


def trl_gmpo(token_loss: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """TRL 1.16's GMPO: a mean over all rows, where a row without unmasked tokens has the ratio 1."""
    loss = aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=mask.shape[0])
    return loss - torch.where(mask.any(-1), 0.0, advantages.squeeze(-1)).mean()


def verl(token_loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """Our row of an aggregation mode with the numbers that verl's agg_loss is given."""
    sizes = {"rows": mask.shape[0], "width": mask.shape[1]}
    dialect = of_kind(losses(), "aggregation")[mode].dialect("verl")
    given = {name: sizes[size] for name, size in dialect.denominators.items()}
    keys = {
        "num_tokens": "batch_num_tokens",
        "num_sequences": "global_batch_size",
        "max_length": "loss_scale_factor",
    }
    given |= {name: info[key] for name, key in keys.items() if info.get(key) is not None}
    reduced: Tensor = info.get("dp_size", 1) * mean(f"{mode}@verl", **given)(token_loss, mask)
    return reduced
