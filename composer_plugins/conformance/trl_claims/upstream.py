"""TRL's own loss code, called on drawn tensors: its methods, on the few attributes of `self` that they read.

Its preference losses are in `upstream_pairs.py`, its rollouts in `upstream_rollouts.py`.

Nothing of TRL is copied or patched. A method is called unbound on a namespace; a static method and a
function as they are. What TRL computes in torch's default dtype (a temperature made by torch.where, n /
(n - 1) of two integers) is computed in float64 inside `in_float64`, so that a comparison can be strict;
what it rounds to float32 by name stays rounded.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.conformance.trl_claims.grpo_options import Options
from composer_plugins.conformance.trl_claims.names import FILES

CPU = torch.device("cpu")
TRAINED = SimpleNamespace(training=True)  # all that is read of a model whose outputs are given


def load(trainer: str, name: str = "") -> Any:
    """A trainer of the installed TRL, or `name` of its file, or of a file that is given in its place."""
    file = FILES.get(trainer, trainer)
    return getattr(import_module("trl." + file.removesuffix(".py").replace("/", ".")), name or trainer)


def method(trainer: str, name: str, **attributes: Any) -> Any:
    """A method of a trainer of TRL, called on an object with these attributes."""
    return partial(getattr(load(trainer), name), SimpleNamespace(**attributes))


class Accelerator:
    """One process: what is gathered or reduced over ranks is what was given."""

    device, process_index, sync_gradients = CPU, 0, True

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes

    def gather(self, x: Any) -> Any:
        """Of one process, itself."""
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """Of one process, itself."""
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        """Of one process, itself."""
        return x


@contextmanager
def in_float64() -> Iterator[None]:
    """Let TRL make its own numbers in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def metrics() -> dict[str, defaultdict[str, list[float]]]:
    """Where a trainer logs."""
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def grpo_trainer(options: Options) -> SimpleNamespace:
    """What GRPOTrainer._compute_loss reads of itself and of its args."""
    given = vars(options)
    trainer = SimpleNamespace(
        **given,
        args=SimpleNamespace(**given),
        model=SimpleNamespace(training=options.training),
        accelerator=Accelerator(options.processes),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        vllm_importance_sampling_correction=True,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _metrics=metrics(),
        _entropy_bonus_enabled=options.entropy_coef != 0,
    )
    trainer.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a)
    return trainer


def grpo_inputs(mask: Tensor, advantages: Tensor, **more: Tensor | None) -> dict[str, Tensor]:
    """The batch of a policy loss; what is None is left out."""
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    return batch | {name: value for name, value in more.items() if value is not None}


def policy_loss(
    trainer: SimpleNamespace,
    logprobs: Tensor,
    entropies: Tensor,
    inputs: dict[str, Tensor],
    cls: Any = GRPOTrainer,
) -> Tensor:
    """`cls._compute_loss` where the model's log-probabilities and entropies are the ones given."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    with in_float64():
        loss: Tensor = cls._compute_loss(trainer, None, inputs)
    return loss


def labels(mask: Tensor) -> Tensor:
    """Labels as TRL has them: -100 where a token is masked."""
    return torch.where(mask, 1, -100)
