"""A recorded or drawn case of PRIME-RL's losses in our words, and in those of `[trainer.loss.kwargs]`."""

from typing import Any

import torch
from torch import Tensor

from parity_tests.rigs import golden
from parity_tests.rigs.prime_rl_doubles import LossInputs

Case = dict[str, Any]
INPUTS = {case["id"]: case for case in golden.load("prime_rl/inputs")}
SCORED = {"ce", "sft"}  # cross-entropy is REINFORCE with an advantage of 1

# What an upstream option is called here; "ipo_threshold" is both bounds.
MASKS = {"dppo": "tv", "ipo": "tv", "token": "token", "geo": "geo", "sequence": "sequence"}
OURS = {f"{theirs}_mask_{end}": f"{ours}_{end}" for theirs, ours in MASKS.items() for end in ("low", "high")}
OURS |= {"ratio_type": "level", "adv_tau": "adv_tau", "kl_tau": "kl_tau"}

# By version and function: the dialect that is meant to be it.
DIALECTS = {
    "v0.4.0": {"default": "masked_is@prime-rl<0.5"},
    "v0.5.0": {"default": "ipo@prime-rl<0.6"},
    "v0.6.0": {"default": "dppo_tv@prime-rl", "ipo": "ipo@prime-rl", "opd": "ref_kl@prime-rl<0.7"},
    "v0.8.0": {"default": "dppo_tv@prime-rl", "ipo": "ipo@prime-rl", "ref_kl": "ref_kl@prime-rl"},
}


def options(hp: dict[str, Any]) -> dict[str, Any]:
    """Upstream's options under our names; its teacher term is part of the advantage."""
    ours = {OURS[k]: v for k, v in hp.items() if k in OURS}
    unknown = hp.keys() - OURS.keys() - {"ipo_threshold", "teacher_tau", "sequence_clip_high"}
    assert not unknown, f"the comparison would ignore {unknown}"
    if "ipo_threshold" in hp:
        ours |= {"tv_low": hp["ipo_threshold"], "tv_high": hp["ipo_threshold"]}
    if hp.get("ratio_type") == "sequence":
        ours["ratio_cap"] = hp.get("sequence_clip_high", 10.0)
    return ours


def kwargs_of(function: str, hp: dict[str, Any]) -> dict[str, Any]:
    """The table that makes our `loss_fn` this function of v0.8.0, with these options of its."""
    if function in SCORED:
        return {"policy": "reinforce"}
    params = options(hp)
    return {"policy": DIALECTS["v0.8.0"][function]} | ({"policy_params": params} if params else {})


def loss_inputs(function: str, case: Case) -> LossInputs:
    """The sequence as v0.8.0 hands it over."""
    dtype = golden.dtype(case)
    logprobs, rollout, advantages = (
        golden.tensor(case[name], dtype) for name in ("trainer_logprobs", "inference_logprobs", "advantages")
    )
    if function in SCORED:
        advantages = torch.ones_like(advantages)
    mask = torch.tensor(case["loss_mask"], dtype=torch.bool)

    def optional(name: str) -> Tensor | None:
        return None if case.get(name) is None else golden.tensor(case[name], dtype)

    reference, weights = optional("ref_logprobs"), optional("loss_weights")
    return LossInputs(logprobs.requires_grad_(), rollout, reference, advantages, mask, weights)
