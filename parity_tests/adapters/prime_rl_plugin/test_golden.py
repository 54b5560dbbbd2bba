"""PRIME-RL's recorded losses through our `loss_fn`, as it calls it: value, gradient, metrics.

The kernels are held to the same records in `golden/test_prime_rl.py`; here the adapter is, from the
TOML table to the sum that comes back.
"""

from functools import partial
from typing import Any

import torch

from composer_plugins.adapters.prime_rl_plugin import LossOutputs, loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.prime_rl_doubles import compute_loss
from parity_tests.rigs.prime_rl_words import INPUTS, SCORED, kwargs_of, loss_inputs

PACKS = {pack["id"]: pack for pack in golden.beside("prime_rl/inputs", "packs")}

METRICS = ("is_masked", "is_masked_low", "is_masked_high", "masked_mismatch_kl", "unmasked_mismatch_kl")


def check(case: Case) -> None:
    if "pack" in case:
        check_pack(case)
        return
    inputs, function = INPUTS[case["case"]], case["fn"].removesuffix("_loss_fn")
    if "raises" in case:  # a distillation without a teacher; ours counts the tokens that have one
        ours = loss_fn(loss_inputs(function, inputs), **kwargs_of(function, {}))
        assert inputs["ref_logprobs"] is None and float(ours.loss.detach()) == 0
        assert float(ours.metrics["composer/hint/token_frac"]) == 0
        return
    run(function, case["hp"], inputs, case)


def run(function: str, hp: dict[str, Any], case: Case, recorded: Case) -> None:
    inputs = loss_inputs(function, case)
    ours = loss_fn(inputs, **kwargs_of(function, hp))
    theirs, gradient = golden.tensor(recorded["loss"]), golden.tensor(recorded["grad"])
    own = torch.autograd.grad(ours.loss, inputs.trainer_logprobs)[0]
    assert not own[~inputs.loss_mask].any()
    if not (theirs.isfinite() and gradient.isfinite().all()):
        assert case["noise_kind"] == "overflow"
        assert ours.loss.isfinite() and own.isfinite().all()
        return
    n, dtype = own.numel(), own.dtype
    magnitude = n * float(ours.metrics["composer/policy/loss"].abs()) + float(own.abs().max())
    assert_parity(ours.loss, theirs, terms=n, dtype=dtype, magnitude=magnitude, what="loss")
    assert_parity(own, gradient, terms=n, dtype=dtype, what="gradient")
    if function not in SCORED:
        assert_logs(ours, case, recorded["metrics"])


def assert_logs(ours: LossOutputs, case: Case, metrics: dict[str, Any]) -> None:
    """What upstream logs of a region; a token of no advantage is on neither side there, on one here."""
    logged = {name.removeprefix("ref_kl/"): value for name, value in metrics.items()}
    neutral = any(m and a == 0 for m, a in zip(case["loss_mask"], case["advantages"], strict=True))
    scale = {"terms": len(case["loss_mask"]), "dtype": torch.float32}
    for name in METRICS:
        if isinstance(logged.get(name, []), list) or (neutral and name == "is_masked_low"):
            continue
        recorded = golden.tensor(logged[name])
        if recorded.isfinite():
            magnitude = max(1.0, float(recorded.abs()))
            assert_parity(ours.metrics[name], recorded, **scale, magnitude=magnitude, what=name)


def check_pack(case: Case) -> None:
    """Several sequences: a sum of three losses, each over a stream of its own."""
    pack = PACKS[case["pack"]]
    sequences = [INPUTS[i] for i in pack["cases"]]
    streams = (("default", "rl"), ("ce", "ce"), ("ref_kl", "ref_kl"))
    parts = [(f, f"{s}_scale", pack[f"{s}_weights"]) for f, s in streams]
    parts = [part for part in parts if part[0] == "default" or part[2] is not None]
    total = torch.zeros((), dtype=torch.float64)
    gradients = [torch.zeros(len(s["loss_mask"]), dtype=torch.float64) for s in sequences]
    largest, dtype = 0.0, torch.float64
    for function, scale, weights in parts:
        inputs = [loss_inputs(function, s) for s in sequences]
        leaves, dtype = [x.trainer_logprobs for x in inputs], inputs[0].trainer_logprobs.dtype
        of_rl = function == "default"  # the others have no mask but their weights
        references = [x.ref_logprobs for x in inputs]
        cut = Pack(
            leaves,
            [x.inference_logprobs for x in inputs],
            None if references[0] is None else references,
            [x.advantages for x in inputs],
            [x.loss_mask if of_rl else torch.ones_like(x.loss_mask) for x in inputs],
            None if weights is None else [golden.tensor(w, dtype) for w in weights],
        )
        kwargs = kwargs_of(function, {})
        loss, metrics = compute_loss(cut, partial(loss_fn, **kwargs), case["scales"][scale])
        total = total + loss.detach().double()
        for gradient, own in zip(
            gradients, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True
        ):
            gradient += 0 if own is None else own.double()
        largest = max(largest, float(metrics.get("composer/policy/loss", torch.zeros(1)).abs().max()))
    n, recorded = sum(map(len, gradients)), golden.tensor(case["loss"])
    assert_parity(total, recorded, terms=n, dtype=dtype, magnitude=largest, what="loss")
    for i, gradient in enumerate(case["grad"]):
        assert_parity(gradients[i], golden.tensor(gradient), terms=n, dtype=dtype, what=f"gradient {i}")


@claim("prime_rl/v0.8.0")
def test_loss_fn_equals_prime_rl_v0_8(case: Case) -> None:
    check(case)


@claim("prime_rl_losses")
def test_loss_fn_equals_prime_rl(case: Case) -> None:
    recorded = case | {"grad": case["grad_trainer_logprobs"]}
    run(case["loss_fn"], case["kwargs"], case, recorded)
