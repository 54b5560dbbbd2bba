"""A recorded or drawn case of PRIME-RL's losses in the words of `[trainer.loss.kwargs]`."""

from typing import Any

import torch
from torch import Tensor

from parity_tests.golden.test_prime_rl import DIALECTS, dtype_of, options
from parity_tests.rigs import golden
from parity_tests.rigs.prime_rl_doubles import GENERATIONS, WithTeacher, WithWeights

Case = dict[str, Any]
SCORED = {"ce", "sft"}  # cross-entropy is REINFORCE with an advantage of 1


def kwargs_of(version: str, function: str, hp: dict[str, Any]) -> dict[str, Any]:
    """The table that makes our `loss_fn` this function of that version, with these options of its."""
    if function in SCORED:
        return {"policy": "reinforce"}
    params = options(hp)
    kwargs: dict[str, Any] = {"policy": DIALECTS[version][function]}
    if hp.get("teacher_tau"):  # where the adv_tau of the kernel would scale the hint too
        params.pop("adv_tau", None)
        kwargs |= {"hint_weight": float(hp["teacher_tau"]), "hint_estimator": "advantage"}
    return kwargs | ({"policy_params": params} if params else {})


def loss_inputs(version: str, function: str, hp: dict[str, Any], case: Case) -> WithTeacher | WithWeights:
    """The sequence as that version hands it over."""
    dtype = dtype_of(case)
    logprobs, rollout, advantages = (
        golden.tensor(case[name], dtype) for name in ("trainer_logprobs", "inference_logprobs", "advantages")
    )
    if function in SCORED:
        advantages = torch.ones_like(advantages)
    if hp.get("teacher_tau"):
        advantages = hp.get("adv_tau", 1.0) * advantages
    mask = torch.tensor(case["loss_mask"], dtype=torch.bool)

    def optional(name: str) -> Tensor | None:
        return None if case.get(name) is None else golden.tensor(case[name], dtype)

    given = (logprobs.requires_grad_(), rollout, optional("ref_logprobs"), advantages, mask)
    generation = GENERATIONS[version]
    return (
        generation.inputs(*given, optional("loss_weights"))
        if generation.weighs
        else generation.inputs(*given)
    )
