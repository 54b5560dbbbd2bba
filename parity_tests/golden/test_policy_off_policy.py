"""Policy losses for old data against the code of their authors and of frameworks, as recorded.

Every recorded loss is a sum over the unmasked tokens. A case names the options that are not upstream's
defaults: without any, the dialect alone reproduces it.
"""

from typing import Any

import torch

from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import NAMES, called

# Whose code a file has recorded: the dialect of its losses.
AUTHORS = {
    "spo_policy": "@spo",
    "unirl_policy": "@unirl",
    "trinity_off_policy": "@trinity-rft",
    "roll_methods": "@roll",
    "luffy_policy": "@luffy",
    "ms_swift_fipo": "@ms-swift",
    "archer_policy": "@archer",
    "openrlhf_gate_policy": "@openrlhf",
    "open_instruct_policy": "@open-instruct",
    "ce_gppo_policy": "@ce-gppo",
    "dcpo_policy": "@dcpo",
    "lightrft_policy": "@lightrft",
    "bapo_policy": "@bapo",
    "m2po_policy": "@m2po",
}
# What they call our parameters, where it is another name and not as in `NAMES`.
OWN_NAMES = {
    "epsilon": "epsilon",
    "drpo_epsilon": "delta",
    "clip_mode": "clip",
    "epsilon_low": "clip_low",
    "epsilon_high_prime": "outer_high",
    "fipo_decay_rate": "half_life",
    "is_correction_threshold": "delta",
    "rho_mask_upper_bound": "threshold",
    "rho_clamp_upper_bound": "weight_cap",
    "gppo_loss_beta1": "beta_low",
    "gppo_loss_beta2": "beta_high",
    "clip_ratio_low": "epsilon_low",
    "clip_ratio_high": "epsilon_high",
    "ratio_lower_max": "ratio_low_max",
    "ratio_upper_max": "ratio_high_max",
    "ratio_upper_step": "step_high",
    "M2_budget": "budget",
    "miniclip_low": "least_low",
    "miniclip_high": "least_high",
}
OFF = 1e9  # a bound that no token reaches
FLOAT32 = {"lightrft_policy", "m2po_policy"}  # the logarithms of the one's bounds, and the other's bounds


def ours(key: str, value: Any) -> dict[str, Any]:
    """An option of upstream as our parameters."""
    match key:
        case "weight":
            return {"weight": "ratio" if value == "importance_sampling" else value}
        case "off_policy_reshape":
            gamma = float(value.removeprefix("p_div_p_"))
            return {} if gamma == 0.1 else {"gamma": gamma}  # the default of the dialect
        case "adv_ratio_target":
            return {"share": value / (1 + value)}
        case "fipo_clip_high_only":
            return {}
        case "fipo_clip_range":
            low, high = (0.0, OFF) if value is None else (1 - value, 1 + value)
            return {"weight_low": low, "weight_high": high}
        case "fipo_safety_threshold":
            return {"safety": value or OFF}
    names = (OWN_NAMES[key],) if key in OWN_NAMES else NAMES.get(key, (key,))
    return dict.fromkeys(names, value)


@claim(*AUTHORS)
def test_losses_equal_their_authors(case: Case) -> None:
    """Value and gradient, where upstream's value of a clipped token is ours and its bound is not a float32.

    Our KL in flash_reinforce adds 1e-8 inside the logarithm of 1 - p, and OpenRLHF clamps p: no response is
    so near delta.
    """
    name = f"{case['fn'].replace('kimi15', 'dro')}{AUTHORS[case['file']]}"
    params = {key: x for theirs, value in case["kwargs"].items() for key, x in ours(theirs, value).items()}
    token, logprobs, mask, choice = called(name, case, **params)
    (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
    loss, recorded = token.loss.detach(), golden.tensor(case["grad_log_prob"])
    if name == "sppo@trinity-rft":  # the value of a clipped token is 0 there, and that of the bound here
        clipped = token.metrics["clip_frac_low"].value | token.metrics["clip_frac_high"].value
        assert not gradient[clipped].any()
        loss = torch.where(clipped, 0.0, loss)
    elif name == "aspo@archer":  # at the dual clip it is -A dual_clip log pi there, and -A dual_clip here
        at_dual_clip = (token.metrics["weight"].value == choice.params["dual_clip"]) & mask
        loss = torch.where(at_dual_clip, loss * logprobs.detach(), loss)
    elif name == "m2po@m2po":  # at their bounds, which are float32, a token may be clipped there alone
        ratio, low, high = (token.metrics[key].value for key in ("ratio", "clip_low", "clip_high"))
        at_bound = (ratio - low).abs().minimum((ratio - high).abs()) < 1e-9
        clipped_there = at_bound & (recorded == 0)
        assert clipped_there.sum() <= 1
        gradient = torch.where(clipped_there, 0.0, gradient)
    least = 1e3 if name == "drpo@unirl" else 1.0
    largest = max(least, float(loss.abs().max()), float(gradient.abs().max()))
    scale = {"magnitude": largest, "dtype": torch.float32 if case["file"] in FLOAT32 else torch.float64}
    assert_parity(loss.sum(), golden.tensor(case["loss"]), terms=2 * loss.numel(), **scale)
    assert_parity(gradient, recorded, terms=loss.shape[-1] + 1, **scale, what="gradient")
