"""Policy losses against OpenRLHF, slime, AReaL and NeMo-RL as recorded: value, gradient, and what they log.

Each is called through its catalogue row, and reduced by the mode of that row unless the case has another.
A case names the options that are not upstream's defaults: without any, the row alone reproduces it.
"""

import math

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim, is_nan, is_number
from parity_tests.rigs.recorded import assert_equals, batch

# What each upstream calls our parameters.
OPENRLHF = {"clip_eps_low": "clip_low", "clip_eps_high": "clip_high", "dual_clip": "dual_clip"}
SLIME = {"eps_clip": "clip_low", "eps_clip_high": "clip_high", "eps_clip_c": "dual_clip"}
AREAL = {"eps_clip": "clip_low", "eps_clip_higher": "clip_high", "c_clip": "dual_clip"}
SAPO = {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}
NEMO_RL = {"ratio_clip_min": "clip_low", "ratio_clip_max": "clip_high", "ratio_clip_c": "dual_clip"}


def token_loss(name: str, case: Case, names: dict[str, str]) -> tuple[TokenLoss, Tensor, Tensor]:
    """Our loss per token with the options of the case, what it is a function of, and the mask."""
    inputs = batch(case)
    return reductions.kernel("policy", name)(*inputs, **ours(case, names)), inputs[0], inputs[3]


def ours(case: Case, names: dict[str, str]) -> dict[str, float]:
    """The options of the case under our names, but for that of the reduction."""
    return {names[key]: value for key, value in case["kwargs"].items() if key != "token_level_loss"}


def reduced(name: str, token: TokenLoss, mask: Tensor, **counts: float) -> Tensor:
    """Reduce by the mode of the row."""
    return aggregate(token.loss, mask, choose("policy", name).mode, **counts)


def assert_logs(
    case: Case, mask: Tensor, *, dtype: torch.dtype = torch.float64, eps: float = 0.0, **logged: Tensor
) -> None:
    """Assert that means over the unmasked tokens are what upstream logs; `eps` is added to their number."""
    assert logged.keys() == case["metrics"].keys()
    n = float(mask.sum().clamp(min=1))
    for name, value in logged.items():
        mean = aggregate(value.double(), mask, "token-mean") * (n / (n + eps))
        largest = max(1.0, float(value.double().abs().max()))
        recorded = golden.tensor(case["metrics"][name])
        assert_parity(mean, recorded, terms=mask.numel(), dtype=dtype, magnitude=largest, what=name)


def clipped(token: TokenLoss) -> Tensor:
    """Where the clipped branch is the larger loss."""
    return token.metrics["clip_frac_low"].value | token.metrics["clip_frac_high"].value


def drift(case: Case) -> Tensor:
    """log old - log pi of the unmasked tokens."""
    logprobs, old, _, mask = batch(case)
    return torch.where(mask, old - logprobs.detach(), 0.0)


@claim("openrlhf_policy", where=is_number)
def test_ppo_equals_openrlhf(case: Case) -> None:
    name = "ppo@openrlhf"
    token, logprobs, mask = token_loss(name, case, OPENRLHF)
    if case["kwargs"].get("token_level_loss", True):
        loss = reduced(name, token, mask)
    else:
        loss = dialects.verl(token.loss, mask, "seq-mean-token-mean")  # n + 1e-8 here too
    assert_equals(case, loss, token.loss, logprobs)
    assert_logs(case, mask, clip_ratio=clipped(token), ppo_kl=drift(case))


@claim("openrlhf_policy", where=is_nan)
def test_a_batch_without_an_unmasked_token_is_nan_in_openrlhf_and_zero_here(case: Case) -> None:
    token, logprobs, mask = token_loss("ppo@openrlhf", case, OPENRLHF)
    loss = reduced("ppo@openrlhf", token, mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert not loss and not gradient.any() and not mask.any()
    assert math.isnan(float(case["loss"])) and golden.tensor(case["grad_log_prob"]).isnan().any()
    assert all(math.isnan(float(value)) for value in case["metrics"].values())


@claim("slime_policy")
def test_ppo_equals_slime(case: Case) -> None:
    """slime counts every row, and sums clip fractions and drifts as it sums the loss: in float32."""
    name = "ppo@slime"
    token, logprobs, mask = token_loss(name, case, SLIME)
    rows = mask.shape[0]
    if case["calculate_per_token_loss"]:
        # Megatron divides by `normalizer`, where a row is one token at least.
        assert case["normalizer"] == float(mask.sum(-1).clamp(min=1).sum())
        loss, by = aggregate(token.loss, mask, "token-sum"), "token-sum"
        values = [aggregate(x.double(), mask, by) for x in (clipped(token), drift(case))]
    else:
        assert case["normalizer"] == 1
        loss, by = reduced(name, token, mask, num_sequences=rows), choose("policy", name).mode
        values = [
            aggregate(x.double(), mask, by, num_sequences=1) for x in (clipped(token), drift(case))
        ]  # its caller divides these
    assert_equals(case, loss, token.loss, logprobs)
    for key, value in zip(("pg_clipfrac", "ppo_kl"), values, strict=True):
        recorded = golden.tensor(case["metrics"][key])
        assert_parity(value, recorded, terms=mask.numel(), dtype=torch.float32, magnitude=4.0, what=key)


@claim("areal_policy", where=lambda case: case["fn"] == "ppo_actor_loss_fn")
def test_grpo_equals_areal(case: Case) -> None:
    """A case whose tensors have one dimension is packed."""
    name, given = "grpo@areal", dict(case["kwargs"])
    if "eps_clip" in given:
        given.setdefault("eps_clip_higher", given["eps_clip"])
    token, logprobs, mask = token_loss(name, case | {"kwargs": given}, AREAL)
    assert_equals(case, reduced(name, token, mask), token.loss, logprobs)
    beyond = torch.zeros_like(mask)
    if "c_clip" in given:
        beyond = (token.metrics["ratio"].value > given["c_clip"]) & (golden.tensor(case["advantages"]) < 0)
    assert_logs(case, mask, dtype=torch.float32, clip_mask=clipped(token), dual_clip_mask=beyond)


@claim("areal_policy", where=lambda case: case["fn"] == "sapo_loss_fn")
def test_sapo_equals_areal(case: Case) -> None:
    name = "sapo@areal"
    token, logprobs, mask = token_loss(name, case, SAPO)
    assert_equals(case, reduced(name, token, mask), token.loss, logprobs)


def sampled(case: Case) -> Case:
    """The case with the rows that sample_mask leaves out masked."""
    rows = zip(case["response_mask"], case["sample_mask"], strict=True)
    return case | {"response_mask": [[token * sample for token in row] for row, sample in rows]}


@claim("nemo_rl_policy")
def test_grpo_equals_nemo_rl(case: Case) -> None:
    name = "grpo@nemo-rl"
    token, logprobs, mask = token_loss(name, sampled(case), NEMO_RL)
    if case["kwargs"].get("token_level_loss", True):
        assert choose("policy", name).mode == "token-mean"
        loss = dialects.nemo_rl(token.loss, mask)
    else:
        loss = dialects.nemo_rl(token.loss, mask, num_sequences=sum(case["sample_mask"]))
    assert_equals(case, loss, token.loss, logprobs)
    ratio, row = token.metrics["ratio"].value, choose("policy", name)
    bounds = {**row.params, **ours(case, NEMO_RL)}
    between = ratio.clamp(1 - bounds["clip_low"], 1 + bounds["clip_high"])
    assert_logs(case, mask, eps=dialects.NEMO_RL_EPS, probs_ratio=ratio, probs_ratio_clamped=between)
