"""Policy losses against torchtitan, ROLL, ms-swift, OpenRLHF 0.11 and AReaL as recorded: value and gradient.

Each is called through its catalogue row. A case names the options that are not upstream's defaults: without
any, the row alone reproduces it.
"""

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_loss_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import assert_equals, batch


def called(name: str, case: Case, **params: object) -> tuple[TokenLoss, Tensor, Tensor]:
    """Our loss per token with these parameters, what it is a function of, and the mask."""
    inputs = batch(case)
    return reductions.kernel("policy", name)(*inputs, **params), inputs[0], inputs[3]


def mode(name: str) -> str:
    """The reduction of the row."""
    return choose("policy", name).mode


# torchtitan: what it calls our parameters.
TORCHTITAN = {
    "clip_eps": ("clip_low", "clip_high"),
    "ratio_clip_low": ("clip_low",),
    "ratio_clip_high": ("clip_high",),
}
CLASSES = {"GRPOLoss": "grpo@torchtitan", "DAPOLoss": "dapo@torchtitan"}


@claim("torchtitan_policy")
def test_grpo_and_dapo_equal_torchtitan(case: Case) -> None:
    """A token without a finite log-probability of the generator is masked out, as the adapter does."""
    name = CLASSES[case["fn"]]
    logprobs, old, advantages, mask = batch(case)
    mask = mask & old.isfinite()
    params = {ours: x for key, x in case["kwargs"].items() for ours in TORCHTITAN[key]}
    token = reductions.kernel("policy", name)(logprobs, old, advantages, mask, **params)
    assert mode(name) == "token-mean"
    loss = aggregate(token.loss, mask, "token-mean", num_tokens=case["global_valid_tokens"])
    assert_equals(case, loss, token.loss, logprobs)


# ROLL: a row by worker or pg_variant, and what ROLL calls our parameters.
ROLL = {
    "pg_clip": ("clip_low", "clip_high"),
    "pg_clip_low": ("clip_low",),
    "pg_clip_high": ("clip_high",),
    "tis_upper_bound": ("ratio_cap",),
    "cispo_epsilon_low": ("clip_low",),
    "cispo_epsilon_high": ("clip_high",),
}
VARIANTS = {
    "ActorWorker": "grpo@roll",
    "ppo": "grpo@roll",
    "vanilla": "reinforce@roll",
    "tis": "masked_is@roll",
    "cispo": "cispo@roll",
}
ROLL_EPS = 1e-8


def roll_loss(case: Case, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Our loss with ROLL's options, reduced as ROLL reduces, and the tensors of the comparison."""
    given, inputs = dict(case["kwargs"]), batch(case)
    params = {ours: x for key, x in given.items() for ours in ROLL.get(key, ())}
    if given.get("dual_clip_loss"):
        params["dual_clip"] = 1 + 2 * 0.2  # of pg_clip
    kernel = reductions.kernel("policy", name)
    logprobs, old, advantages, mask = inputs
    takes_old = {"old_logprobs", "rollout_logprobs"} & {*choose("policy", name).loss.needs}
    token = kernel(*(inputs if takes_old else (logprobs, advantages, mask)), **params)
    rows = int(mask.any(-1).sum())
    if case["loss_agg_mode"] == "token-mean":
        loss = aggregate(token.loss, mask, "token-mean")
    else:
        loss = aggregate(token.loss, mask, case["loss_agg_mode"], num_sequences=rows) * (
            rows / (rows + ROLL_EPS)
        )
    return loss, token.loss, logprobs


@claim(
    "roll_policy",
    where=lambda case: case["variant"] in VARIANTS and "importance_sampling" not in case["kwargs"],
)
def test_losses_equal_roll(case: Case) -> None:
    assert_equals(case, *roll_loss(case, VARIANTS[case["variant"]]))


@claim("roll_policy", where=lambda case: "importance_sampling" in case["kwargs"])
def test_gspo_equals_roll(case: Case) -> None:
    """`gspo@roll`: importance_sampling seq."""
    assert_equals(case, *roll_loss(case, "gspo@roll"))


@claim("roll_policy", where=lambda case: case["variant"] == "topr")
def test_topr_is_rolls_formula(case: Case) -> None:
    """TOPR has no row of ours here: REINFORCE where the score is above 0, and min(r, 1) elsewhere."""
    logprobs, old, advantages, mask = batch(case)
    weight = torch.where(advantages > 0, 1.0, (logprobs - old).exp().detach().clamp(max=1.0))
    token = torch.where(mask, -weight * advantages * logprobs, 0.0)
    assert_equals(case, *reduced_as_roll(case, token, mask), logprobs)


@claim("roll_policy", where=lambda case: case["variant"] == "kimi15")
def test_kimi15_is_rolls_formula(case: Case) -> None:
    """Kimi k1.5 has no row of ours here: REINFORCE and tau / 2 times the squared log ratio."""
    logprobs, old, advantages, mask = batch(case)
    square = case["kwargs"].get("kimi15_tau", 0.1) * 0.5 * (logprobs - old).square()
    token = torch.where(mask, -advantages * logprobs + square, 0.0)
    if case["loss_agg_mode"] == "token-mean" and not mask.all():
        # ROLL's token-mean sums over all tokens, and the square is not 0 at masked ones.
        every = (-advantages * mask * logprobs + square).sum() / mask.sum()
        assert_loss_parity(
            every,
            square,
            logprobs,
            theirs=golden.tensor(case["loss"]),
            their_gradient=golden.tensor(case["grad_log_prob"]),
        )
        return
    assert_equals(case, *reduced_as_roll(case, token, mask), logprobs)


def reduced_as_roll(case: Case, token: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A loss per token, reduced as ROLL reduces, and itself."""
    rows = int(mask.any(-1).sum())
    if case["loss_agg_mode"] == "token-mean":
        return aggregate(token, mask, "token-mean"), token
    mean = aggregate(token, mask, case["loss_agg_mode"], num_sequences=rows)
    return mean * (rows / (rows + ROLL_EPS)), token


# ms-swift: a row by loss_type and importance_sampling_level, and what it calls our parameters.
SWIFT = {"epsilon": "clip_low", "epsilon_high": "clip_high", "delta": "ratio_cap", "tau_pos": "tau_pos"}
SWIFT |= {"tau_neg": "tau_neg", "off_policy_sequence_mask_delta": "threshold"}
LEVELS = {"sequence": "gspo@ms-swift", "sequence_token": "gspo_token@ms-swift"}


@claim("ms_swift_policy")
def test_losses_equal_ms_swift(case: Case) -> None:
    """`grpo@ms-swift`, `dapo@ms-swift` and so on; bnpo is grpo's loss with the tokens of the micro-batch."""
    given, kind = dict(case["kwargs"]), case["loss_type"]
    name = f"{'grpo' if kind == 'bnpo' else kind}@ms-swift"
    name = LEVELS.get(given.pop("importance_sampling_level", "token"), name)
    name = "opsm@ms-swift" if "off_policy_sequence_mask_delta" in given else name
    params = {SWIFT[key]: x for key, x in given.items()}
    if "epsilon" in given and "epsilon_high" not in given:
        params["clip_high"] = given["epsilon"]
    if kind == "cispo":
        params = {"clip_high": given.get("epsilon_high", 0.2) - 1}
    logprobs, old, advantages, mask = batch(case)
    rollout = golden.tensor(case["rollout_log_prob"])
    inputs = (logprobs, old, rollout) if name.startswith("opsm") else (logprobs, old)
    token = reductions.kernel("policy", name)(*inputs, advantages, mask, **params)
    rows = mask.shape[0]
    if kind in ("grpo", "sapo"):
        loss = aggregate(token.loss, mask, "seq-mean-token-mean", num_sequences=rows)
    elif kind == "bnpo":
        loss = aggregate(token.loss, mask, "token-mean")
    elif kind == "dr_grpo":
        length = case["max_completion_length"]
        loss = aggregate(token.loss, mask, "seq-mean-token-sum-norm", num_sequences=rows, max_length=length)
    else:
        loss = aggregate(token.loss, mask, "token-mean", num_tokens=case["num_items_in_batch"])
    assert_equals(case, loss, token.loss, logprobs)


# OpenRLHF 0.11


def is_of(gating: str, level: str) -> object:
    """Whether a case is of this gate of the correction."""

    def fits(case: Case) -> bool:
        given = case["kwargs"]
        here = given.get("is_correction_level"), given.get("is_correction_gating", "ratio")
        return here == (level, gating)

    return fits


@claim("openrlhf_0_11_policy", where=lambda case: "policy_loss_type" in case["kwargs"])
def test_gspo_equals_openrlhf(case: Case) -> None:
    names = {"clip_eps_low": "clip_low", "clip_eps_high": "clip_high"}
    params = {names[key]: x for key, x in case["kwargs"].items() if key in names}
    token, logprobs, mask = called("gspo@openrlhf", case, **params)
    assert mode("gspo@openrlhf") == "seq-mean-token-mean"
    assert_equals(case, dialects.verl(token.loss, mask, "seq-mean-token-mean"), token.loss, logprobs)


@claim("openrlhf_0_11_policy", where=is_of("ratio", "token"))  # type: ignore[arg-type]
def test_corrections_equal_openrlhf(case: Case) -> None:
    """`icepop@openrlhf` is mode mask, `tis@openrlhf` is mode clip: weights old / rollout on PPO's loss."""
    given = case["kwargs"]
    clips = given.get("is_correction_mode") == "clip"
    name, names = ("tis@openrlhf", ("floor", "cap")) if clips else ("icepop@openrlhf", ("low", "high"))
    params = dict(zip(names, given.get("is_correction_threshold", ()), strict=False))
    token, logprobs, mask = called("ppo@openrlhf", case)
    old, rollout = golden.tensor(case["old_log_prob"]), golden.tensor(case["rollout_log_prob"])
    weights = reductions.kernel("correction", name)(old, rollout, mask, **params)
    token = corrected(token, weights, mask)
    assert_equals(case, aggregate(token.loss, mask, "token-mean"), token.loss, logprobs)


def statistic(case: Case, gating: str) -> Tensor:
    """What OpenRLHF's gate reads per token: a binary KL or a total variation of rollout and old policy."""
    p, q = (
        golden.tensor(case[name]).exp().clamp(1e-6, 1 - 1e-6) for name in ("rollout_log_prob", "old_log_prob")
    )
    return (p - q).abs() if gating == "tv" else p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


@claim(
    "openrlhf_0_11_policy",
    where=lambda case: (
        case["kwargs"].get("is_correction_gating") or case["kwargs"].get("is_correction_level") == "seq"
    ),
)
def test_the_other_gates_are_openrlhfs_formulas(case: Case) -> None:
    """They have no row: a token or sequence within the gate keeps its weight per token, others have none."""
    given = case["kwargs"]
    token, logprobs, mask = called("ppo@openrlhf", case)
    log_w = golden.tensor(case["old_log_prob"]) - golden.tensor(case["rollout_log_prob"])
    gating = given.get("is_correction_gating", "ratio")
    value = log_w if gating == "ratio" else statistic(case, gating)
    if given["is_correction_level"] == "seq":
        value = (value * mask).sum(-1, keepdim=True) / mask.sum(
            -1, keepdim=True
        )  # of no token: NaN, and masked
    value = value.exp() if gating == "ratio" else value
    low, high = given["is_correction_threshold"]
    weights = torch.where((value >= low) & (value <= high), log_w.exp(), 0.0)
    token = corrected(token, weights.expand(mask.shape), mask)
    assert_equals(case, aggregate(token.loss, mask, "token-mean"), token.loss, logprobs)


# AReaL


@claim("areal_decoupled", where=lambda case: "importance_sampling_level" in case["kwargs"])
def test_gspo_equals_areal(case: Case) -> None:
    given = case["kwargs"]
    params = {}
    if "eps_clip" in given:
        params = {"clip_low": given["eps_clip"], "clip_high": given["eps_clip_higher"]}
    token, logprobs, mask = called("gspo@areal", case, **params)
    assert mode("gspo@areal") == "token-mean"
    assert_equals(case, aggregate(token.loss, mask, "token-mean"), token.loss, logprobs)


AREAL_LEVELS = {"token": "token", "sequence": "geometric"}


@claim("areal_decoupled", where=lambda case: "rejection_sampling" in case["kwargs"])
def test_decoupled_ppo_equals_areal(case: Case) -> None:
    """`mis@areal` is action mask, `tis@areal` is action clamp, on grpo@areal; weights are in float32."""
    given = dict(case["kwargs"]["rejection_sampling"])
    clamps = given.pop("action", "mask") == "clamp"
    names = {"upper": "cap", "lower": "floor"} if clamps else {"upper": "high", "lower": "low"}
    level = {"level": AREAL_LEVELS[given.pop("level")]} if "level" in given else {}
    params = {names[key]: x for key, x in given.items()}
    token, logprobs, mask = called("grpo@areal", case)
    old, rollout = golden.tensor(case["old_log_prob"]), golden.tensor(case["rollout_log_prob"])
    name = "tis@areal" if clamps else "mis@areal"
    weights = reductions.kernel("correction", name)(old.float(), rollout.float(), mask, **params, **level)
    token = corrected(token, weights, mask)
    loss = aggregate(token.loss, mask, "token-mean")  # of all unmasked tokens, those that are rejected too
    (gradient,) = torch.autograd.grad(loss, logprobs)
    for ours, recorded in ((loss, case["loss"]), (gradient, case["grad_log_prob"])):
        wanted = golden.tensor(recorded)
        torch.testing.assert_close(
            ours.double(), wanted, rtol=0, atol=64 * 1.2e-7 * max(1.0, float(wanted.abs().max()))
        )


# Trinity-RFT and Fireworks' cookbook

TRINITY = {"ppo": "ppo@trinity-rft", "cispo": "cispo@trinity-rft", "gspo": "gspo_token@trinity-rft"}
RANGES = {"clip_range_low": "clip_low", "clip_range_high": "clip_high", "clip_ratio_c": "dual_clip"}


@claim("trinity_policy")
def test_losses_equal_trinity_rft(case: Case) -> None:
    """Its mask is of integers, so n + 1e-8 is n, in float32."""
    name = TRINITY[case["fn"]]
    params = {RANGES[key]: x for key, x in case["kwargs"].items()}
    token, logprobs, mask = called(name, case, **params)
    if mode(name) == "token-mean":
        loss = aggregate(token.loss, mask, "token-mean")
    else:
        loss = aggregate(token.loss, mask, mode(name), num_sequences=mask.shape[0])
    assert_equals(case, loss, token.loss, logprobs)


FIREWORKS = {"dapo": "dapo@fireworks", "cispo": "cispo@fireworks", "gspo": "gspo_token@fireworks"}
BOUNDS = {"eps_clip_c": "dual_clip", "eps_low": "clip_low", "eps_high": "clip_high"}
BOUNDS |= {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}


@claim("fireworks_policy")
def test_losses_equal_fireworks(case: Case) -> None:
    """The loss times `tis@fireworks`, or IcePop's weight; a sum."""
    name, given = FIREWORKS[case["fn"]], dict(case["tis"])
    token, logprobs, mask = called(name, case, **{BOUNDS[key]: x for key, x in case["kwargs"].items()})
    old, rollout = golden.tensor(case["old_log_prob"]), golden.tensor(case["rollout_log_prob"])
    correction, params = "tis@fireworks", {"cap": given["cap"]} if "cap" in given else {}
    if given.get("level") == "sequence":
        params["level"] = "geometric"
    if "icepop_threshold" in given:
        bound = given["icepop_threshold"]
        correction, params = "icepop", {"low": 1 / bound, "high": bound}
    weights = reductions.kernel("correction", correction)(old, rollout, mask, **params)
    token = corrected(token, weights, mask)
    assert mode(name) == "token-sum"
    assert_equals(case, aggregate(token.loss, mask, "token-sum"), token.loss, logprobs)
