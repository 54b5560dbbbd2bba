"""What the adapter calls of slime, 624b824, and of Miles, 31f1ca9, imported when the loss is called."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.objective.by_table import ByTable


class Host(NamedTuple):
    """The functions of slime, or of Miles, that the loss calls."""

    log_probs: Callable[..., dict[str, list[Tensor]]]
    gather: Callable[[Tensor, int, int], Tensor]
    cut: Callable[[Tensor, int, int], Tensor]
    parts: int  # ranks of context parallelism


def moved(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not at the default of our table. slime copies eps_clip to eps_clip_high."""
    copied = ["eps_clip_high"] if args.get("eps_clip_high") == args.get("eps_clip") else []
    return {key: value for key, value in ByTable(SLIME).given(args).items() if key not in copied}


def host(args: Any, batch: Mapping[str, Any]) -> Host:
    """The functions of the framework that runs here."""
    if "miles" not in sys.modules:
        module, cp = (import_module(f"slime.backends.megatron_utils.{name}") for name in ("loss", "cp_utils"))
        kept = module.get_rollout_top_p_logprob_kwargs(args, batch)
        parts = cp.mpu.get_context_parallel_world_size()

        def log_probs(logits: Tensor, **given: Any) -> Any:  # slime returns a pair, for Megatron
            return module.get_log_probs_and_entropy(logits, **given, **kept)[1]

        return Host(log_probs, cp.all_gather_with_cp, cp.slice_log_prob_with_cp, parts)
    package = "miles.backends.training_utils"
    names = ("loss_hub.logit_processors", "cp_utils", "parallel")
    module, cp, parallel = (import_module(f"{package}.{name}") for name in names)
    parts = parallel.get_parallel_state().cp.size
    if parts > 1 and args.qkv_format != "thd":
        raise ConfigError("qkv_format", f"it is {args.qkv_format!r} with context parallelism", "set thd")
    of_miles = partial(
        module.get_log_probs_and_entropy,
        entropy_requires_grad=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return Host(of_miles, cp.all_gather_with_cp, cp.slice_log_prob_with_cp, parts)
