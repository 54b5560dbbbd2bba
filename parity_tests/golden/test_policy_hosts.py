"""Policy losses against torchtitan, ROLL, ms-swift, OpenRLHF 0.11 and AReaL as recorded: value and gradient.

Each is called through its catalogue row. A case names the options that are not upstream's defaults: without
any, the row alone reproduces it.
"""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import Called, assert_equals, assert_reduced, called, params


def weighed(found: Called, weights: Tensor) -> Called:
    """The loss times the weights of a rollout correction."""
    return found._replace(token=corrected(found.token, weights, found.mask))


def correction(
    case: Case, name: str, mask: Tensor, dtype: torch.dtype = torch.float64, **options: Any
) -> Tensor:
    """The weights of a correction of ours, of the old over the rollout policy."""
    old, rollout = (golden.tensor(case[f"{policy}_log_prob"]).to(dtype) for policy in ("old", "rollout"))
    weights: Tensor = reductions.kernel("correction", name)(old, rollout, mask, **options)
    return weights


CLASSES = {"GRPOLoss": "grpo@torchtitan", "DAPOLoss": "dapo@torchtitan"}


@claim("torchtitan_policy")
def test_grpo_and_dapo_equal_torchtitan(case: Case) -> None:
    """A token without a finite log-probability of the generator is masked out, as the adapter does."""
    mask = golden.tensor(case["response_mask"]).bool() & golden.tensor(case["old_log_prob"]).isfinite()
    found = called(CLASSES[case["fn"]], case, mask, **params(case))
    assert found.choice.mode == "token-mean"
    assert_reduced(case, found, num_tokens=case["global_valid_tokens"])


# ROLL: a row by worker or pg_variant.
VARIANTS = {
    "ActorWorker": "grpo@roll",
    "ppo": "grpo@roll",
    "vanilla": "reinforce@roll",
    "tis": "masked_is@roll",
    "cispo": "cispo@roll",
    "topr": "topr@roll",
    "kimi15": "dro@roll",
}
ROLL_EPS = 1e-8


@claim("roll_policy")
def test_losses_equal_roll(case: Case) -> None:
    """`gspo@roll` is importance_sampling seq."""
    given, by_token = case["kwargs"], case["loss_agg_mode"] == "token-mean"
    name = "gspo@roll" if "importance_sampling" in given else VARIANTS[case["variant"]]
    dual_clip = {"dual_clip": 1 + 2 * 0.2} if given.get("dual_clip_loss") else {}  # of pg_clip
    token, logprobs, mask, choice = called(name, case, **params(case), **dual_clip)
    if by_token and name == "dro@roll":  # ROLL sums the square of the log ratio at masked tokens, too
        log_ratio = logprobs - golden.tensor(case["old_log_prob"])
        square = torch.where(mask, 0.0, choice.params["beta"] / 2 * log_ratio.square())
        token, mask = token._replace(loss=token.loss + square), torch.ones_like(mask)
    rows, tokens = int(mask.any(-1).sum()), golden.tensor(case["response_mask"]).sum()
    counts = {"num_tokens": tokens} if by_token else {"num_sequences": rows + ROLL_EPS}
    assert_reduced(case, Called(token, logprobs, mask, choice), case["loss_agg_mode"], **counts)


# ms-swift: a row by loss_type and importance_sampling_level.
LEVELS = {"sequence": "gspo@ms-swift", "sequence_token": "gspo_token@ms-swift"}


@claim("ms_swift_policy")
def test_losses_equal_ms_swift(case: Case) -> None:
    """`grpo@ms-swift`, `dapo@ms-swift` and so on; bnpo is grpo's loss with the tokens of the micro-batch."""
    given, kind = case["kwargs"], case["loss_type"]
    name = f"{'grpo' if kind == 'bnpo' else kind}@ms-swift"
    name = LEVELS.get(given.get("importance_sampling_level", "token"), name)
    name = "opsm@ms-swift" if "off_policy_sequence_mask_delta" in given else name
    options = params(case)
    if kind == "cispo":
        options = {"clip_high": given.get("epsilon_high", 0.2) - 1}
    elif "epsilon" in given:
        options = {"clip_high": given["epsilon"]} | options
    found = called(name, case, **options)
    rows, length, tokens = len(found.mask), case["max_completion_length"], case["num_items_in_batch"]
    mode, counts = {
        **dict.fromkeys(("grpo", "sapo"), ("seq-mean-token-mean", {"num_sequences": rows})),
        "bnpo": ("token-mean", {}),
        "dr_grpo": ("seq-mean-token-sum-norm", {"num_sequences": rows, "max_length": length}),
    }.get(kind, ("token-mean", {"num_tokens": tokens}))
    assert_reduced(case, found, mode, **counts)


# OpenRLHF 0.11


def is_row(case: Case) -> bool:
    """Whether the correction is one of ours: by the ratio of a token."""
    given = case["kwargs"]
    here = given.get("is_correction_level"), given.get("is_correction_gating", "ratio")
    return here == ("token", "ratio")


@claim("openrlhf_0_11_policy", where=lambda case: "policy_loss_type" in case["kwargs"])
def test_gspo_equals_openrlhf(case: Case) -> None:
    token, logprobs, mask, choice = called("gspo@openrlhf", case, **params(case))
    assert_equals(case, dialects.verl(token.loss, mask, choice.mode), token.loss, logprobs)


@claim("openrlhf_0_11_policy", where=is_row)
def test_corrections_equal_openrlhf(case: Case) -> None:
    """`icepop@openrlhf` is mode mask, `tis@openrlhf` is mode clip: weights old / rollout on PPO's loss."""
    clips = case["kwargs"].get("is_correction_mode") == "clip"
    name, names = ("tis@openrlhf", ("floor", "cap")) if clips else ("icepop@openrlhf", ("low", "high"))
    options = dict(zip(names, case["kwargs"].get("is_correction_threshold", ()), strict=False))
    found = called("ppo@openrlhf", case)
    assert_reduced(case, weighed(found, correction(case, name, found.mask, **options)))


@claim(
    "openrlhf_0_11_policy",
    where=lambda case: "policy_loss_type" not in case["kwargs"] and not is_row(case),
)
def test_the_other_gates_are_openrlhfs_formulas(case: Case) -> None:
    """They have no row: a token or sequence within the gate keeps its weight per token, others have none."""
    given, found = case["kwargs"], called("ppo@openrlhf", case)
    gating, (low, high) = given.get("is_correction_gating", "ratio"), given["is_correction_threshold"]
    log_q, log_p = (golden.tensor(case[f"{policy}_log_prob"]) for policy in ("old", "rollout"))
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (log_p, log_q))
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    value = {"ratio": log_q - log_p, "tv": (p - q).abs(), "binary_kl": kl}[gating]
    if given["is_correction_level"] == "seq":  # of no token it is NaN, and masked
        value = (value * found.mask).sum(-1, keepdim=True) / found.mask.sum(-1, keepdim=True)
    value = value.exp() if gating == "ratio" else value
    weights = torch.where((value >= low) & (value <= high), (log_q - log_p).exp(), 0.0)
    assert_reduced(case, weighed(found, weights.expand(found.mask.shape)))


# AReaL


@claim("areal_decoupled", where=lambda case: "importance_sampling_level" in case["kwargs"])
def test_gspo_equals_areal(case: Case) -> None:
    found = called("gspo@areal", case, **params(case))
    assert found.choice.mode == "token-mean"
    assert_reduced(case, found)


@claim("areal_decoupled", where=lambda case: "rejection_sampling" in case["kwargs"])
def test_decoupled_ppo_equals_areal(case: Case) -> None:
    """`mis@areal` is action mask, `tis@areal` is action clamp, on grpo@areal; weights are in float32.

    The mean is over all unmasked tokens, those that are rejected too.
    """
    given = dict(case["kwargs"]["rejection_sampling"])
    clamps = given.pop("action", "mask") == "clamp"
    name, names = ("tis@areal", ("floor", "cap")) if clamps else ("mis@areal", ("low", "high"))
    options = {ours: given[key] for ours, key in zip(names, ("lower", "upper"), strict=True) if key in given}
    options |= {"level": "geometric"} if given.get("level") == "sequence" else {}
    found = called("grpo@areal", case)
    token, logprobs, mask, _ = weighed(found, correction(case, name, found.mask, torch.float32, **options))
    loss = aggregate(token.loss, mask, "token-mean")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    for ours, recorded in ((loss, case["loss"]), (gradient, case["grad_log_prob"])):
        wanted = golden.tensor(recorded)
        largest = max(1.0, float(wanted.abs().max()))
        assert_parity(ours, wanted, terms=8, dtype=torch.float32, magnitude=largest)


# Trinity-RFT and Fireworks' cookbook

TRINITY = {"ppo": "ppo@trinity-rft", "cispo": "cispo@trinity-rft", "gspo": "gspo_token@trinity-rft"}
FIREWORKS = {"dapo": "dapo@fireworks", "cispo": "cispo@fireworks", "gspo": "gspo_token@fireworks"}


@claim("trinity_policy")
def test_losses_equal_trinity_rft(case: Case) -> None:
    """Its mask is of integers, so n + 1e-8 is n, in float32."""
    found = called(TRINITY[case["fn"]], case, **params(case))
    counts = {} if found.choice.mode == "token-mean" else {"num_sequences": len(found.mask)}
    assert_reduced(case, found, **counts)


@claim("fireworks_policy")
def test_losses_equal_fireworks(case: Case) -> None:
    """The loss times `tis@fireworks`, or IcePop's weight; a sum."""
    given, found = case["tis"], called(FIREWORKS[case["fn"]], case, **params(case))
    name, options = "tis@fireworks", {"cap": given["cap"]} if "cap" in given else {}
    if given.get("level") == "sequence":
        options["level"] = "geometric"
    if "icepop_threshold" in given:
        bound = given["icepop_threshold"]
        name, options = "icepop", {"low": 1 / bound, "high": bound}
    assert found.choice.mode == "token-sum"
    assert_reduced(case, weighed(found, correction(case, name, found.mask, **options)))
