"""Policy losses for old data against the code of their authors and of frameworks, as recorded.

Every recorded loss is a sum over the unmasked tokens. A case names the options that are not upstream's
defaults: without any, the dialect alone reproduces it. The proofs of
spo@spo, drpo@unirl, topr@trinity-rft, topr@roll, rec@trinity-rft, opmd@trinity-rft, sppo@trinity-rft,
dro@roll, cispo@roll, luffy@luffy, fipo@ms-swift, aspo@archer, flash_reinforce@openrlhf, tvpo@open-instruct,
bapo@bapo, m2po@m2po, ce_gppo@ce-gppo, dcpo@dcpo and cpgd@lightrft are here.
"""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim

RECORDED = {
    "logprobs": "log_prob",
    "old_logprobs": "old_log_prob",
    "rollout_logprobs": "rollout_log_prob",
    "advantages": "advantages",
}


def ours(name: str, case: Case, **params: Any) -> tuple[TokenLoss, Tensor, dict[str, Tensor]]:
    """The loss per token of a dialect, its gradient, and what it was called with."""
    needs = choose("policy", name, params).loss.needs
    inputs = {need: golden.tensor(case[RECORDED[need]]) for need in needs if need in RECORDED}
    inputs["mask"] = golden.tensor(case["response_mask"]).bool()
    inputs["logprobs"].requires_grad_()
    token = reductions.kernel("policy", name, **params)(*(inputs[need] for need in needs))
    (gradient,) = torch.autograd.grad(token.loss.sum(), inputs["logprobs"])
    return token, gradient, inputs


def assert_equals(
    case: Case,
    token: TokenLoss,
    gradient: Tensor,
    *,
    missing: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    magnitude: float = 0.0,
) -> None:
    """Assert equality of the sum and its gradient; `missing` is what upstream's value has more, per token."""
    loss = token.loss.detach() if missing is None else token.loss.detach() + missing
    largest = max(1.0, magnitude, float(loss.abs().max()), float(gradient.abs().max()))
    assert_parity(
        loss.sum(), golden.tensor(case["loss"]), terms=2 * loss.numel(), magnitude=largest, dtype=dtype
    )
    recorded = golden.tensor(case["grad_log_prob"])
    assert_parity(
        gradient, recorded, terms=loss.shape[-1] + 1, magnitude=largest, dtype=dtype, what="gradient"
    )


@claim("spo_policy")
def test_spo_equals_its_authors(case: Case) -> None:
    assert_equals(case, *ours("spo@spo", case, **case["kwargs"])[:2])


@claim("unirl_policy")
def test_drpo_equals_its_authors(case: Case) -> None:
    params = {"delta": case["kwargs"]["drpo_epsilon"]} if case["kwargs"] else {}
    assert_equals(case, *ours("drpo@unirl", case, **params)[:2], magnitude=1e3)


@claim("trinity_off_policy", where=lambda case: case["fn"] == "topr")
def test_topr_equals_trinity(case: Case) -> None:
    assert_equals(case, *ours("topr@trinity-rft", case)[:2])


REC = {
    "clip_mode": "clip",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "epsilon_high_prime": "outer_high",
}


@claim("trinity_off_policy", where=lambda case: case["fn"] == "rec")
def test_rec_equals_trinity(case: Case) -> None:
    given = dict(case["kwargs"])
    weight = {"weight": "ratio"} if given.pop("weight", "none") == "importance_sampling" else {}
    params = {REC[key]: value for key, value in given.items()} | weight
    assert_equals(case, *ours("rec@trinity-rft", case, **params)[:2])


@claim("trinity_off_policy", where=lambda case: case["fn"] == "opmd")
def test_opmd_equals_trinity(case: Case) -> None:
    assert_equals(case, *ours("opmd@trinity-rft", case, **case["kwargs"])[:2])


@claim("trinity_off_policy", where=lambda case: case["fn"] == "sppo")
def test_sppo_equals_trinity(case: Case) -> None:
    """The value of a clipped token is 0 there, and that of the bound here."""
    token, gradient, inputs = ours("sppo@trinity-rft", case, **case["kwargs"])
    clipped = token.metrics["clip_frac_low"].value | token.metrics["clip_frac_high"].value
    assert not gradient[clipped].any()
    missing = torch.where(clipped, -token.loss.detach(), 0.0)
    assert_equals(case, token, gradient, missing=missing)
    assert inputs["mask"][clipped & inputs["mask"]].all()


@claim("roll_methods")
def test_losses_equal_roll(case: Case) -> None:
    """kimi15 is dro; a topr whose scores are the advantages."""
    names = {"topr": "topr@roll", "kimi15": "dro@roll", "cispo": "cispo@roll"}
    keys = {"kimi15_tau": "beta", "cispo_epsilon_low": "clip_low", "cispo_epsilon_high": "clip_high"}
    params = {keys[key]: value for key, value in case["kwargs"].items()}
    assert_equals(case, *ours(names[case["fn"]], case, **params)[:2])


@claim("luffy_policy")
def test_luffy_equals_its_authors(case: Case) -> None:
    gamma = float(case["kwargs"]["off_policy_reshape"].removeprefix("p_div_p_"))
    assert_equals(case, *ours("luffy@luffy", case, **({} if gamma == 0.1 else {"gamma": gamma}))[:2])


OFF = 1e9  # a bound that no token reaches


@claim("ms_swift_fipo")
def test_fipo_equals_ms_swift(case: Case) -> None:
    given, params = case["kwargs"], {}
    if "delta" in given:
        params["ratio_cap"] = given["delta"]
    if "fipo_decay_rate" in given:
        params["half_life"] = given["fipo_decay_rate"]
    if "fipo_safety_threshold" in given:
        params["safety"] = given["fipo_safety_threshold"] or OFF
    if "fipo_clip_range" in given:
        c = given["fipo_clip_range"]
        params["weight_low"], params["weight_high"] = (0.0, OFF) if c is None else (1 - c, 1 + c)
    assert_equals(case, *ours("fipo@ms-swift", case, **params)[:2])


@claim("archer_policy")
def test_aspo_equals_its_authors(case: Case) -> None:
    """At the dual clip the value is -A dual_clip log pi there, and -A dual_clip here."""
    token, gradient, inputs = ours("aspo@archer", case, **case["kwargs"])
    weight = token.metrics["weight"].value
    at_dual_clip = (weight == case["kwargs"].get("dual_clip", 3.0)) & inputs["mask"]
    logprobs = inputs["logprobs"].detach()
    missing = torch.where(at_dual_clip, token.loss.detach() * (logprobs - 1), 0.0)
    assert_equals(case, token, gradient, missing=missing)


@claim("openrlhf_gate_policy")
def test_flash_reinforce_equals_openrlhf(case: Case) -> None:
    """Our KL adds 1e-8 inside the logarithm of 1 - p, and theirs clamps p: no response is so near delta."""
    delta = case["kwargs"]["is_correction_threshold"]
    assert_equals(case, *ours("flash_reinforce@openrlhf", case, delta=delta)[:2])


@claim("open_instruct_policy")
def test_tvpo_equals_open_instruct(case: Case) -> None:
    keys = {"rho_mask_upper_bound": "threshold", "rho_clamp_upper_bound": "weight_cap"}
    params = {keys[key]: value for key, value in case["kwargs"].items()}
    assert_equals(case, *ours("tvpo@open-instruct", case, **params)[:2])


@claim("ce_gppo_policy")
def test_ce_gppo_equals_its_authors(case: Case) -> None:
    keys = {"gppo_loss_beta1": "beta_low", "gppo_loss_beta2": "beta_high", "clip_ratio_c": "dual_clip"}
    params = {keys[key]: value for key, value in case["kwargs"].items()}
    assert_equals(case, *ours("ce_gppo@ce-gppo", case, **params)[:2])


@claim("dcpo_policy")
def test_dcpo_equals_its_authors(case: Case) -> None:
    keys = {"clip_ratio_low": "epsilon_low", "clip_ratio_high": "epsilon_high", "clip_ratio_c": "dual_clip"}
    params = {keys[key]: value for key, value in case["kwargs"].items()}
    assert_equals(case, *ours("dcpo@dcpo", case, **params)[:2])


@claim("lightrft_policy")
def test_cpgd_equals_lightrft(case: Case) -> None:
    """The logarithms of its bounds are float32."""
    params = {f"clip_{side}": value for value in case["kwargs"].values() for side in ("low", "high")}
    assert_equals(case, *ours("cpgd@lightrft", case, **params)[:2], dtype=torch.float32)


BAPO = {
    "ratio_lower_max": "ratio_low_max",
    "ratio_upper_max": "ratio_high_max",
    "ratio_upper_step": "step_high",
}


@claim("bapo_policy")
def test_bapo_equals_its_authors(case: Case) -> None:
    given = dict(case["kwargs"])
    target = given.pop("adv_ratio_target", 1.0)
    params = {BAPO[key]: value for key, value in given.items()} | {"share": target / (1 + target)}
    assert_equals(case, *ours("bapo@bapo", case, **params)[:2])


@claim("m2po_policy")
def test_m2po_equals_its_authors(case: Case) -> None:
    """Their bounds are float32, so a token at a bound may be clipped there; it is not here."""
    keys = {"M2_budget": "budget", "miniclip_low": "least_low", "miniclip_high": "least_high"}
    params = {keys[key]: value for key, value in case["kwargs"].items()}
    token, gradient, _ = ours("m2po@m2po", case, **params)
    ratio, low, high = (token.metrics[name].value for name in ("ratio", "clip_low", "clip_high"))
    clipped_there = ((ratio - low).abs().minimum((ratio - high).abs()) < 1e-9) & (
        golden.tensor(case["grad_log_prob"]) == 0
    )
    assert clipped_there.sum() <= 1
    assert_equals(case, token, torch.where(clipped_there, 0.0, gradient), dtype=torch.float32)
