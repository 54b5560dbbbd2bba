"""Miles' dispatcher on one rank, with its own losses and with ours.

`python -m parity_tests.rigs.miles_one_rank DIR` prints, for each loss of slime's table that Miles has, the
largest difference of value and gradient. Megatron's cross-entropy, which Miles calls, is a log-softmax here.
Packages without a part in a loss are empty modules.
"""

import os
import sys
import tempfile
from argparse import Namespace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_plugins.conformance.slime_claims import claims, upstream
from composer_plugins.conformance.stubs import stub
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.slime import ESTIMATOR, ICEPOP, SLIME
from composer_plugins.testing.draws import Draw

PACKAGE = "miles.backends.training_utils"
# The defaults of arguments that slime does not have.
MORE: dict[str, Any] = {
    **{"skip_actor_forward_only": False, "observe_training_entropy": False, "true_on_policy_mode": False},
    **{"global_batch_size": 4, "vocab_size": None, "use_dynamic_global_batch_size": False, "lora_rank": 0},
    **{
        "multi_lora_n_adapters": None,
        "dump_details": None,
        "custom_tis_function_path": None,
        "composer": None,
    },
}


class Arguments(Namespace):
    """Miles' arguments; one that is not named here is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def log_probs(logits: Tensor, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """What Megatron's fused cross-entropy computes on one rank."""
    found: Tensor = logits.log_softmax(-1).gather(-1, tokens.reshape(-1, 1))
    return found


def load(checkout: str) -> Any:
    """Miles' module of losses, on one rank."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    stub(*upstream.STUBBED, "safetensors", "pybase64", "datasets", "mlflow")
    sys.path.insert(0, checkout)
    loss = import_module(f"{PACKAGE}.loss")
    maths: Any = import_module(f"{PACKAGE}.loss_hub.math_utils")
    maths.compute_log_probs = log_probs
    one = Namespace(size=1, rank=0, group=None)
    names = ("cp", "tp", "pp", "intra_dp", "intra_dp_cp", "indep_dp", "effective_dp", "effective_dp_cp")
    import_module(f"{PACKAGE}.parallel").set_parallel_state(Namespace(**dict.fromkeys(names, one)))
    return loss


def difference(loss: Any, named: NamedLoss, seed: int) -> float:
    """The largest difference of value and gradient of one micro-batch."""
    draw, found = Draw(seed), []
    options, (logits, batch) = claims.drawn_options(named, draw), claims.drawn_batch(draw)
    for which in (claims.ours(options), options):
        args = Arguments(**{**MORE, **vars(claims.arguments(**which))})
        value, count, _ = loss.loss_function(args, dict(batch), 1, logits, num_rollouts=4)
        value = value / count
        found.append((value.detach(), torch.autograd.grad(value, logits)[0]))
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def main(checkout: str) -> None:
    """Print each loss with its largest difference."""
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    loss = load(checkout)
    for named in SLIME.losses:
        absent = named.options.get(ESTIMATOR) == "cispo" or ICEPOP in named.options.values()
        if named.kind != "advantage" and not absent:
            print(named.row, max(difference(loss, named, seed) for seed in range(20)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
