"""The conventions of NeMo-RL and slime, in which a loss gets the counts of the whole batch, or a reducer
with them.

Read in NVIDIA-NeMo/RL at 7ea279a (`nemo_rl/algorithms/loss/interfaces.py`, `models/policy/workers`) and in
THUDM/slime at 624b824 (`slime/backends/megatron_utils/loss.py`). Neither is imported.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair
from composer_plugins.frameworks.slime import ESTIMATOR
from composer_plugins.frameworks.slime import SLIME as TABLE
from composer_plugins.testing.conventions.logits import is_metric
from composer_plugins.testing.conventions.sums import is_number

# What NeMo-RL's workers and grpo_train read of the metrics; without it they raise a KeyError.
READ = ("loss", "num_valid_samples", "gen_kl_error", "token_mult_prob_error")


def wider(x: Tensor) -> Tensor:
    """With a first column, which the log-probabilities of next tokens have not."""
    return torch.nn.functional.pad(x, (1, 0))


def call_nemo_rl(
    function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call it as the policy worker does, with the valid tokens and sequences of the global batch."""
    mask, logprobs = tensors["mask"], tensors["logprobs"]
    data = {
        "input_ids": wider(mask).long(),
        "token_mask": wider(mask).to(logprobs.dtype),
        "sample_mask": torch.ones(len(mask), dtype=logprobs.dtype),
        "advantages": wider(tensors["advantages"].expand(mask.shape)),
        "prev_logprobs": wider(tensors["old_logprobs"]),
        "generation_logprobs": wider(tensors.get("rollout_logprobs", tensors["old_logprobs"])),
        "reference_policy_logprobs": wider(tensors.get("ref_logprobs", tensors["old_logprobs"])),
    }
    result = function(
        next_token_logprobs=logprobs,
        data=data,
        global_valid_seqs=torch.tensor(float(counts.rows)),
        global_valid_toks=torch.tensor(float(counts.tokens)),
    )
    loss, problems = checked_pair(result, is_number, "a number")
    metrics = result[1] if isinstance(result[1], Mapping) else {}
    absent = [name for name in READ if metrics and name not in metrics]
    more = (f"its metrics have no {', '.join(map(repr, absent))}, which grpo_train reads",) if absent else ()
    return Called(loss, (*problems, *more))


NEMO_RL = Convention(
    framework="nemo-rl",
    signature="fn(next_token_logprobs, data, global_valid_seqs, global_valid_toks)",
    returns="(loss, metrics): the part of this micro-batch in the mean of the global batch, with a "
    "gradient, and "
    f"a dict of Python numbers with {', '.join(map(repr, READ))}. NeMo-RL adds up micro-batches and ranks",
    call=call_nemo_rl,
    optional=("rollout_logprobs", "ref_logprobs"),
    names={
        "logprobs": "next_token_logprobs",
        "old_logprobs": "data['prev_logprobs']",
        "rollout_logprobs": "data['generation_logprobs']",
        "ref_logprobs": "data['reference_policy_logprobs']",
        "advantages": "data['advantages']",
        "mask": "data['token_mask'] and data['sample_mask']",
    },
)


# slime. A vocabulary of two entries has the log-probabilities that are given, which are entry 0's at every
# token.


def logits_of(logprobs: Tensor) -> Tensor:
    """Packed logits [1, T, 2] of responses behind a prompt of one token, for tokens of the id 0."""
    others = torch.log(-torch.expm1(logprobs.clamp(max=-1e-12)))
    pairs = torch.stack([logprobs, torch.where(logprobs.detach() < -1e-12, others, -60.0)], -1)
    return torch.nn.functional.pad(pairs, (0, 0, 0, 1)).flatten(0, 1).unsqueeze(0)


def log_probs_of(
    logits: Tensor,
    *,
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """slime's get_log_probs_and_entropy, on one rank and for tokens of the id 0."""
    log_p, found = logits[0].log_softmax(-1), {"log_probs": list[Tensor](), "entropy": list[Tensor]()}
    end = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        part = log_p[end - response - 1 : end - 1]
        found["log_probs"].append(part[:, 0])
        found["entropy"].append(-(part.exp() * part).sum(-1))
    if not with_entropy:
        del found["entropy"]
    return torch.empty(0), found


@contextmanager
def modules_of_slime() -> Iterator[None]:
    """slime's modules with this function, for a loss that imports them, where slime is not installed."""
    if "slime" in sys.modules or find_spec("slime") is not None:
        yield
        return
    package = "slime.backends.megatron_utils"
    loss: Any = ModuleType(f"{package}.loss")
    loss.get_log_probs_and_entropy = log_probs_of
    loss.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    cp: Any = ModuleType(f"{package}.cp_utils")
    cp.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    cp.all_gather_with_cp = cp.slice_log_prob_with_cp = lambda x, *_: x
    added = {name: ModuleType(name) for name in ("slime", "slime.backends", package)}
    added |= {loss.__name__: loss, cp.__name__: cp}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


def reducer(masks: list[Tensor], sums: Tensor, per_token: bool) -> Callable[[Tensor], Tensor]:
    """slime's sum_of_sample_mean, or its sum over tokens."""

    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split([len(one) for one in masks]), masks, sums, strict=True)
        return torch.stack(
            [(one * m).sum() / (1 if per_token else n.clamp(min=1)) for one, m, n in parts]
        ).sum()

    return reduce


def is_scalar(value: Any) -> bool:
    """Whether slime can put it into one tensor with the others."""
    return is_number(value) or is_metric(value)


def call_slime(
    function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call it as slime's dispatcher does, and divide by the rollouts or by the tokens of the step."""
    logprobs, mask, per_token = tensors["logprobs"], tensors["mask"], options["reduction"] == "tokens"
    rows, width = mask.shape
    # A logit of NaN makes its softmax NaN, whatever the loss is: at masked tokens only other inputs are NaN.
    logprobs = torch.where(mask | logprobs.isfinite(), logprobs, -1.0)
    masks = [one.to(logprobs.dtype) for one in mask]
    sums = torch.stack([one.sum() for one in masks])
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.zeros(width + 1, dtype=torch.long) for _ in range(rows)],
        "total_lengths": [width + 1] * rows,
        "response_lengths": [width] * rows,
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        "advantages": list(tensors["advantages"].expand(mask.shape)),
        "log_probs": list(tensors["old_logprobs"]),
        "rollout_log_probs": list(tensors.get("rollout_logprobs", tensors["old_logprobs"])),
        "ref_log_probs": list(tensors.get("ref_logprobs", tensors["old_logprobs"])),
    }
    given = {one.key: one.default for one in TABLE.options} | {"eps_clip_high": 0.2, ESTIMATOR: "grpo"}
    given |= {
        "calculate_per_token_loss": per_token,
        "rollout_top_p": 1.0,
        "qkv_format": "thd",
        "composer": {"policy": "grpo@slime"},
    }
    given |= {"loss_type": "custom_loss", "allgather_cp": False, "log_probs_chunk_size": -1}
    with modules_of_slime():
        result = function(
            SimpleNamespace(**given), batch, logits_of(logprobs), reducer(masks, sums, per_token)
        )
    loss, problems = checked_pair(result, is_scalar, "a number, or a tensor [] without a gradient")
    return Called(loss / (counts.tokens if per_token else counts.rows), problems)


SLIME = Convention(
    framework="slime",
    signature="fn(args, batch, logits, sum_of_sample_mean)",
    returns="(loss, metrics): what sum_of_sample_mean makes of one loss per token of all responses, with a "
    "gradient, "
    "and a dict of tensors []. slime divides by the rollouts or the tokens of the step",
    call=call_slime,
    optional=("rollout_logprobs", "ref_logprobs"),
    options={"reduction": ("rollouts", "tokens")},
    names={
        "logprobs": "logits",
        "old_logprobs": "batch['log_probs']",
        "rollout_logprobs": "batch['rollout_log_probs']",
        "ref_logprobs": "batch['ref_log_probs']",
        "advantages": "batch['advantages']",
        "mask": "batch['loss_masks']",
    },
)
