"""Policy losses against the installed GRPO, GMPO, RLOO and IW-OPD trainers: value and gradient.

TRL's switches are compositions here: the kernel of a `loss_type`, through its catalogue row, then factors
and terms on its loss per token, then TRL's denominator.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer

from composer_plugins.kernels import kl
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.entropy import entropy_bonus, high_entropy_mask
from composer_plugins.kernels.policy.masked import off_policy_sequence_mask, sequence_drift
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import seeds, token_batches
from parity_tests.support import tiny, trl_live
from parity_tests.support.dialects import kernel, trl_gmpo

Batch = dict[str, Tensor]
LENGTH = 7  # max_completion_length
LOWEST = math.log(1e-8)  # to which TRL's VESPO clamps a sequence's log ratio, ours to -20

# TRL's loss_type and importance_sampling_level: the row, and what TRL calls its keywords.
CLIP = {"clip_low": "epsilon_low", "clip_high": "epsilon_high", "ratio_cap": "delta"}
TAU = {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"}
GAMMA = {name: f"vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
ROWS = {
    ("grpo", "token"): ("grpo@trl", CLIP),
    ("bnpo", "token"): ("grpo@trl", CLIP),
    ("dapo", "token"): ("dapo@trl", CLIP),
    ("dr_grpo", "token"): ("dr_grpo@trl", CLIP),
    ("luspo", "token"): ("grpo@trl", CLIP),
    ("cispo", "token"): ("cispo@trl", {"clip_high": "epsilon_high"}),
    ("sapo", "token"): ("sapo@trl", TAU),
    ("vespo", "token"): ("vespo@trl", GAMMA),
    ("grpo", "sequence"): ("gspo@trl", CLIP),
    ("bnpo", "sequence"): ("gspo@trl", CLIP),
    ("dapo", "sequence"): ("gspo@trl", CLIP),
    ("dr_grpo", "sequence"): ("gspo@trl", CLIP),
    ("luspo", "sequence"): ("luspo@trl", CLIP),
    ("vespo", "sequence"): ("vespo@trl", GAMMA),
}
REDUCED = {
    "grpo": ("seq-mean-token-mean@trl", {"sequences"}),
    "sapo": ("seq-mean-token-mean@trl", {"sequences"}),
    "luspo": ("seq-mean-token-sum@trl", {"sequences"}),
    "dr_grpo": ("seq-mean-token-sum-norm@trl", {"sequences", "length"}),
    "bnpo": ("token-mean@trl", set()),
    "dapo": ("token-mean@trl", {"tokens"}),
    "cispo": ("token-mean@trl", {"tokens"}),
    "vespo": ("token-mean@trl", {"tokens"}),
}
NO_ROW = {
    ("cispo", "sequence"): "not published; TRL warns of it",
    ("sapo", "sequence"): "not published",
}


@dataclass(frozen=True)
class Options:
    """What a GRPOConfig says of the loss, by its names, and how the batch is cut."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_vllm: bool = False
    training: bool = True
    processes: int = 1
    current_gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1

    @property
    def steps(self) -> float:
        """By how much TRL divides: in evaluation there is no accumulation."""
        return float(self.current_gradient_accumulation_steps) if self.training else 1.0


options = st.builds(
    Options,
    epsilon_low=st.sampled_from([0.1, 0.2]),
    epsilon_high=st.sampled_from([0.2, 1.3, 5.0]),
    delta=st.sampled_from([None, 1.5, 4.0]),
    sapo_temperature_pos=st.sampled_from([1.0, 0.7]),
    sapo_temperature_neg=st.sampled_from([1.05, 0.3]),
    vespo_k_pos=st.sampled_from([2.0, 0.7]),
    vespo_lambda_pos=st.sampled_from([3.0, 1.1]),
    vespo_k_neg=st.sampled_from([3.0, 1.5]),
    vespo_lambda_neg=st.sampled_from([2.0, 0.3]),
    beta=st.sampled_from([0.0, 0.1, 0.9]),
    use_bias_correction_kl=st.booleans(),
    off_policy_mask_threshold=st.sampled_from([None, 0.0, 0.3]),
    top_entropy_quantile=st.sampled_from([1.0, 0.75, 0.2]),
    entropy_coef=st.sampled_from([0.0, 0.3]),
    use_vllm=st.booleans(),
    training=st.booleans(),
    processes=st.sampled_from([1, 2]),
    current_gradient_accumulation_steps=st.sampled_from([1, 3]),
    steps_per_generation=st.sampled_from([1, 2]),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """What any policy loss of TRL reads; `old` may be missing (on-policy) or 40 nats away."""
    batch = draw(token_batches())
    g = torch.Generator().manual_seed(draw(seeds, label="the rest"))
    shape = batch["mask"].shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    stale = draw(st.sampled_from([0.0, 0.0, 40.0, None]), label="how stale")
    batch["logprobs"].requires_grad_()
    batch["old_logprobs"] = batch["logprobs"].detach() if stale is None else batch["old_logprobs"] - stale
    batch["on_policy"] = torch.tensor(stale is None)
    batch["ref_logprobs"] = batch["logprobs"].detach() + normal(*shape)
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.3 * normal(*shape)
    batch["entropies"] = 2 * torch.rand(shape, generator=g).double()  # TRL compares them as float32
    batch["advantages"] = draw(st.sampled_from([1.0, 1.0, 0.0]), label="signal") * batch["advantages"]
    width = draw(st.sampled_from([shape[1], 1]), label="weights per token or sequence")
    weights = (0.5 * normal(shape[0], width)).exp() * (normal(shape[0], width) > -1)
    batch["weights"] = torch.where(batch["mask"] | (width < shape[1]), weights, 1.0)
    return batch


def trl_loss(
    batch: Batch, o: Options, loss_type: str = "grpo", level: str = "token", cls: type = GRPOTrainer
) -> Tensor:
    """TRL's loss; a threshold reads the rollout's log-probabilities, and vLLM's weights are given."""
    named = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": LENGTH}
    inputs = trl_live.grpo_inputs(
        batch["mask"],
        batch["advantages"].squeeze(-1),
        old_per_token_logps=None if batch["on_policy"] else batch["old_logprobs"],
        ref_per_token_logps=batch["ref_logprobs"],
        sampling_per_token_logps=batch["rollout_logprobs"],
        importance_sampling_ratio=batch["weights"] if o.use_vllm else None,
    )
    trainer = trl_live.grpo_trainer(**asdict(o), **named)
    return trl_live.policy_loss(trainer, batch["logprobs"], batch["entropies"], inputs, cls)


def inputs(batch: Batch) -> tuple[Tensor, ...]:
    """In the order of a policy kernel."""
    return tuple(batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask"))


def acts_on(batch: Batch, o: Options) -> Tensor:
    """TRL's top_entropy_quantile."""
    if o.top_entropy_quantile == 1:
        return batch["mask"]
    return high_entropy_mask(batch["entropies"], batch["mask"], fraction=o.top_entropy_quantile)


def token_loss(loss_type: str, level: str, batch: Batch, o: Options) -> Tensor:
    """The kernel of a `loss_type`, then TRL's factors in its order, then the KL."""
    logprobs, old, advantages, mask = inputs(batch)
    name, names = ROWS[loss_type, level]
    keywords = {ours: getattr(o, theirs) for ours, theirs in names.items()}
    if loss_type == "cispo":
        keywords["clip_high"] -= 1  # TRL's is the cap itself
    if loss_type == "vespo" and o.use_vllm:
        keywords["log_weights"] = batch["weights"].log()
    token = kernel("policy", name)(logprobs, old, advantages, mask, **keywords)
    if o.off_policy_mask_threshold is not None:
        drift = sequence_drift(logprobs, batch["rollout_logprobs"], mask)
        kept = off_policy_sequence_mask(drift, advantages, threshold=o.off_policy_mask_threshold)
        token = TokenLoss(token.loss * kept, {})
    loss = token.loss * acts_on(batch, o)
    if o.use_vllm and loss_type != "vespo":
        loss = corrected(TokenLoss(loss, {}), batch["weights"], mask).loss
    if o.use_bias_correction_kl:
        return loss + o.beta * kl.k3_corrected(logprobs, old, batch["ref_logprobs"], mask, level=level)
    return loss + o.beta * kl.k3(logprobs, batch["ref_logprobs"], mask)


def reduced(loss_type: str, x: Tensor, mask: Tensor, o: Options) -> Tensor:
    """TRL's denominators: an empty row is a sequence, and the count of tokens spans the whole window."""
    row, counts = REDUCED[loss_type]
    keywords: dict[str, Any] = {}
    if "sequences" in counts:
        keywords["num_sequences"] = float(len(mask))
    if "length" in counts:
        keywords["max_length"] = float(LENGTH)
    if "tokens" in counts:  # of the generation batch: all ranks and all its steps
        keywords["num_tokens"] = mask.sum().clamp(min=1)
    loss = kernel("aggregation", row)(x, mask, **keywords)
    if "tokens" not in counts:
        return loss / o.steps
    return loss * o.processes * (o.steps_per_generation / o.steps if o.training else 1.0)


def penalty_terms(batch: Batch, o: Options) -> Tensor:
    """Bounds, per row, what cancels within a token's loss: exp(-d) + d - 1, times its ratio."""
    logprobs, old, _, mask = inputs(batch)
    d = torch.where(mask, (logprobs.detach() - batch["ref_logprobs"]).abs(), 0.0)
    ratio = torch.where(mask, logprobs.detach() - old, 0.0).clamp(min=0).exp()
    largest = (d.exp() + d + 1) * (ratio if o.use_bias_correction_kl else 1)
    return o.beta * largest.amax(-1, keepdim=True) + o.entropy_coef


def assert_same(ours: Tensor, theirs: Tensor, per_token: Tensor, batch: Batch, noise: Tensor) -> None:
    """Losses and gradients, to within rounding of the largest term that a token adds."""
    share = torch.autograd.grad(ours, per_token, retain_graph=True)[0].abs()
    largest = float((share * (per_token.detach().abs() + noise)).max())
    assert_parity(ours, theirs, terms=per_token.numel(), magnitude=largest, what="loss")
    (mine,), (want,) = (torch.autograd.grad(x, batch["logprobs"]) for x in (ours, theirs))
    magnitude = max(float(want.abs().max()), float((share * noise).max()))
    assert_parity(mine, want, terms=per_token.numel(), magnitude=magnitude, what="gradient")


@pytest.mark.parametrize(("loss_type", "level"), ROWS)
@settings(max_examples=40)
@given(batches(), options)
def test_policy_losses_equal_trl(loss_type: str, level: str, batch: Batch, o: Options) -> None:
    """Any mixture of its options: clips, KL, sequence mask, entropy mask and bonus, weights, accumulation."""
    if loss_type == "vespo":
        stays_inside_trls_clamps(batch)
    theirs = trl_loss(batch, o, loss_type, level)
    per_token = token_loss(loss_type, level, batch, o)
    ours = reduced(loss_type, per_token, batch["mask"], o)
    bonus = entropy_bonus(batch["entropies"], acts_on(batch, o), weight=o.entropy_coef).loss
    ours = ours + aggregate(bonus, acts_on(batch, o), "token-mean") / o.steps
    assert_same(ours, theirs, per_token, batch, penalty_terms(batch, o))


def stays_inside_trls_clamps(batch: Batch) -> None:
    """One weight per token, as TRL asks of VESPO, and no ratio below 1e-8."""
    logprobs, old, _, mask = inputs(batch)
    batch["weights"] = batch["weights"].expand(mask.shape).where(mask & (batch["weights"] > 0), 1.0)
    log_r = (logprobs.detach() - old).clamp(-20, 20)
    assume(float(torch.where(mask, log_r + batch["weights"].log(), 0.0).sum(-1).min()) > LOWEST)
    assume(float(torch.where(mask, log_r, 0.0).sum(-1).min()) > LOWEST)


def test_a_live_trainer_computes_what_its_unbound_method_does() -> None:
    """And our kernels with both: with every loss_type, on the log-probabilities of a real model."""
    made = tiny.trainer(GRPOTrainer, GRPOConfig, dtype=torch.float64, num_iterations=2)
    drawn = tiny.batch(made)
    model_logprobs = made._get_per_token_logps_and_entropies
    seen = {}

    def remember(*args: object, **keywords: object) -> object:
        seen["logprobs"], seen["entropies"] = (x.double() for x in model_logprobs(*args, **keywords)[:2])
        return seen["logprobs"], seen["entropies"], None

    made._get_per_token_logps_and_entropies = remember
    old = drawn["old_per_token_logps"].double() + torch.linspace(-0.5, 0.5, drawn["completion_ids"].shape[1])
    drawn["advantages"] = drawn["advantages"].double()
    drawn |= {"old_per_token_logps": old, "ref_per_token_logps": old - 0.3}
    made.beta = 0.1
    for loss_type, level in ROWS:
        made.loss_type, made.importance_sampling_level, made.max_completion_length = loss_type, level, LENGTH
        with trl_live.in_float64():
            real = made._compute_loss(made.model, drawn)
        batch = {
            **{name: x.detach() for name, x in seen.items()},
            "old_logprobs": old,
            "on_policy": torch.tensor(False),
            "ref_logprobs": drawn["ref_per_token_logps"],
            "advantages": drawn["advantages"].unsqueeze(-1),
            "mask": drawn["completion_mask"].bool(),
            "rollout_logprobs": old,
            "weights": torch.ones_like(old),
        }
        o = Options(beta=made.beta, use_bias_correction_kl=made.args.use_bias_correction_kl)
        unbound = trl_loss(batch, o, loss_type, level)
        assert_parity(unbound, real, terms=batch["mask"].numel())
        ours = reduced(loss_type, token_loss(loss_type, level, batch, o), batch["mask"], o)
        assert_parity(ours, real, terms=batch["mask"].numel(), magnitude=10.0)


@settings(max_examples=40)
@given(batches(), options)
def test_gmpo_equals_trl(batch: Batch, o: Options) -> None:
    """Its entropy mask takes tokens out of the geometric mean; its KL is not corrected."""
    o = replace(o, use_bias_correction_kl=False, use_vllm=False, entropy_coef=0.0, epsilon_high=0.4)
    o = replace(o, off_policy_mask_threshold=None)
    logprobs, old, advantages, mask = inputs(batch)
    theirs = trl_loss(batch, o, cls=GMPOTrainer)
    subset = acts_on(batch, o)
    token = kernel("policy", "gmpo@trl")(
        *(logprobs, old, advantages, subset), clip_low=o.epsilon_low, clip_high=o.epsilon_high
    )
    penalty = o.beta * kl.k3(logprobs, batch["ref_logprobs"], mask)
    ours = trl_gmpo(token.loss, subset, batch["advantages"])
    ours = (ours + aggregate(penalty, mask, "seq-mean-token-mean", num_sequences=len(mask))) / o.steps
    largest = float(token.loss.detach().abs().max()) + float(advantages.abs().max())
    largest += float(penalty_terms(batch, o).max())
    assert_parity(ours, theirs, terms=mask.numel(), magnitude=largest, what="loss")
    (mine,), (want,) = (torch.autograd.grad(x, logprobs) for x in (ours, theirs))
    assert_parity(mine, want, terms=mask.numel(), magnitude=largest, what="gradient")


@settings(max_examples=40)
@given(batches())
def test_rloo_has_the_gradient_of_trl_on_policy(batch: Batch) -> None:
    """TRL's RLOO clips the ratio of a whole completion, ours has none: at a ratio of 1 they agree."""
    logprobs, mask, advantages = batch["logprobs"], batch["mask"], batch["advantages"]
    trainer = trl_live.grpo_trainer()
    whole = torch.where(mask, logprobs.detach(), 0.0).sum(-1)
    drawn = trl_live.grpo_inputs(mask, advantages.squeeze(-1), old_logps=whole)
    theirs = trl_live.policy_loss(trainer, logprobs, batch["entropies"], drawn, RLOOTrainer)
    token = kernel("policy", "rloo")(logprobs, advantages, mask)
    ours = aggregate(token.loss, mask, "seq-mean-token-sum", num_sequences=float(len(mask)))
    (mine,), (want,) = (torch.autograd.grad(x, logprobs) for x in (ours, theirs))
    assert_parity(mine, want, terms=mask.shape[1], what="gradient")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@settings(max_examples=10)
@given(batches())
def test_the_policy_term_of_sdpo_equals_trls(loss_type: str, level: str, batch: Batch) -> None:
    """Its "dapo" is its "bnpo"; it reads log-probabilities out of logits: of two entries here, the first."""
    logprobs, old, advantages, mask = inputs(batch)
    logits = torch.stack([logprobs, torch.log(-torch.expm1(logprobs.clamp(max=-1e-3)))], -1)
    trainer = trl_live.grpo_trainer(
        loss_type=loss_type, importance_sampling_level=level, max_completion_length=LENGTH
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    drawn = {"completion_ids": ids, "completion_mask": mask.long(), "advantages": advantages}
    theirs = SDPOTrainer._compute_policy_loss(trainer, drawn | {"old_per_token_logps": old}, logits)
    read = torch.log_softmax(logits, -1)[..., 0]
    token = kernel("policy", ROWS[loss_type, level][0])(read, old, advantages, mask)
    ours = reduced("bnpo" if loss_type == "dapo" else loss_type, token.loss, mask, Options())
    largest = float(token.loss.detach().abs().max()) * 8  # logs of as much as 4
    assert_parity(ours, theirs, terms=mask.numel(), magnitude=largest)
    (mine,), (want,) = (torch.autograd.grad(x, logprobs, retain_graph=True) for x in (ours, theirs))
    assert_parity(mine, want, terms=mask.numel(), magnitude=largest, what="gradient")


def single(**changes: float) -> Batch:
    """Two tokens of one row; `changes` are the second one's."""
    ones = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    values = {name: ones.clone() for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    for name, value in changes.items():
        values[name][0, 1] = value
    values["logprobs"].requires_grad_()
    more = {"entropies": ones + 2, "weights": ones + 2, "advantages": -ones[:, :1], "mask": ones < 0}
    return {**values, **more, "on_policy": torch.tensor(False)}


def test_vespo_of_a_vanishing_ratio_differs_in_trl() -> None:
    """TRL holds w above 1e-8, ours w^k only: exp(-lambda w) is 2e-8 apart."""
    batch = single(old_logprobs=18.9)
    o = Options(vespo_k_pos=0.1)
    ours = reduced("vespo", token_loss("vespo", "token", batch, o), batch["mask"], o)
    theirs = trl_loss(batch, o, "vespo")
    ratio = float((ours / theirs).detach())
    assert ratio != pytest.approx(1.0, abs=1e-9)
    assert ratio == pytest.approx(1.0, abs=1e-7)


def test_a_rollouts_missing_log_probability_is_no_drift_in_trl_and_nan_here() -> None:
    batch = single(rollout_logprobs=math.nan)
    batch["advantages"] = -batch["advantages"]
    theirs = trl_loss(batch, Options(off_policy_mask_threshold=0.5))
    assert theirs.isfinite()
    ours = kernel("policy", "opsm@trl")(
        *(batch[n] for n in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"))
    )
    assert ours.loss.isnan().all()


def test_a_masked_nan_is_a_nan_loss_in_trl_and_nothing_here() -> None:
    batch = single(old_logprobs=math.nan)
    batch["mask"] = torch.tensor([[True, False]])
    for loss_type, level in ROWS:
        ours = token_loss(loss_type, level, batch, Options())
        assert bool(ours[0, 0].isfinite()) and bool(ours[0, 0] != 0)
        theirs = trl_loss(batch, Options(), loss_type, level)
        # VESPO's weight of the whole sequence is then 0.
        assert theirs == 0 if loss_type == "vespo" else theirs.isnan()


def test_an_overflowing_ratio_is_a_nan_gradient_in_trl_and_not_here() -> None:
    batch = single(old_logprobs=-1000.0)
    theirs, ours = trl_loss(batch, Options()), token_loss("grpo", "token", batch, Options()).sum()
    assert torch.autograd.grad(theirs, batch["logprobs"])[0].isnan().any()
    assert torch.autograd.grad(ours, batch["logprobs"])[0].isfinite().all()
