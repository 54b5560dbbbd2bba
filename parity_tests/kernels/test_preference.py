"""Every preference loss against its formula as a paper prints it, on Python floats; hazards; scores.

The formulas here know no tensor, no stable branch and no shared link: only log, exp and a sorted list.
"""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels import preference
from composer_plugins.kernels.preference import links
from composer_plugins.kernels.types import PairLoss
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss, of_kind
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.settings import settings as settings_of
from composer_plugins.testing.strategies import seeds, token_batches

ROWS = of_kind(losses(), "preference")
# Of each parameter a value that is no default and has an effect.
B, E, G, W, C, TAU, ALPHA = 0.7, 0.2, 0.3, 0.6, 0.8, 0.25, 0.1
SETTINGS: dict[str, float] = {
    "beta": B,
    "label_smoothing": E,
    "gamma_beta_ratio": G,
    "nll_weight": W,
    "desirable_weight": 1.3,
    "undesirable_weight": 0.4,
    "tau": TAU,
    "calibration_weight": C,
}


def sigmoid(x: float) -> float:
    return math.exp(min(x, 0.0)) / (1 + math.exp(-abs(x)))


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_loss(h: float, eps: float = 0.0) -> float:
    return (1 - eps) * softplus(-h) + eps * softplus(h)


def odds(s: float) -> float:
    return math.exp(s) / (1 - math.exp(s))


def mean_reward(s: float) -> float:
    return (1 - math.exp(s) ** -ALPHA) / ALPHA


# Each takes the log-ratios of a pair, or its scores where there is no reference, and the pair by names.
PAIRWISE: dict[str, Callable[[float, float, dict[str, float]], float]] = {
    "dpo": lambda u, v, p: log_loss(B * (u - v), E),
    "cdpo": lambda u, v, p: log_loss(B * (u - v), E),
    "rpo": lambda u, v, p: log_loss(B * (u - v)) + W * p["chosen_nll"],
    "sigmoid_norm": lambda u, v, p: log_loss(B * (u - v)),
    "robust": lambda u, v, p: ((1 - E) * log_loss(B * (u - v)) - E * log_loss(B * (v - u))) / (1 - 2 * E),
    "hinge": lambda u, v, p: max(0.0, 1 - B * (u - v)),
    "ipo": lambda u, v, p: (u - v - 1 / (2 * B)) ** 2,
    "exo_pair": lambda u, v, p: sum(
        q * math.log(q / label) for q, label in ((sigmoid(B * (u - v)), 1 - E), (sigmoid(B * (v - u)), E))
    ),
    "discopop": lambda u, v, p: (
        (1 - sigmoid(B * (u - v) / TAU)) * log_loss(B * (u - v))
        + sigmoid(B * (u - v) / TAU) * math.exp(-B * (u - v))
    ),
    "nca_pair": lambda u, v, p: log_loss(B * u) + 0.5 * log_loss(-B * u) + 0.5 * log_loss(-B * v),
    "bco_pair": lambda u, v, p: log_loss(B * u) + log_loss(-B * v),
    "sppo_hard": lambda u, v, p: (u - 1 / (2 * B)) ** 2 + (v + 1 / (2 * B)) ** 2,
    "cal_dpo": lambda u, v, p: log_loss(u - v) + C * ((u - 1 / (2 * B)) ** 2 + (v + 1 / (2 * B)) ** 2),
    "apo_zero": lambda u, v, p: 1 - sigmoid(B * u) + sigmoid(B * v),
    "apo_down": lambda u, v, p: sigmoid(B * u) + 1 - sigmoid(B * (u - v)),
    "simpo": lambda u, v, p: log_loss(B * (u - v) - B * G, E),
    "simper": lambda u, v, p: math.exp(v) - math.exp(u),
    "cpo_simpo": lambda u, v, p: log_loss(B * (u - v) - B * G, E) + W * p["chosen_nll"],
    "alpha_po": lambda u, v, p: log_loss(B * (mean_reward(u) - mean_reward(v)) - B * G, E),
    "cpo": lambda u, v, p: log_loss(B * (u - v), E) + W * p["chosen_nll"],
    "orpo": lambda u, v, p: p["chosen_nll"] + B * log_loss(math.log(odds(u) / odds(v))),
    "tpo": lambda u, v, p: log_loss(B * (u - v), E) + W * p["gold_nll"],
    "tpo_l": lambda u, v, p: log_loss(B * (u - v) - B * G, E) + W * p["gold_nll"],
    "sft": lambda u, v, p: p["chosen_nll"],
}
UNPAIRED: dict[str, Callable[[float, float, bool], float]] = {  # of r, the reference point, and the label
    "kto": lambda r, z, good: 1.3 * (1 - sigmoid(r - 0.7 * z)) if good else 0.4 * (1 - sigmoid(0.7 * z - r)),
    "apo_zero_unpaired": lambda r, z, good: 1.3 * (1 - sigmoid(r)) if good else 0.4 * sigmoid(r),
    "bco": lambda r, z, good: 1.3 * log_loss(r - z) if good else 0.4 * log_loss(z - r),
}
SORTED = {"aot", "aot_unpaired"}

over_rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def drawn(row: Loss, seed: int = 0, spread: float = 2.0) -> dict[str, Tensor]:
    """The inputs that the row needs, for four pairs."""
    return next(settings_of(row, thorough=False)).draw(seed, spread=spread)


def defaults(row: Loss) -> dict[str, Any]:
    return {n: row.parameters[n].example for n, default in row.defaults.items() if default is REQUIRED}


def call(row: Loss, inputs: dict[str, Tensor], **params: Any) -> PairLoss:
    result: PairLoss = row.kernel()(*inputs.values(), **params)
    return result


def by_formula(row: Loss, inputs: dict[str, Tensor]) -> list[float]:
    """What the paper's formula gives for every pair."""
    lists = {name: x.tolist() for name, x in inputs.items()}
    if row.name in UNPAIRED:
        ratios = zip(lists["scores"], lists["ref_scores"], lists["desirable"], strict=True)
        point = lists.get("reference_kl", lists.get("reward_shift", 0.0))
        return [UNPAIRED[row.name](B * (s - r), point, good) for s, r, good in ratios]
    if row.name in SORTED:
        first, second = ("rejected", "ref_chosen") if row.name == "aot" else ("ref_chosen", "rejected")
        x = sorted(a - c for a, c in zip(lists["chosen"], lists[first], strict=True))
        y = sorted(a - c for a, c in zip(lists[second], lists["ref_rejected"], strict=True))
        return [log_loss(B * (i - j), E) for i, j in zip(x, y, strict=True)]
    pairs = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    sides = ("chosen", "rejected")
    return [
        PAIRWISE[row.name](*(p.get(side, 0.0) - p.get(f"ref_{side}", 0.0) for side in sides), p)
        for p in pairs
    ]


@over_rows
@given(seed=seeds, spread=st.sampled_from([0.1, 2.0, 8.0]))
def test_each_loss_is_its_published_formula(row: Loss, seed: int, spread: float) -> None:
    inputs = drawn(row, seed, spread)
    settings = {n: x for n, x in SETTINGS.items() if n in row.parameters}
    settings |= {"alpha": ALPHA} if row.name == "alpha_po" else {}  # DPO's alpha is of a divergence
    ours = call(row, inputs, **settings).loss
    want = torch.tensor(by_formula(row, inputs), dtype=torch.float64)
    # The formulas lose digits that the kernels keep: 1 - sigmoid(x), 1 - exp(s), and large terms that cancel.
    assert_parity(ours, want, terms=16, magnitude=max(1.0, 10 * spread, float(want.abs().max())))


@pytest.mark.parametrize("name", sorted(set(ROWS) - SORTED - {"sft"} - set(UNPAIRED)))
def test_a_rejected_completion_that_cannot_be_written_costs_nothing_that_is_nan(name: str) -> None:
    inputs = drawn(ROWS[name])
    inputs["rejected"][:] = -math.inf
    loss = call(ROWS[name], inputs, **defaults(ROWS[name])).loss
    assert not loss.isnan().any()


def one(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    ("link", "want"), [("sigmoid", log_loss(0.25)), ("hinge", 0.75), ("square", (0.5 - 1.0) ** 2)]
)
def test_cpo_has_three_links_and_simpo_two(link: str, want: float) -> None:
    ours = preference.cpo(*one(-1.0, -1.5, 2.0), beta=0.5, nll_weight=3.0, link=link)
    assert ours.loss.item() == pytest.approx(want + 6.0, rel=1e-14)
    if link != "square":  # a margin of 0.5
        ours = preference.simpo(*one(-1.0, -2.5), beta=0.5, gamma_beta_ratio=1.0, link=link)
        assert ours.loss.item() == pytest.approx(want, rel=1e-14)


def test_a_tie_is_no_accuracy() -> None:
    for ours in (preference.dpo(*one(-1.0, -1.0, -2.0, -2.0)), preference.simpo(*one(-1.0, -1.0))):
        assert not ours.metrics["rewards/accuracies"].value.any()


@given(token_batches())
def test_sequence_logprobs_are_sums_and_averages_of_unmasked_tokens(batch: dict[str, Tensor]) -> None:
    """Whatever the others hold; an empty row gives 0."""
    logprobs, mask = batch["logprobs"], batch["mask"]
    unmasked = [row[keep].tolist() for row, keep in zip(logprobs, mask, strict=True)]
    poisoned = torch.where(mask, logprobs, math.nan).requires_grad_()
    for average in (False, True):
        want = [math.fsum(row) / (max(len(row), 1) if average else 1) for row in unmasked]
        ours = preference.sequence_logprobs(poisoned, mask, average=average)
        assert_parity(ours, torch.tensor(want, dtype=torch.float64), terms=logprobs.shape[-1])
        (slope,) = torch.autograd.grad(ours.sum(), poisoned)
        share = mask.sum(-1, keepdim=True).clamp(min=1) if average else 1
        assert torch.equal(slope, mask.double() / share)


def test_sequence_logprobs_of_a_packed_sequence_in_half_precision_sum_in_float32() -> None:
    logprobs = torch.full((1000,), -0.01, dtype=torch.bfloat16)
    total = preference.sequence_logprobs(logprobs, torch.ones(1000, dtype=torch.bool))
    assert total.shape == () and total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * logprobs[0].item(), rel=1e-5)


def test_tied_margins_share_a_sorted_loss_in_the_order_of_their_pairs() -> None:
    chosen, rejected = torch.zeros(2, 3, dtype=torch.float64).unbind()
    reference = torch.tensor([-1.0, 2.0, 0.5], dtype=torch.float64)
    chosen.requires_grad_()
    pair = preference.aot(chosen, rejected, reference, rejected, beta=1.0)
    (slope,) = torch.autograd.grad(pair.loss.sum(), chosen)
    want = [-sigmoid(-h) for h in (1.0, -0.5, -2.0)]
    assert slope.tolist() == pytest.approx(want, rel=1e-14)


@given(seeds)
def test_the_alpha_divergence_is_reverse_kl_at_1_and_forward_kl_at_0(seed: int) -> None:
    inputs = drawn(ROWS["dpo"], seed)
    for alpha, name in ((1.0, "reverse_kl"), (0.0, "forward_kl")):
        ours = call(ROWS["dpo"], inputs, divergence="alpha", alpha=alpha).loss
        assert ours.equal(call(ROWS["dpo"], inputs, divergence=name).loss)
    near = call(ROWS["dpo"], inputs, divergence="alpha", alpha=1 + 1e-5).loss
    assert near.allclose(call(ROWS["dpo"], inputs).loss, atol=1e-4)


F_PRIMES: dict[str, Callable[[float], float]] = {  # f'(t), less the constant that cancels in a pair
    "reverse_kl": math.log,
    "forward_kl": lambda t: -1 / t,
    "js": lambda t: math.log(2 * t / (t + 1)),
    "alpha": lambda t: t ** (0.3 - 1) / (0.3 - 1),
}


@pytest.mark.parametrize("name", F_PRIMES)
@pytest.mark.parametrize(
    "row", [r for r in ROWS.values() if "divergence" in r.parameters], ids=lambda r: r.name
)
def test_an_f_divergence_replaces_the_log_ratio_by_its_derivative(row: Loss, name: str) -> None:
    """The loss of f-DPO is that of DPO on a pair whose log-ratios are f'(pi / pi_ref)."""
    u, v = 0.8, -0.3
    transformed = one(*(F_PRIMES[name](math.exp(x)) for x in (u, v)), 0.0, 0.0)
    ours = row.kernel()(*one(u - 1, v - 2, -1.0, -2.0), divergence=name, alpha=0.3)
    assert_parity(ours.loss, row.kernel()(*transformed).loss, terms=8, magnitude=2.0)


def test_a_likelihood_term_of_weight_0_is_left_out_even_if_infinite() -> None:
    ours = preference.cpo(*one(-1.0, -1.5, math.inf), nll_weight=0.0)
    assert ours.loss.isfinite().all() and ours.metrics["nll"].value.isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_odds_of_a_certain_completion_are_large_and_its_gradient_is_finite(dtype: torch.dtype) -> None:
    """An empty completion scores 0: upstream's odds are infinite, and the gradient NaN."""
    chosen, rejected = (torch.zeros(1, dtype=dtype, requires_grad=True) for _ in range(2))
    nothing = torch.zeros(1, dtype=dtype)
    for pair in ((chosen, rejected - 1), (chosen - 1, rejected), (chosen, rejected)):
        loss = preference.orpo(*pair, nothing).loss
        slopes = torch.autograd.grad(loss.sum(), [chosen, rejected])
        assert loss.isfinite().all() and all(slope.isfinite().all() for slope in slopes)
    by_definition = -torch.nn.functional.logsigmoid(chosen - torch.log(-torch.expm1(chosen)))
    assert torch.autograd.grad(by_definition.sum(), chosen)[0].isnan().all()


def test_log_odds_keep_their_digits_at_both_ends() -> None:
    scores = torch.tensor([-1e-6, -0.69, -0.7, -50.0])
    exact = [s - math.log(-math.expm1(s)) for s in scores.tolist()]
    assert_parity(links.log_odds(scores), torch.tensor(exact), terms=1, dtype=torch.float32)


def test_bco_counts_rewards_from_their_running_mean() -> None:
    pair, shift = one(-1.0, -3.0, -2.0, -2.5), torch.tensor(0.3, dtype=torch.float64)
    ours = preference.bco_pair(*pair, beta=0.5, reward_shift=shift)
    assert ours.loss.item() == pytest.approx(log_loss(0.5 - 0.3) + log_loss(0.3 + 0.25), rel=1e-14)


def test_the_reference_point_of_kto_is_the_mean_kl_of_mismatched_completions_and_not_negative() -> None:
    assert preference.kto_reference_point(torch.zeros(0), torch.zeros(0)) == 0
    mismatched = torch.tensor([-1.0, -2.0], requires_grad=True)
    above = preference.kto_reference_point(mismatched, torch.tensor([-2.0, -2.5]))
    below = preference.kto_reference_point(mismatched, torch.tensor([-0.5, -1.0]))
    assert above.item() == 0.75 and below.item() == 0 and not above.requires_grad


def test_kto_logs_the_rewards_of_good_and_bad_completions_apart() -> None:
    scores, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.0, -1.0])
    good = torch.tensor([True, False, True])
    logged = preference.kto(scores, reference, good, torch.tensor(0.0), beta=0.5).metrics
    chosen, rejected = logged["rewards/chosen"], logged["rewards/rejected"]
    assert chosen.value[chosen.where].tolist() == [0.5, -1.0]
    assert rejected.value[rejected.where].tolist() == [0.0]


@given(token_batches(), st.sampled_from([0.0, 0.3, 1.0]))
def test_ld_scores_discount_tokens_beyond_the_other_completion(
    batch: dict[str, Tensor], alpha: float
) -> None:
    """Unmasked tokens count, wherever they stand and whatever the others hold."""
    logprobs, mask = batch["logprobs"], batch["mask"]
    other = mask.roll(1, 0)[:, : max(1, mask.shape[1] - 1)]
    want = []
    for row, unmasked, others in zip(logprobs, mask, other, strict=True):
        values, shared = row[unmasked].tolist(), int(others.sum())
        want.append(math.fsum(values[:shared]) + alpha * math.fsum(values[shared:]))
    poisoned = with_junk(logprobs, mask).requires_grad_()
    ours = preference.ld_logprobs(poisoned, mask, other, ld_alpha=alpha)
    assert_parity(ours, torch.tensor(want, dtype=torch.float64), terms=logprobs.shape[-1], magnitude=4.0)
    (slope,) = torch.autograd.grad(ours.sum(), poisoned)
    assert slope.isfinite().all() and not slope[~mask].any()
    if alpha == 1:
        assert_parity(ours, preference.sequence_logprobs(poisoned, mask), terms=logprobs.shape[-1])


def test_wpo_weighs_a_completion_by_how_the_policy_would_sample_it() -> None:
    """Against its own expected probability: a policy that is certain weighs 1, an empty row too."""
    logits = torch.tensor([[[2.0, 0.0, -1.0], [50.0, 0.0, 0.0]], [[0.0, 0.0, 0.0], [math.nan] * 3]])
    logprobs = logits.log_softmax(-1)
    mask = torch.tensor([[True, True], [False, False]])
    weights = preference.wpo_weights(logprobs[..., 0].requires_grad_(), (2 * logprobs).logsumexp(-1), mask)
    p = logits[0, 0].softmax(-1)
    assert weights.tolist() == pytest.approx([math.sqrt(p[0] / (p**2).sum()), 1.0])
    assert not weights.requires_grad


def test_a_weighted_pair_counts_so_often_and_one_of_weight_0_not_at_all() -> None:
    chosen = torch.tensor([-1.0, -1.0, -torch.inf], requires_grad=True)
    rejected, weights = torch.full((3,), -2.0), torch.tensor([3.0, 1.0, 0.0], requires_grad=True)
    plain = preference.simpo(chosen, rejected)
    ours = preference.weighted(plain, weights)
    (slope,) = torch.autograd.grad(ours.loss.sum(), chosen)
    assert ours.loss.tolist() == [3 * plain.loss[0], plain.loss[1], 0.0]
    assert slope[2] == 0 and slope[0] == 3 * slope[1] != 0
    assert ours.metrics["weights"].value.tolist() == [3.0, 1.0, 0.0]
    assert not ours.metrics["weights"].value.requires_grad
