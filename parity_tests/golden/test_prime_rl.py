"""PRIME-RL's losses as recorded, v0.4.0 to @559b447: value, gradient, and the fractions it logs as masked.

PRIME-RL sums a sequence's tokens and divides by a scale that its trainer counts. One record is out of
reach of a comparison: a log ratio of 95 in float32 (`noise_kind` overflow), see `divergences.md`.
"""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels import policy
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.prime_rl_words import DIALECTS, INPUTS, SCORED, loss_inputs, options

PACKS = {pack["id"]: pack for pack in golden.beside("prime_rl/inputs", "packs")}
WEIGHTED = {"v0.8.0"}  # where a loss per token has a weight
TRAINED = ("trainer_logprobs", "inference_logprobs", "advantages")


def run(version: str, function: str, hp: dict[str, Any], inputs: Case) -> tuple[TokenLoss, Tensor]:
    """Our loss per token of one recorded sequence, and the log-probabilities it is a function of."""
    given = loss_inputs(function, inputs)
    logprobs, rollout, advantages = given.trainer_logprobs, given.inference_logprobs, given.advantages
    teacher, mask = given.ref_logprobs, given.loss_mask
    if function in SCORED:
        return policy.reinforce(logprobs, advantages, mask), logprobs
    kernel = reductions.kernel("policy", DIALECTS[version][function])
    if function == "opd":  # its task advantages choose a side of the region
        return kernel(logprobs, rollout, teacher, mask, advantages=advantages), logprobs
    if function == "ref_kl":
        return kernel(logprobs, rollout, teacher, mask), logprobs
    ours = options(hp)
    if hp.get("teacher_tau") and teacher is not None:  # only where the region does not ask for a sign
        assert not DIALECTS[version][function].startswith("dppo")
        scale = ours.pop("adv_tau", 1.0)
        advantages = scale * advantages + hp["teacher_tau"] * (teacher - logprobs.detach())
    return kernel(logprobs, rollout, advantages, mask, **ours), logprobs


def reduced(token: TokenLoss, inputs: Case, hp: dict[str, Any]) -> Tensor:
    """The sum over a sequence; v0.4.0 with a ratio per sequence, its mean."""
    mask = torch.tensor(inputs["loss_mask"], dtype=torch.bool)
    if hp.get("ratio_type") == "sequence":
        return aggregate(token.loss, mask, "seq-mean-token-mean")
    return aggregate(token.loss, mask, "token-sum")


def weighted(token: TokenLoss, weights: list[float] | None) -> TokenLoss:
    """The loss per token times `loss_weights`."""
    if weights is None:
        return token
    return token._replace(loss=token.loss * golden.tensor(weights, token.loss.dtype))


def assert_equals(loss: Tensor, token_loss: Tensor, logprobs: Tensor, theirs: Any, gradient: Any) -> None:
    """A loss and its gradient equal upstream's, in the precision of the record."""
    n, dtype, largest = logprobs.numel(), logprobs.dtype, float(token_loss.detach().abs().max())
    ours = torch.autograd.grad(loss, logprobs)[0]
    recorded = golden.tensor(theirs)
    assert_parity(loss, recorded, terms=n, dtype=dtype, magnitude=largest, what="loss")
    assert_parity(ours, golden.tensor(gradient), terms=n, dtype=dtype, what="gradient")


def assert_logs(token: TokenLoss, inputs: Case, metrics: dict[str, Any]) -> None:
    """What upstream logs: means over the unmasked tokens, the masked ones and the others."""
    mask = torch.tensor(inputs["loss_mask"], dtype=torch.bool)
    advantages = golden.tensor(inputs["advantages"])
    low, high = (token.metrics[name].value for name in ("mask_frac_low", "mask_frac_high"))

    def mean(value: Tensor, where: Tensor = mask) -> Tensor:
        return aggregate(value.to(torch.float64), where, "token-mean")

    logged = {name.removeprefix("ref_kl/"): value for name, value in metrics.items()}
    ours = {"is_masked": mean(low + high)}
    if isinstance(logged["is_masked"], list):  # v0.4.0: by token; its low and high are the tokens' alone
        values = logged["is_masked"]
        logged["is_masked"] = sum(values) / max(len(values), 1)
    else:
        ours |= {"is_masked_low": mean(low), "is_masked_high": mean(high)}
    if "masked_advantage_negative" in logged:  # a token of no advantage is masked on neither side
        dropped = mask & (low + high > 0)
        ours["is_masked_low"] = mean(low * (advantages < 0))
        ours["masked_advantage_positive"] = mean(advantages > 0, dropped)
        ours["masked_advantage_negative"] = mean(advantages < 0, dropped)
    for name in ours.keys() & logged.keys():
        recorded = golden.tensor(logged[name])
        assert_parity(ours[name], recorded, terms=1, dtype=torch.float32, magnitude=1.0, what=name)


def check_pack(version: str, case: Case) -> None:
    """Several sequences, one division; from v0.7 on a sum of three losses over weights of their own."""
    pack = PACKS[case["pack"]]
    sequences = [INPUTS[i] for i in pack["cases"]]
    parts: list[tuple[str, str, list[Case], Any]] = [(case["mode"], "loss_scale", sequences, None)]
    if version in WEIGHTED:
        parts = [
            (function, f"{stream}_scale", sequences, pack[f"{stream}_weights"])
            for function, stream in (("default", "rl"), ("ce", "ce"), ("ref_kl", "ref_kl"))
            if stream == "rl" or pack[f"{stream}_weights"] is not None
        ]
    total, leaves, terms = torch.zeros((), dtype=torch.float64), [], []
    gradients = [torch.zeros(len(s["loss_mask"]), dtype=torch.float64) for s in sequences]
    for function, scale, members, streams in parts:
        for i, inputs in enumerate(members):
            weights = None if streams is None else streams[i]
            chosen = inputs
            if weights is not None:  # a weight of 0 takes a token out; the rl loss has a mask besides
                of_rl = inputs["loss_mask"] if function == "default" else [True] * len(weights)
                chosen = inputs | {"loss_mask": [w != 0 and m for w, m in zip(weights, of_rl, strict=True)]}
            token, logprobs = run(version, {"rl": "default"}.get(function, function), {}, chosen)
            token = weighted(token, weights)
            loss = reduced(token, chosen, {}) / case["scales"][scale]
            total = total + loss.detach().double()
            gradients[i] += torch.autograd.grad(loss, logprobs)[0].double()
            terms.append(token.loss.detach().abs().max() / case["scales"][scale])
            leaves.append(logprobs)
    n, dtype = sum(x.numel() for x in leaves), leaves[0].dtype
    magnitude = float(torch.stack(terms).max())
    assert_parity(total, golden.tensor(case["loss"]), terms=n, dtype=dtype, magnitude=magnitude, what="loss")
    for i, gradient in enumerate(case["grad"]):
        assert_parity(gradients[i], golden.tensor(gradient), terms=n, dtype=dtype, what=f"gradient {i}")


@claim("prime_rl/v0.4.0", "prime_rl/v0.5.0", "prime_rl/v0.6.0", "prime_rl/v0.8.0")
def test_losses_of_a_release_equal_prime_rl(case: Case) -> None:
    """With `masked_is@prime-rl<0.5`, `ipo@prime-rl<0.6`, `dppo_tv@prime-rl` and `ref_kl@prime-rl<0.7`."""
    version = case["file"].removeprefix("prime_rl/")
    assert INPUTS, "prime_rl/inputs.json, where the inputs of this file are, is not there"
    if "pack" in case:
        return check_pack(version, case)
    inputs, function = INPUTS[case["case"]], case["fn"].removesuffix("_loss_fn")
    if "raises" in case:  # it takes a teacher, and there is none: here that is an input by position
        row = DIALECTS[version][function].partition("@")[0]
        assert inputs["ref_logprobs"] is None
        assert "teacher_logprobs" in of_kind(losses(), "policy")[row].needs
        return None
    token, logprobs = run(version, function, case["hp"], inputs)
    token = weighted(token, inputs["loss_weights"] if version in WEIGHTED else None)
    loss = reduced(token, inputs, case["hp"])
    if not (golden.tensor(case["loss"]).isfinite() and golden.tensor(case["grad"]).isfinite().all()):
        assert inputs["noise_kind"] == "overflow"
        assert loss.isfinite() and torch.autograd.grad(loss, logprobs)[0].isfinite().all()
        return None
    assert_equals(loss, token.loss, logprobs, case["loss"], case["grad"])
    if function not in SCORED:
        assert_logs(token, inputs, case["metrics"])
    return None


@claim("prime_rl_losses")
def test_losses_equal_prime_rl(case: Case) -> None:
    token, logprobs = run("v0.8.0", case["loss_fn"], case["kwargs"], case)
    token = weighted(token, case["loss_weights"])
    loss = reduced(token, case, {})
    assert_equals(loss, token.loss, logprobs, case["loss"], case["grad_trainer_logprobs"])
    if case["loss_fn"] != "ce":
        assert_logs(token, case, case["metrics"])


def test_prime_rl_overflows_where_ours_saturates() -> None:
    """Holds a row of divergences.md; ours is held finite on the same records by the claims above."""
    for version in ("v0.5.0", "v0.6.0", "v0.8.0"):
        records = [c for c in golden.load(f"prime_rl/{version}") if c.get("fn") == "default_loss_fn"]
        stale = [c for c in records if INPUTS[c["case"]]["noise_kind"] == "overflow"]
        assert stale and not any(golden.tensor(c["loss"]).isfinite() for c in stale)


def trains(sequence: Case) -> Tensor:
    """The tokens of a sequence that count: a weight of 0 masks one."""
    mask = torch.tensor(sequence["loss_mask"])
    return mask & (golden.tensor(sequence["rl_weights"]) != 0) if "rl_weights" in sequence else mask


@claim("prime_rl_reduction")
def test_reductions_equal_prime_rl(case: Case) -> None:
    """`token-sum@prime-rl` of a sequence, and of a micro-batch `token-mean@prime-rl`.

    The denominator is the number of tokens of every micro-batch and rank.
    """
    name, hp = DIALECTS["v0.8.0"][case["loss_fn"].removesuffix("_loss_fn")], options(case["kwargs"])
    token_sum, token_mean = (
        reductions.kernel("aggregation", f"{mode}@prime-rl") for mode in ("token-sum", "token-mean")
    )
    tokens = sum(int(trains(s).sum()) for part in case["micro_batches"] for s in part["sequences"])
    assert case["rl_scale"] == max(tokens, 1)
    for part in case["micro_batches"]:
        masks, per_token, leaves = [], [], []
        for sequence in part["sequences"]:
            logprobs, rollout, advantages = (golden.tensor(sequence[key]) for key in TRAINED)
            mask = trains(sequence)
            token = reductions.kernel("policy", name)(
                logprobs.requires_grad_(), rollout, advantages, mask, **hp
            )
            token = weighted(token, sequence.get("rl_weights"))
            largest = float(token.loss.detach().abs().max())
            recorded = golden.tensor(sequence["sum"])
            assert_parity(token_sum(token.loss, mask), recorded, terms=len(mask), magnitude=largest)
            masks.append(mask), per_token.append(token.loss), leaves.append(logprobs)
        loss = token_mean(torch.cat(per_token), torch.cat(masks), num_tokens=tokens)
        scale = {
            "terms": len(torch.cat(masks)),
            "magnitude": float(torch.cat(per_token).detach().abs().max()),
        }
        assert_parity(loss, golden.tensor(part["loss"]), **scale, what="loss")
        gradients = torch.autograd.grad(loss, leaves)
        for gradient, sequence in zip(gradients, part["sequences"], strict=True):
            recorded = golden.tensor(sequence["grad_trainer_logprobs"])
            assert_parity(gradient, recorded, terms=1, what="gradient")
