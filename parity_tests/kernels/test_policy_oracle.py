"""Policy losses and their metrics against plain loops with hand-derived gradients."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
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

Batch = dict[str, Tensor]


class Token(NamedTuple):
    """An unmasked token: its log-probabilities, the advantage, the place in its row."""

    logprob: float
    old: float
    rollout: float
    region: float  # the centre of a trust region: the rollout policy unless it is given
    teacher: float
    uniform: float  # a random number in [0, 1)
    advantage: float  # 0 where the loss is given none
    place: int

    @property
    def log_ratio(self) -> float:
        """To the old policy."""
        return self.logprob - self.old

    @property
    def drift(self) -> float:
        """The log ratio to the rollout policy."""
        return self.logprob - self.rollout


class Piece(NamedTuple):
    """A token's loss, the slope of the loss of its row in its log-probability, and what is logged."""

    value: float
    slope: float
    metrics: dict[str, float] | None = None  # None is not compared


Row = Sequence[Token]
Rows = Sequence[Row]
Loop = Callable[..., Sequence[Sequence[Piece]]]  # of all rows, and the parameters by keyword


def with_other_policies(batch: Batch) -> Batch:
    """The batch with log-probabilities of other policies, and with a random number for each token."""
    logprobs, old = batch["logprobs"], batch["old_logprobs"]
    return batch | {
        "rollout_logprobs": (old + 0.3 * (5 * logprobs).sin()).clamp(max=0),
        "region_logprobs": (old - 0.1).roll(1, 0),
        "teacher_logprobs": (0.7 * logprobs + old.sin()).clamp(max=0),
        "uniform": (1e3 * logprobs).frac().abs(),
    }


def rows_of(batch: Batch) -> list[list[Token]]:
    """The unmasked tokens of each row."""
    names = [f"{name}logprobs" for name in ("", "old_", "rollout_", "region_", "teacher_")]
    columns = [batch[name].expand(batch["mask"].shape).tolist() for name in (*names, "uniform", "advantages")]
    found = []
    for masks, *values in zip(batch["mask"].tolist(), *columns, strict=True):
        tokens = zip(*values, range(len(masks)), strict=True)
        found.append([Token(*one) for one, kept in zip(tokens, masks, strict=True) if kept])
    return found


def by_token(piece: Callable[..., Piece]) -> Loop:
    """A loss of each token on its own."""
    return lambda rows, **params: [[piece(one, **params) for one in row] for row in rows]


def by_row(pieces: Callable[..., list[Piece]]) -> Loop:
    """A loss that needs the whole row."""
    return lambda rows, **params: [pieces(row, **params) if row else [] for row in rows]


def clipped(
    r: float, a: float, low: float, high: float, dual: float | None = None, cap: float | None = None
) -> Piece:
    """PPO's bound, piece by piece: the steeper of two, then the dual clip. The slope is in the log ratio.

    `low` and `high` are bounds of the ratio r, and the unclipped ratio is at most `cap`.
    """
    cap = math.inf if cap is None else cap
    free = Piece(-a * r, -a * r) if r < cap else Piece(-a * cap, 0.0)
    bounded = Piece(-a * r, -a * r) if low < r < high else Piece(-a * min(max(r, low), high), 0.0)
    worse = max(free, bounded, key=lambda piece: piece.value)
    return Piece(-a * dual, 0.0) if dual and a < 0 and -a * dual < worse.value else worse


def binary_kl(p: float, q: float) -> float:
    """KL(Bernoulli(p) || Bernoulli(q)); 1e-8 keeps upstream's logarithm finite at q = 1."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))


def fractions(ratio: float, low: bool, high: bool, what: str = "clip") -> dict[str, float]:
    """The metrics of a token, and whether it is beyond a bound."""
    return {"ratio": ratio, f"{what}_frac_low": float(low), f"{what}_frac_high": float(high)}


def clip_metrics(r: float, a: float, o: dict[str, Any]) -> dict[str, float]:
    return fractions(r, a < 0 and r < 1 - o["clip_low"], a > 0 and r > 1 + o["clip_high"])


def clipped_by(r: float, a: float, o: dict[str, Any]) -> Piece:
    """PPO's bound with the parameters of a row."""
    bounds = 1 - o["clip_low"], 1 + o["clip_high"]
    return clipped(r, a, *bounds, o.get("dual_clip"), o.get("ratio_cap"))


def limited(d: float, o: dict[str, Any]) -> tuple[float, bool]:
    """A log ratio within its clamp, and whether it was already."""
    clamp = o.get("log_ratio_clamp") or math.inf
    return min(max(d, -clamp), clamp), abs(d) < clamp


# One clip, a bound or a gate on the ratio of a token or of a sequence


def ppo(t: Token, **o: Any) -> Piece:
    d, free = limited(t.log_ratio, o)
    r = min(math.exp(d), o.get("weight_cap") or math.inf)
    value, slope, _ = clipped_by(r, t.advantage, o)
    return Piece(value, free * slope, clip_metrics(r, t.advantage, o))


def gspo(row: Row, **o: Any) -> list[Piece]:
    s = math.exp(math.fsum(t.log_ratio for t in row) / len(row))
    pieces = [clipped_by(s, t.advantage, o) for t in row]
    slope = math.fsum(piece.slope for piece in pieces) / len(row)  # d log s / d logp = 1 / |y|
    return [Piece(p.value, slope, clip_metrics(s, t.advantage, o)) for p, t in zip(pieces, row, strict=True)]


def gspo_token(row: Row, **o: Any) -> list[Piece]:
    log_s = math.fsum(t.log_ratio for t in row) / len(row)
    cap = o.get("log_ratio_cap") or math.inf
    s, free = math.exp(min(log_s, cap)), log_s < cap
    pieces = [clipped_by(s, t.advantage, o) for t in row]
    return [
        Piece(p.value, free * p.slope, clip_metrics(s, t.advantage, o))
        for p, t in zip(pieces, row, strict=True)
    ]


def sapo(t: Token, **o: Any) -> Piece:
    d, free = limited(t.log_ratio, o)
    r, a, tau = math.exp(d), t.advantage, o["tau_pos"] if t.advantage > 0 else o["tau_neg"]
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return Piece(-a * 4 / tau * gate, free * -a * 4 * gate * (1 - gate) * r, {"ratio": r})


def kimi(t: Token, **o: Any) -> Piece:
    low, high, tau, d = o["ratio_low"], o["ratio_high"], o["tau"], t.log_ratio
    r = math.exp(d)
    slope = (low < r < high) * -t.advantage * r + 2 * tau * d
    loss = -t.advantage * min(max(r, low), high) + tau * d * d
    return Piece(loss, slope, fractions(r, r < low, r > high))


def gmpo(row: Row, **o: Any) -> list[Piece]:
    low, high, ds = -o["clip_low"], o["clip_high"], [t.log_ratio for t in row]
    zs = [min(d, high) if t.advantage > 0 else max(d, low) for d, t in zip(ds, row, strict=True)]
    s = math.exp(math.fsum(zs) / len(row))
    pull = math.fsum(-t.advantage for t in row) * s / len(row)
    out = []
    for d, z, t in zip(ds, zs, row, strict=True):
        logged = fractions(s, t.advantage < 0 and d < low, t.advantage > 0 and d > high)
        out.append(Piece(-t.advantage * s, pull * (z == d), logged))
    return out


def ce_gppo(t: Token, **o: Any) -> Piece:
    r, a, w = math.exp(t.log_ratio), t.advantage, math.exp(t.log_ratio)
    if a < 0 and r < 0.8:
        w = o["beta_low"] * 0.8
    if a > 0 and r > 1.2:
        w = o["beta_high"] * 1.2
    dual = o["dual_clip"]
    return Piece(-a * dual, 0.0) if dual and a < 0 and -a * dual < -a * w else Piece(-a * w, -a * w)


def dcpo(t: Token, **o: Any) -> Piece:
    q = math.exp(t.old)
    low = (1 + math.sqrt(max(1 - 4 * o["epsilon_low"] / q, 0))) / 2
    high = min((1 + math.sqrt(1 + 4 * o["epsilon_high"] / q)) / 2, o["ratio_max"])
    return clipped(math.exp(t.log_ratio), t.advantage, low, high, o["dual_clip"])


def cpgd(t: Token, **o: Any) -> Piece:
    a, lp = t.advantage, t.logprob
    bound = t.old + (math.log(1 + o["clip_high"]) if a > 0 else math.log(1 - o["clip_low"]))
    inside = lp < bound if a > 0 else lp > bound
    return Piece(-a * (lp if inside else bound), -a * inside)


def up_grpo(t: Token, **o: Any) -> Piece:
    if t.advantage > 0:
        return Piece(-t.advantage, -t.advantage)
    return clipped(math.exp(t.log_ratio), t.advantage, 0.8, math.inf, o["dual_clip"])


def aspo(t: Token, **o: Any) -> Piece:
    r, a = math.exp(t.log_ratio), t.advantage
    bound = 1 + o["clip_high"] if a > 0 else 1 - o["clip_low"]
    bounded = min(r, bound) if a > 0 else max(r, bound)
    w = min(1 / bounded if a > 0 else bounded, o["dual_clip"])
    return Piece(-a * w, -a * w * (bounded == r))


def fipo(row: Row, **o: Any) -> list[Piece]:
    cap, pieces = o["ratio_cap"] or math.inf, []
    for t in row:
        r = math.exp(t.log_ratio)
        future = math.fsum(
            2 ** (-(u.place - t.place) / o["half_life"]) * u.log_ratio
            for u in row
            if u.place >= t.place and math.exp(u.log_ratio) <= cap
        )
        f = min(max(math.exp(future), o["weight_low"]), o["weight_high"])
        if t.advantage < 0 and r > o["safety"]:
            f = min(max(f, 0.8), 1.0)
        value, slope, _ = clipped(r, t.advantage, 0.8, 1.2, cap=cap)
        pieces.append(Piece(f * value, f * slope))
    return pieces


# Clip ranges that are found for each batch


def clipped_between(rows: Rows, low: float, high: float, dual: float | None = None) -> list[list[Piece]]:
    return [[clipped(math.exp(t.log_ratio), t.advantage, low, high, dual) for t in row] for row in rows]


def bapo(rows: Rows, **o: Any) -> list[list[Piece]]:
    """Walk through the ranges, the bound `first` before the other one."""
    tokens = [(math.exp(t.log_ratio), t.advantage) for t in chain.from_iterable(rows)]
    at = {"low": 0.6, "high": 1.2}
    end = {side: o[f"ratio_{side}_max"] for side in at}
    while True:
        good = math.fsum(a * min(r, at["high"]) for r, a in tokens if a > 0)
        bad = math.fsum(-a * max(r, at["low"]) for r, a in tokens if a < 0)
        movable = [side for side in sorted(at, key=lambda side: side != o["first"]) if at[side] < end[side]]
        if good >= o["share"] * (good + bad) or not movable:
            return clipped_between(rows, at["low"], at["high"], o["dual_clip"])
        at[movable[0]] = min(at[movable[0]] + o[f"step_{movable[0]}"], end[movable[0]])


def m2po(rows: Rows, **o: Any) -> list[list[Piece]]:
    """The largest cap among the log ratios that keeps the mean of the capped squares below the budget."""
    moved = [t.log_ratio for t in chain.from_iterable(rows) if t.log_ratio * t.advantage > 0]
    low, high = 0.0, math.inf

    def spent(cap: float) -> float:
        return math.fsum(min(d * d, cap * cap) for d in moved) / len(moved)

    if moved and spent(math.inf) > o["budget"]:
        largest = max([0.0, *(abs(cap) for cap in moved if spent(cap) < o["budget"])])
        low, high = math.exp(-largest), math.exp(largest)
    return clipped_between(rows, min(low, 1 - o["least_low"]), max(high, 1 + o["least_high"]))


# Tokens of the highest covariance in the batch


def with_covariance(rows: Rows) -> list[tuple[float, Token]]:
    """The tokens, each with (A - mean A) (log pi - mean log pi) before it."""
    tokens = list(chain.from_iterable(rows))
    n = max(len(tokens), 1)
    mean_a, mean_lp = math.fsum(t.advantage for t in tokens) / n, math.fsum(t.logprob for t in tokens) / n
    return [((t.advantage - mean_a) * (t.logprob - mean_lp), t) for t in tokens]


def clip_cov(rows: Rows, **o: Any) -> list[list[Piece]]:
    """Of the candidates, those with the smallest random numbers are drawn."""
    tokens = with_covariance(rows)
    pieces = {t: clipped_by(math.exp(t.log_ratio), t.advantage, o) for _, t in tokens}
    candidates = [
        t for cov, t in tokens if o["cov_low"] < cov < o["cov_high"] and (pieces[t].slope or not t.advantage)
    ]
    drawn = sorted(candidates, key=lambda t: t.uniform)[: max(int(o["cov_ratio"] * len(tokens)), 1)]
    return [[Piece(0.0, 0.0) if t in drawn else pieces[t] for t in row] for row in rows]


def kl_cov(rows: Rows, **o: Any) -> list[list[Piece]]:
    tokens = sorted(with_covariance(rows), key=lambda one: -one[0])
    held = [t for _, t in tokens[: max(int(o["cov_ratio"] * len(tokens)), 1)]]

    def piece(t: Token) -> Piece:
        value = -t.advantage * math.exp(t.log_ratio)
        weight = o["kl_coef"] * (t in held)
        sign = (t.log_ratio > 0) - (t.log_ratio < 0)
        return Piece(value + weight * abs(t.log_ratio), value + weight * sign)

    return [[piece(t) for t in row] for row in rows]


# A weight times log pi


def scored(weight: float, t: Token, metrics: dict[str, float] | None = None) -> Piece:
    return Piece(-weight * t.advantage * t.logprob, -weight * t.advantage, metrics)


def cispo(t: Token, **o: Any) -> Piece:
    r = math.exp(limited(t.log_ratio, o)[0])
    low = -math.inf if o.get("clip_low") is None else 1 - o["clip_low"]
    w = min(max(r, low), 1 + o["clip_high"])
    return scored(w, t, fractions(r, w > r, w < r))


def vespo(row: Row, **o: Any) -> list[Piece]:
    log_w = math.fsum(min(max(t.log_ratio, -20.0), 20.0) for t in row)
    log_w = min(max(log_w, -20.0), 20.0)
    out = []
    for t in row:
        sign = "pos" if t.advantage >= 0 else "neg"
        k, rate = o[f"k_{sign}"], o[f"lambda_{sign}"]
        phi = math.exp(k * max(log_w, math.log(1e-8)) + rate * (1 - math.exp(log_w)))
        out.append(scored(phi, t, {"ratio": math.exp(log_w), "weight": phi}))
    return out


def reinforce(t: Token) -> Piece:
    return scored(1.0, t, {})


def opmd(t: Token, tau: float) -> Piece:
    return scored(1 / (1 + tau), t)


def topr(row: Row, level: str) -> list[Piece]:
    product = math.exp(min(math.fsum(t.log_ratio for t in row), 0.0))
    tapers = [product if level == "sequence" else min(math.exp(t.log_ratio), 1.0) for t in row]
    return [scored(1.0 if t.advantage > 0 else w, t) for w, t in zip(tapers, row, strict=True)]


def rec(t: Token, clip: str, weight: str, **bounds: float) -> Piece:
    r, good = math.exp(t.log_ratio), t.advantage >= 0
    low, high = 1 - bounds["clip_low"] <= r, r <= 1 + bounds["clip_high"]
    kept = {"none": True, "one-side": high if good else low, "two-side": low and high}
    ring = r <= 1 - bounds["outer_low"] if good else r >= 1 + bounds["outer_high"]
    kept["ring"] = kept["two-side"] or ring
    return scored(kept[clip] * (r if weight == "ratio" else 1.0), t)


def luffy(t: Token, gamma: float) -> Piece:
    p = math.exp(t.logprob)
    return Piece(-t.advantage * p / (p + gamma), -t.advantage * gamma * p / (p + gamma) ** 2)


def minirl(t: Token, **o: Any) -> Piece:
    r = math.exp(t.log_ratio)
    inside = r <= 1 + o["clip_high"] if t.advantage > 0 else r >= 1 - o["clip_low"]
    return scored(inside * min(math.exp(t.drift), o["ratio_cap"]), t)


def iw_opd(row: Row, gamma: float, eps: float) -> list[Piece]:
    gaps = [t.teacher - t.rollout for t in row]
    total, seen, pieces = max(math.fsum(map(abs, gaps)), eps), 0.0, []
    for t, gap in zip(row, gaps, strict=True):
        pieces.append(scored(1 + gamma * (1 - seen / total), t._replace(advantage=gap)))
        seen += abs(gap)
    return pieces


# Penalties on the log ratio or on the ratio


def dro(t: Token, beta: float) -> Piece:
    d, a = t.log_ratio, t.advantage
    return Piece(-a * t.logprob + beta / 2 * d * d, -a + beta * d, {"log_ratio": d})


def spo(t: Token, epsilon: float) -> Piece:
    r, a = math.exp(t.log_ratio), t.advantage
    value = -a * r + abs(a) * (r - 1) ** 2 / (2 * epsilon)
    return Piece(value, (-a + abs(a) * (r - 1) / epsilon) * r)


def drpo(t: Token, **o: Any) -> Piece:
    """The slope is -A r (1 - sign(A) (p - q) / delta), table 1 of the paper."""
    (d, free), q, a, delta = limited(t.drift, o), math.exp(t.rollout), t.advantage, o["delta"]
    r = math.exp(d)
    value = -a * r + abs(a) * q * (r - 1) ** 2 / (2 * delta)
    return Piece(value, free * -a * r * (1 - math.copysign(1, a) * (r * q - q) / delta))


def sppo(t: Token, epsilon: float) -> Piece:
    limit, a = math.log(1 + epsilon), t.advantage
    inside = -limit < t.log_ratio < limit
    return Piece(-a * min(max(t.log_ratio, -limit), limit), -a * inside)


def kimi_k15(row: Row, tau: float) -> list[Piece]:
    total = math.fsum(t.log_ratio for t in row)
    return [
        Piece(-t.advantage * t.logprob + tau / 2 * t.log_ratio * total, -t.advantage + tau * total)
        for t in row
    ]


# Trust regions, masks and gates


def importance_sampling(t: Token) -> Piece:
    r = math.exp(t.drift)
    return Piece(-t.advantage * r, -t.advantage * r, {"ratio": r})


def in_region(t: Token, low: bool, high: bool, **o: Any) -> Piece:
    """A token and its drift term; `low` and `high` say whether it is beyond a bound of the region."""
    r = math.exp(limited(t.drift, o)[0])
    w = 0.0 if low or high else o.get("adv_tau", 1.0) * min(r, o.get("ratio_cap") or math.inf)
    value, kl_tau = t.logprob if o["form"] == "score" else 1.0, o.get("kl_tau", 0.0)
    loss = -w * t.advantage * value + kl_tau * t.drift**2
    return Piece(loss, -w * t.advantage + 2 * kl_tau * t.drift, fractions(r, low, high, "mask"))


def dppo(t: Token, **o: Any) -> Piece:
    p, q, a = math.exp(t.logprob), math.exp(t.region), t.advantage
    measure, moved = ("tv", abs(p - q)) if "tv_low" in o else ("kl", binary_kl(q, p))
    high = a > 0 and p > q and moved > o[f"{measure}_high"]
    low = a <= 0 and p < q and moved > o[f"{measure}_low"]
    return in_region(t, low, high, **o)


def ipo(t: Token, **o: Any) -> Piece:
    """It does not look at the sign of the advantage."""
    shift = math.exp(t.logprob) - math.exp(t.rollout)
    return in_region(t, shift < -o["tv_low"], shift > o["tv_high"], **o)


def kpop(t: Token, **o: Any) -> Piece:
    p, q = math.exp(t.logprob), math.exp(t.rollout)
    outside = max(binary_kl(p, q), binary_kl(q, p)) > o["kl_max"]
    return in_region(t, outside and p < q, outside and p >= q, **o)


def ref_kl(t: Token, **o: Any) -> Piece:
    """The task's advantage chooses the side of the region, and the gap to the teacher is the advantage."""
    shift = math.exp(t.logprob) - math.exp(t.rollout)
    high = t.advantage > 0 and shift > o["tv_high"]
    low = t.advantage <= 0 and shift < -o["tv_low"]
    return in_region(t._replace(advantage=t.teacher - t.logprob), low, high, **o)._replace(metrics=None)


def opd(t: Token, kl_coef: float) -> Piece:
    value = -math.exp(t.drift) * (t.advantage + kl_coef * (t.teacher - t.rollout))
    return Piece(value, value)


def masked_is(row: Row, **o: Any) -> list[Piece]:
    ratios = [math.exp(t.drift) for t in row]
    mean = math.exp(math.fsum(t.drift for t in row) / len(row))
    weight = math.exp(math.fsum(t.drift for t in row))
    pieces = []
    for t, r in zip(row, ratios, strict=True):
        measured = {"token": [r], "geo": [mean], "sequence": [min(ratios), max(ratios)]}
        kept = all(
            (o[f"{what}_low"] or 0.0) <= one <= (o[f"{what}_high"] or math.inf)
            for what, values in measured.items()
            for one in values
        )
        w = min(r if o["level"] == "token" else weight, o["ratio_cap"] or math.inf)
        gain = o["adv_tau"] * t.advantage - o["kl_tau"] * t.drift
        pieces.append(scored(kept * w, t._replace(advantage=gain)))
    return pieces


def opsm(row: Row, threshold: float, **o: Any) -> list[Piece]:
    drift = -math.fsum(t.drift for t in row) / len(row)
    pieces = [clipped_by(math.exp(t.log_ratio), t.advantage, o) for t in row]
    return [
        Piece(0.0, 0.0) if t.advantage < 0 and drift > threshold else piece
        for t, piece in zip(row, pieces, strict=True)
    ]


def flash_reinforce(row: Row, delta: float) -> list[Piece]:
    kls = [binary_kl(math.exp(t.rollout), math.exp(t.logprob)) for t in row]
    kept = math.fsum(kls) / len(row) <= delta
    losses = [-kept * t.advantage * math.exp(t.drift) for t in row]
    return [Piece(loss, loss) for loss in losses]


def tvpo(row: Row, threshold: float, weight_cap: float, **o: Any) -> list[Piece]:
    rhos = [math.exp(t.old - t.rollout) for t in row]
    far = math.fsum(abs(rho - 1) for rho in rhos) / len(row) > threshold
    pieces = []
    for t, rho in zip(row, rhos, strict=True):
        weight = min(rho, weight_cap) * (not (far and t.advantage * (t.old - t.rollout) > 0))
        piece = clipped_by(math.exp(t.log_ratio), t.advantage, o)
        pieces.append(Piece(weight * piece.value, weight * piece.slope))
    return pieces


def quantile(values: list[float], share: float) -> float:
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[math.ceil(place)] - ordered[low])


def cppo(row: Row, **o: Any) -> list[Piece]:
    """Algorithm 1 of the paper, token by token."""
    moves = [abs(math.exp(t.logprob) - math.exp(t.rollout)) for t in row]
    budget = min(max(quantile(moves, o["quantile"]), o["budget"]), o["budget_factor"] * o["budget"])
    spent, weights, pieces = 0.0, 0.0, []
    for i, (t, move) in enumerate(zip(row, moves, strict=True)):
        w = 1 - (1 - o["weight_min"]) * i / max(len(row) - 1, 1)
        room = min(o["tv_max"], o["tv_max"] + budget * weights - spent)
        r = math.exp(t.drift)
        kept = t.advantage * (r - 1) <= 0 or w * move <= room
        pieces.append(scored(kept * min(r, o["ratio_cap"] or math.inf), t))
        spent, weights = spent + w * move, weights + w
    return pieces


ROWS = of_kind(losses(), "policy")
BY_TOKEN: dict[str, Any] = {
    **dict.fromkeys(("ppo", "grpo", "dapo", "dr_grpo"), ppo),
    **dict.fromkeys(("reinforce", "rloo", "gpg"), reinforce),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), dppo),
    **{"sapo": sapo, "kimi": kimi, "cispo": cispo, "dro": dro, "ipo": ipo, "kpop": kpop, "spo": spo},
    **{"importance_sampling": importance_sampling, "minirl": minirl, "opd": opd, "ref_kl": ref_kl},
    **{"ce_gppo": ce_gppo, "dcpo": dcpo, "cpgd": cpgd, "aspo": aspo, "up_grpo": up_grpo, "drpo": drpo},
    **{"rec": rec, "opmd": opmd, "sppo": sppo, "luffy": luffy},
}
BY_ROW: dict[str, Any] = {
    **dict.fromkeys(("gspo", "luspo"), gspo),
    **{"gspo_token": gspo_token, "gmpo": gmpo, "vespo": vespo, "fipo": fipo, "topr": topr, "tvpo": tvpo},
    **{"kimi_k15": kimi_k15, "masked_is": masked_is, "opsm": opsm, "iw_opd": iw_opd, "cppo": cppo},
    **{"flash_reinforce": flash_reinforce},
}
ORACLES: dict[str, Loop] = {
    **{name: by_token(piece) for name, piece in BY_TOKEN.items()},
    **{name: by_row(pieces) for name, pieces in BY_ROW.items()},
    **{"bapo": bapo, "m2po": m2po, "clip_cov": clip_cov, "kl_cov": kl_cov},
}
CPPO = {"tv_max": 0.15, "weight_min": 0.8, "budget": 0.02, "budget_factor": 2.0, "quantile": 0.9}
REC = {"clip_low": 0.1, "clip_high": 0.3, "outer_low": 0.4, "outer_high": 0.5}
ALL_KEPT = {"token_low": 0.0, "token_high": 1e30}
CHOICES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ORACLES if REQUIRED not in ROWS[name].defaults.values()),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.3, "weight_cap": 1.5}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.5, "weight_cap": 1.1}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.1}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 1.5}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 1.1}),
    ("grpo", {"clip_low": 0.3, "clip_high": 0.1, "dual_clip": 3.0, "log_ratio_clamp": 1.0}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 1.2}),
    ("luspo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.3, "log_ratio_cap": 0.2}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.5, "log_ratio_clamp": 1.0}),
    ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5, "log_ratio_clamp": 1.0}),
    ("kimi", {"ratio_low": 0.8, "ratio_high": 1.5, "tau": 0.1}),
    ("gmpo", {"clip_low": 0.05, "clip_high": 0.3}),
    ("vespo", {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.2, "lambda_neg": 0.1}),
    ("dro", {"beta": 0.3}),
    ("dppo_tv", {"tv_low": 0.05, "tv_high": 0.1}),
    ("dppo_tv", {"tv_low": 0.1, "tv_high": 0.02, "ratio_cap": 1.1, "log_ratio_clamp": 1.0}),
    ("dppo_tv", {"form": "ratio", "ratio_cap": 1.1}),
    ("dppo_tv", {"tv_low": 0.01, "tv_high": 0.01, "adv_tau": 0.5, "kl_tau": 0.1, "log_ratio_clamp": 0.5}),
    ("dppo_kl", {"form": "ratio"}),
    ("dppo_kl", {"kl_low": 0.05, "kl_high": 0.01}),
    ("dppo_kl", {"kl_low": 0.001, "kl_high": 0.05, "ratio_cap": 1.1, "log_ratio_clamp": 1.0}),
    ("ipo", {"tv_low": 0.02, "tv_high": 0.05, "kl_tau": 0.1, "form": "score"}),
    ("kpop", {"kl_max": 0.05}),
    ("kpop", {"kl_max": 0.05, "kl_tau": 0.1}),
    ("minirl", {"clip_low": 0.2, "clip_high": 0.27, "ratio_cap": 2.0}),
    ("masked_is", ALL_KEPT | {"kl_tau": 0.2}),
    ("masked_is", ALL_KEPT | {"level": "sequence", "ratio_cap": 3.0, "adv_tau": 0.5}),
    *(("masked_is", ALL_KEPT | {f"{what}_low": 0.9, f"{what}_high": 1.2}) for what in ("token", "geo")),
    ("masked_is", ALL_KEPT | {"sequence_low": 0.9, "sequence_high": 1.2}),
    ("opsm", {"threshold": 0.1}),
    ("opd", {"kl_coef": 0.5}),
    ("ref_kl", {"tv_low": 0.05, "tv_high": 0.02, "kl_tau": 0.1}),
    ("iw_opd", {"gamma": 0.7}),
    ("ce_gppo", {"beta_low": 0.25, "beta_high": 0.5, "dual_clip": 1.5}),
    ("dcpo", {"epsilon_low": 0.02, "epsilon_high": 0.01, "ratio_max": 1.1, "dual_clip": 1.2}),
    ("cpgd", {"clip_low": 0.5, "clip_high": 0.05}),
    *(("flash_reinforce", {"delta": delta}) for delta in (1e-3, 0.03, 0.3)),
    ("cppo", CPPO | {"ratio_cap": 1.1, "quantile": 0.4, "budget_factor": 5.0}),
    ("cppo", CPPO | {"ratio_cap": 9.0, "weight_min": 0.3, "tv_max": 0.05, "budget": 0.01}),
    ("tvpo", {"threshold": 0.1}),
    ("tvpo", {"threshold": 0.2, "weight_cap": 1e9}),
    ("tvpo", {"threshold": 0.0, "weight_cap": 1.1}),
    ("fipo", {"half_life": 2.0, "weight_low": 0.8, "weight_high": 1.5, "ratio_cap": 2.0}),
    ("fipo", {"half_life": 0.5, "weight_low": 0.0, "weight_high": 1e9, "safety": 1e9}),
    ("fipo", {"half_life": 4.0, "safety": 1.5}),
    ("aspo", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.2}),
    ("up_grpo", {"dual_clip": 1e9}),
    ("spo", {"epsilon": 3.0}),
    ("drpo", {"delta": 0.1}),
    ("drpo", {"delta": 0.1, "log_ratio_clamp": 0.2}),
    ("kimi_k15", {"tau": 0.3}),
    ("topr", {"level": "token"}),
    *(
        ("rec", REC | {"clip": clip, "weight": weight})
        for clip in ("none", "one-side", "two-side", "ring")
        for weight in ("none", "ratio")
    ),
    ("opmd", {"tau": 0.5}),
    ("sppo", {"epsilon": 0.3}),
    ("luffy", {"gamma": 0.5}),
    *(
        ("bapo", {"share": share, "first": first, "step_low": 0.07, "step_high": 0.1, "dual_clip": 3.0})
        for share in (0.3, 0.5, 0.7)
        for first in ("high", "low")
    ),
    *(
        ("m2po", {"budget": budget, "least_low": least, "least_high": least})
        for budget in (0.04, 1e-3, 0.5)
        for least in (0.0, 0.1)
    ),
    *(("clip_cov", {"cov_ratio": share, "cov_low": 0.1, "cov_high": 2.0}) for share in (2e-4, 0.1, 0.5, 1.0)),
    *(("kl_cov", {"cov_ratio": share, "kl_coef": 0.1}) for share in (2e-4, 0.1, 0.5, 1.0)),
]
# The smallest magnitude of the terms of a loss, where terms cancel.
LEAST = {"ce_gppo": 1.0, "dcpo": 1.0, "cpgd": 1.0, "kimi_k15": 40.0}
PENALISED = (
    "dro",
    "drpo",
    "ipo",
    "kimi",
    "kl_cov",
    "spo",
)  # their penalty may cancel the term of the advantage


def lost(name: str, pieces: list[Piece], o: dict[str, Any]) -> float:
    """How much larger the relative error of a loss is than that of a log ratio."""
    if name != "vespo":
        return 1.0
    # d log phi / d log w = k - lambda w, where phi is not yet 0.
    logged = [piece.metrics for piece in pieces if piece.metrics and piece.metrics["weight"]]
    w = max((metrics["ratio"] for metrics in logged), default=0.0)
    return max(1.0, max(o["k_pos"], o["k_neg"]) + max(o["lambda_pos"], o["lambda_neg"]) * w)


@pytest.mark.parametrize("name, chosen", CHOICES)
@given(batch=token_batches(), advantage_by_token=st.booleans(), optional=st.booleans())
def test_loss_gradient_and_metrics_equal_loops(
    name: str, chosen: dict[str, Any], batch: Batch, advantage_by_token: bool, optional: bool
) -> None:
    """With junk at masked tokens, and with the optional inputs or without them."""
    row, batch, mask = ROWS[name], with_other_policies(batch), batch["mask"]
    if advantage_by_token or row.over_batch:  # a range of a batch needs advantages of both signs
        batch["advantages"] = batch["advantages"] + (5 * batch["logprobs"]).sin()
    taken = [name for name in row.optional if name in batch and (optional or name == "uniform")]
    if "region_logprobs" not in taken:
        batch["region_logprobs"] = batch["rollout_logprobs"]
    if "advantages" not in (*row.needs, *taken):
        batch["advantages"] = torch.zeros_like(batch["advantages"])

    dirty = {name: with_junk(x, mask) if x.shape == mask.shape else x for name, x in batch.items()}
    dirty |= {"mask": mask, "logprobs": dirty["logprobs"].requires_grad_()}
    options = {name: dirty[name] for name in taken} | chosen
    ours = row.kernel()(*(dirty[name] for name in row.needs), **options)
    (gradient,) = torch.autograd.grad(ours.loss.sum(), dirty["logprobs"])

    pieces = [[Piece(0.0, 0.0) for _ in masks] for masks in mask]
    tokens, o = rows_of(batch), row.defaults | chosen
    for i, found in enumerate(ORACLES[name](tokens, **o)):
        for token, piece in zip(tokens[i], found, strict=True):
            pieces[i][token.place] = piece
    flat = [piece for one in pieces for piece in one]
    others = {name for name in row.needs if name.endswith("_logprobs")}
    # exp() turns the absolute rounding of a log ratio into a relative one of the ratio.
    gaps = [float((batch["logprobs"] - batch[name]).abs().max()) for name in others]
    spread = 1 + max(gaps, default=0.0) * lost(name, flat, o)
    # The gradient of LUFFY's p / (p + gamma) is a difference of two terms, each as large as the loss or less.
    least = max(abs(piece.value) for piece in flat) if name == "luffy" else LEAST.get(name, 0.0)
    if name in PENALISED:
        ratio = (batch["logprobs"] - batch[row.needs[1]]).exp().clamp(min=1)
        least = float(torch.where(mask, (batch["advantages"] * ratio).abs(), 0.0).max())

    def compare(found: Tensor, wanted: list[float], what: str) -> None:
        theirs = found.new_tensor(wanted, dtype=torch.float64).view(mask.shape)
        largest = spread * max(least, float(theirs.abs().max()))
        assert_parity(found, theirs, terms=mask.shape[-1], magnitude=largest, what=what)

    compare(ours.loss, [piece.value for piece in flat], "value")
    compare(gradient, [piece.slope for piece in flat], "gradient")
    for metric, (value, where) in ours.metrics.items():
        assert torch.equal(where, mask) and value.shape == mask.shape and not value.requires_grad, metric
        assert value[mask].isfinite().all(), metric
        logged = [piece.metrics for piece, kept in zip(flat, mask.flatten(), strict=True) if kept]
        if None not in logged:
            kept = [(piece.metrics or {}).get(metric, 0.0) for piece in flat]
            compare(torch.where(mask, value, 0.0), kept, metric)
