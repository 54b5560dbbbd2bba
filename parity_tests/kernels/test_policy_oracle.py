"""Policy losses and their metrics against plain loops with hand-derived gradients."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import token_batches


class Token(NamedTuple):
    """A token's loss, the slope of the row's summed loss in its log-probability, what is logged."""

    loss: float = 0.0
    slope: float = 0.0
    metrics: dict[str, float] = {}


class Piece(NamedTuple):
    """A value and its slope in the ratio."""

    value: float
    slope: float


def clipped(r: float, a: float, **o: Any) -> Piece:
    """PPO's bound, piece by piece: the steeper of two, then the dual clip."""
    low, high, cap = 1 - o["clip_low"], 1 + o["clip_high"], o.get("ratio_cap") or math.inf
    free = Piece(-a * r, -a) if r < cap else Piece(-a * cap, 0.0)
    bounded = Piece(-a * r, -a) if low < r < high else Piece(-a * min(max(r, low), high), 0.0)
    worse = max(free, bounded, key=lambda piece: piece.value)
    dual = o.get("dual_clip")
    return Piece(-a * dual, 0.0) if dual and a < 0 and -a * dual < worse.value else worse


def fractions(ratio: float, low: bool, high: bool, what: str = "clip") -> dict[str, float]:
    """The metrics of a token, and whether it is beyond a bound."""
    return {"ratio": ratio, f"{what}_frac_low": float(low), f"{what}_frac_high": float(high)}


def clip_metrics(r: float, a: float, **o: Any) -> dict[str, float]:
    return fractions(r, a < 0 and r < 1 - o["clip_low"], a > 0 and r > 1 + o["clip_high"])


def limited(d: float, o: dict[str, Any]) -> tuple[float, bool]:
    """A log ratio within its clamp, and whether it was already."""
    clamp = o.get("log_ratio_clamp") or math.inf
    return min(max(d, -clamp), clamp), abs(d) < clamp


Row = list[tuple[float, float, float, float]]  # logprob, old logprob, advantage, centre of the region


def ppo(row: Row, **o: Any) -> list[Token]:
    out = []
    for logp, old, a, _ in row:
        d, free = limited(logp - old, o)
        r = min(math.exp(d), o.get("weight_cap") or math.inf)
        piece = clipped(r, a, **o)
        out.append(Token(piece.value, free * piece.slope * r, clip_metrics(r, a, **o)))
    return out


def gspo(row: Row, **o: Any) -> list[Token]:
    s = math.exp(math.fsum(logp - old for logp, old, _, _ in row) / len(row))
    pieces = [clipped(s, a, **o) for _, _, a, _ in row]
    slope = math.fsum(piece.slope for piece in pieces) * s / len(row)  # d s / d logp = s / |y|
    metrics = [clip_metrics(s, a, **o) for _, _, a, _ in row]
    return [Token(p.value, slope, m) for p, m in zip(pieces, metrics, strict=True)]


def gspo_token(row: Row, **o: Any) -> list[Token]:
    log_s = math.fsum(logp - old for logp, old, _, _ in row) / len(row)
    cap = o.get("log_ratio_cap") or math.inf
    s, free = math.exp(min(log_s, cap)), log_s < cap
    pieces = [clipped(s, a, **o) for _, _, a, _ in row]
    metrics = [clip_metrics(s, a, **o) for _, _, a, _ in row]
    return [Token(p.value, free * p.slope * s, m) for p, m in zip(pieces, metrics, strict=True)]


def cispo(row: Row, **o: Any) -> list[Token]:
    out = []
    for logp, old, a, _ in row:
        r = math.exp(limited(logp - old, o)[0])
        low = -math.inf if o.get("clip_low") is None else 1 - o["clip_low"]
        w = min(max(r, low), 1 + o["clip_high"])
        out.append(Token(-w * a * logp, -w * a, fractions(r, w > r, w < r)))
    return out


def sapo(row: Row, **o: Any) -> list[Token]:
    out = []
    for logp, old, a, _ in row:
        d, free = limited(logp - old, o)
        r, tau = math.exp(d), o["tau_pos"] if a > 0 else o["tau_neg"]
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        out.append(Token(-a * 4 / tau * gate, free * -a * 4 * gate * (1 - gate) * r, {"ratio": r}))
    return out


def kimi(row: Row, **o: Any) -> list[Token]:
    low, high, tau = o["ratio_low"], o["ratio_high"], o["tau"]
    out = []
    for logp, old, a, _ in row:
        d = logp - old
        r = math.exp(d)
        slope = (low < r < high) * -a * r + 2 * tau * d
        loss = -a * min(max(r, low), high) + tau * d * d
        out.append(Token(loss, slope, fractions(r, r < low, r > high)))
    return out


def gmpo(row: Row, **o: Any) -> list[Token]:
    low, high = -o["clip_low"], o["clip_high"]
    ds = [logp - old for logp, old, _, _ in row]
    zs = [min(d, high) if a > 0 else max(d, low) for d, (_, _, a, _) in zip(ds, row, strict=True)]
    s = math.exp(math.fsum(zs) / len(row))
    pull = math.fsum(-a for _, _, a, _ in row) * s / len(row)
    out = []
    for d, z, (_, _, a, _) in zip(ds, zs, row, strict=True):
        logged = fractions(s, a < 0 and d < low, a > 0 and d > high)
        out.append(Token(-a * s, pull * (z == d), logged))
    return out


def vespo(row: Row, **o: Any) -> list[Token]:
    log_w = math.fsum(min(max(logp - old, -20.0), 20.0) for logp, old, _, _ in row)
    log_w = min(max(log_w, -20.0), 20.0)
    out = []
    for logp, _, a, _ in row:
        sign = "pos" if a >= 0 else "neg"
        k, rate = o[f"k_{sign}"], o[f"lambda_{sign}"]
        phi = math.exp(k * max(log_w, math.log(1e-8)) + rate * (1 - math.exp(log_w)))
        out.append(Token(-phi * a * logp, -phi * a, {"ratio": math.exp(log_w), "weight": phi}))
    return out


def reinforce(row: Row, **o: Any) -> list[Token]:
    return [Token(-a * logp, -a) for logp, _, a, _ in row]


def importance_sampling(row: Row, **o: Any) -> list[Token]:
    ratios = [math.exp(logp - rollout) for logp, rollout, _, _ in row]
    return [Token(-a * r, -a * r, {"ratio": r}) for r, (_, _, a, _) in zip(ratios, row, strict=True)]


def dro(row: Row, beta: float) -> list[Token]:
    out = []
    for logp, old, a, _ in row:
        d = logp - old
        out.append(Token(-a * logp + beta / 2 * d * d, -a + beta * d, {"log_ratio": d}))
    return out


def in_region(logp: float, d: float, a: float, low: bool, high: bool, **o: Any) -> Token:
    """A token and its drift term; `low` and `high` say whether it is beyond a bound of the region."""
    r = math.exp(limited(d, o)[0])
    w = 0.0 if low or high else o.get("adv_tau", 1.0) * min(r, o["ratio_cap"] or math.inf)
    value, kl_tau = logp if o["form"] == "score" else 1.0, o.get("kl_tau", 0.0)
    loss, slope = -w * a * value + kl_tau * d * d, -w * a + 2 * kl_tau * d
    return Token(loss, slope, fractions(r, low, high, "mask"))


def dppo(row: Row, **o: Any) -> list[Token]:
    out, divergence = [], "tv" if "tv_low" in o else "kl"
    for logp, rollout, a, centre in row:
        p, q = math.exp(logp), math.exp(centre)
        moved = abs(p - q)
        if divergence == "kl":  # 1e-8 keeps upstream's logarithm finite at p = 1
            moved = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        high = a > 0 and p > q and moved > o[f"{divergence}_high"]
        low = a <= 0 and p < q and moved > o[f"{divergence}_low"]
        out.append(in_region(logp, logp - rollout, a, low, high, **o))
    return out


def ipo(row: Row, **o: Any) -> list[Token]:
    """It does not look at the sign of the advantage."""
    shifts = [math.exp(logp) - math.exp(rollout) for logp, rollout, _, _ in row]
    return [
        in_region(logp, logp - rollout, a, shift < -o["tv_low"], shift > o["tv_high"], **o)
        for shift, (logp, rollout, a, _) in zip(shifts, row, strict=True)
    ]


ROWS = of_kind(losses(), "policy")
ORACLES: dict[str, Any] = {
    **dict.fromkeys(("ppo", "grpo", "dapo", "dr_grpo"), ppo),
    **dict.fromkeys(("gspo", "luspo"), gspo),
    **dict.fromkeys(("reinforce", "rloo", "gpg"), reinforce),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), dppo),
    **{"gspo_token": gspo_token, "cispo": cispo, "sapo": sapo, "kimi": kimi, "gmpo": gmpo, "vespo": vespo},
    **{"importance_sampling": importance_sampling, "dro": dro, "ipo": ipo},
}
CHOICES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ORACLES if REQUIRED not in ROWS[name].defaults.values()),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.1}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 1.5}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 1.1}),
    ("grpo", {"clip_low": 0.3, "clip_high": 0.1, "dual_clip": 3.0, "log_ratio_clamp": 1.0}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.3, "log_ratio_cap": 0.2}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.5, "log_ratio_clamp": 1.0}),
    ("dppo_tv", {"tv_low": 0.05, "tv_high": 0.1}),
    ("dppo_tv", {"tv_low": 0.1, "tv_high": 0.02, "ratio_cap": 1.1, "log_ratio_clamp": 1.0}),
    ("dppo_tv", {"form": "ratio", "ratio_cap": 1.1}),
    ("dppo_tv", {"tv_low": 0.01, "tv_high": 0.01, "adv_tau": 0.5, "kl_tau": 0.1, "log_ratio_clamp": 0.5}),
    ("dppo_kl", {"form": "ratio"}),
    ("ipo", {"tv_low": 0.02, "tv_high": 0.05, "kl_tau": 0.1, "form": "score"}),
    ("dppo_kl", {"kl_low": 0.05, "kl_high": 0.01}),
    ("dppo_kl", {"kl_low": 0.001, "kl_high": 0.05, "ratio_cap": 1.1, "log_ratio_clamp": 1.0}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.3, "weight_cap": 1.5}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.5, "weight_cap": 1.1}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 1.2}),
    ("luspo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5, "log_ratio_clamp": 1.0}),
    ("kimi", {"ratio_low": 0.8, "ratio_high": 1.5, "tau": 0.1}),
    ("gmpo", {"clip_low": 0.05, "clip_high": 0.3}),
    ("vespo", {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.2, "lambda_neg": 0.1}),
    ("dro", {"beta": 0.3}),
]


def conditioning(name: str, params: dict[str, Any], tokens: list[Token]) -> float:
    """How much larger the relative error of a loss is than that of a log ratio."""
    if name != "vespo":
        return 1.0
    # d log phi / d log w = k - lambda w, where phi is not yet 0.
    w = max((t.metrics["ratio"] for t in tokens if t.metrics.get("weight")), default=0.0)
    return max(params["k_pos"], params["k_neg"]) + max(params["lambda_pos"], params["lambda_neg"]) * w


@pytest.mark.parametrize("name, chosen", CHOICES)
@given(batch=token_batches(), by_token=st.booleans(), moved_region=st.booleans())
def test_loss_gradient_and_metrics_equal_loops(
    name: str,
    chosen: dict[str, Any],
    batch: dict[str, Tensor],
    by_token: bool,
    moved_region: bool,
) -> None:
    params = ROWS[name].defaults | chosen
    logprobs, old, mask = batch["logprobs"], batch["old_logprobs"], batch["mask"]
    advantages = batch["advantages"].expand(mask.shape)
    if by_token:
        advantages = advantages + (5 * logprobs).sin()
    moved_region = moved_region and "region_logprobs" in ROWS[name].optional
    centre = (old - 0.1).roll(1, 0) if moved_region else old

    x = with_junk(logprobs, mask).requires_grad_()
    extra = {"region_logprobs": with_junk(centre, mask)} if moved_region else {}
    given_advantages = with_junk(advantages, mask) if by_token else batch["advantages"]
    dirty_old = with_junk(old, mask)
    inputs = {"logprobs": x, "old_logprobs": dirty_old, "rollout_logprobs": dirty_old, "mask": mask}
    inputs["advantages"] = given_advantages
    needs = [inputs[need] for need in ROWS[name].needs]
    ours = ROWS[name].kernel()(*needs, **chosen, **extra)
    (gradient,) = torch.autograd.grad(ours.loss.sum(), x)

    columns = zip(*(t.tolist() for t in (logprobs, old, advantages, centre)), strict=True)
    tokens: list[Token] = []
    for masks, row in zip(mask.tolist(), columns, strict=True):
        unmasked = [entry for entry, kept in zip(zip(*row, strict=True), masks, strict=True) if kept]
        results = iter(ORACLES[name](unmasked, **params) if unmasked else [])
        tokens += [next(results) if kept else Token() for kept in masks]

    def wanted(values: list[float]) -> Tensor:
        return logprobs.new_tensor(values).view(mask.shape)

    # exp() turns the absolute rounding of a log ratio into a relative one of the ratio.
    spread = 1 + float((logprobs - old).abs().max()) * max(1.0, conditioning(name, params, tokens))
    for got, theirs in (
        (ours.loss, wanted([token.loss for token in tokens])),
        (gradient, wanted([token.slope for token in tokens])),
    ):
        largest = spread * float(theirs.abs().max())
        assert_parity(got, theirs, terms=mask.shape[-1], magnitude=largest)
    for logged, (value, where) in ours.metrics.items():
        assert torch.equal(where, mask) and not value.requires_grad
        theirs = wanted([token.metrics.get(logged, 0.0) for token in tokens])
        scale = {"terms": mask.shape[-1], "magnitude": spread * float(theirs.abs().max())}
        assert_parity(torch.where(mask, value, 0.0), theirs, **scale, what=logged)
