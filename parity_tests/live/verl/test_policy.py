"""Every policy loss of the installed verl against our kernels, on drawn batches: value, gradient, metrics.

A kernel is called through its catalogue row, "grpo@verl", so that the row's numbers are proven too: half
of the draws leave verl at its defaults and us at the row's.
"""

from typing import Any, NamedTuple
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from composer_plugins.catalogue import of_kind
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.plugins import losses
from composer_plugins.testing.assertions import assert_parity
from parity_tests.support.verl_facts import (
    FLOAT64,
    MODES,
    Batch,
    actor,
    assert_complete,
    assert_policy_parity,
    global_batches,
    policy_batches,
    row_kernel,
    verl_policy_loss,
    with_dialect,
)

examples = settings(max_examples=60)

Options = dict[str, list[float]]
CLIPS: Options = {"clip_ratio_low": [3e-4, 0.1, 0.2, 0.9], "clip_ratio_high": [4e-4, 0.28, 3.0]}
CAPS: Options = {"clip_ratio_c": [1.5, 3.0, 10.0, 1e4]}
MOVES: Options = {"clip_ratio_low": [0.01, 0.2, 0.9], "clip_ratio_high": [0.01, 0.15, 1.0]}
TAUS: Options = {"tau_pos": [0.5, 1.0, 2.0], "tau_neg": [0.5, 1.05, 4.0]}


class Row(NamedTuple):
    """One of verl's losses in our terms."""

    ours: str
    options: Options = {}  # verl's, and values to draw
    keywords: tuple[str, ...] = ()  # ours, in the same order
    clipped: tuple[str, ...] = ()  # our metrics that verl adds up as its clip fraction
    needs_old: bool = True
    required: bool = False  # verl has no default
    mode: str | None = None  # verl reduces in this mode, whatever is configured


CLIP = ("clip_low", "clip_high")  # parameters; the next two are metrics
CLIPPED, MASKED = ("clip_frac_low", "clip_frac_high"), ("mask_frac_low", "mask_frac_high")
ROWS = {
    "vanilla": Row("grpo@verl", CLIPS | CAPS, (*CLIP, "dual_clip"), CLIPPED),
    "gspo": Row("gspo_token@verl", CLIPS, CLIP, CLIPPED),
    "sapo": Row("sapo@verl", TAUS, ("tau_pos", "tau_neg"), mode="seq-mean-token-mean"),
    "gpg": Row("gpg@verl", needs_old=False),
    "cispo": Row("cispo@verl", CLIPS, CLIP, CLIPPED),
    "dppo_tv": Row("dppo_tv@verl", MOVES | CAPS, ("tv_low", "tv_high", "ratio_cap"), MASKED),
    "dppo_kl": Row("dppo_kl@verl", MOVES | CAPS, ("kl_low", "kl_high", "ratio_cap"), MASKED),
    "dro": Row("dro", {"dro_beta": [1e-3, 0.05, 1.0]}, ("beta",), required=True),
}
BY_THEMSELVES = {"geo_mean", "clip_cov", "kl_cov"}
NOT_COMPARED = {"bypass_mode": "it is vanilla or REINFORCE with a correction: live/verl/test_reduction.py"}


def draw_options(data: st.DataObject, options: Options, *, required: bool = False) -> dict[str, float]:
    """verl's defaults, or every option drawn."""
    if not required and data.draw(st.booleans(), label="defaults"):
        return {}
    return {name: data.draw(st.sampled_from(values), label=name) for name, values in options.items()}


def in_our_words(drawn: dict[str, float], options: Options, keywords: tuple[str, ...]) -> dict[str, float]:
    return {ours: drawn[theirs] for ours, theirs in zip(keywords, options, strict=True) if theirs in drawn}


@pytest.mark.parametrize("name", ROWS)
@examples
@given(data=st.data())
def test_policy_loss_equals_verl(name: str, data: st.DataObject) -> None:
    row = ROWS[name]
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    drawn = draw_options(data, row.options, required=row.required)
    loss, gradient, metrics = verl_policy_loss(name, batch, actor(info, **drawn), mode)
    kernel = row_kernel("policy", row.ours, **in_our_words(drawn, row.options, row.keywords))

    def call(logprobs: Tensor, old_logprobs: Tensor, *others: Tensor) -> Any:
        return kernel(logprobs, old_logprobs, *others) if row.needs_old else kernel(logprobs, *others)

    ours = assert_policy_parity(call, batch, (loss, gradient), row.mode or mode, info)
    if row.clipped:
        counted = (ours.metrics[m].value.double() for m in row.clipped)
        fraction = sum(aggregate(one, batch.mask, "token-mean") for one in counted)
        logged = torch.tensor(metrics["actor/pg_clipfrac"])
        assert_parity(fraction, logged, terms=1, dtype=torch.float32, magnitude=1.0)


VANILLA = {
    loss.name: dialect.params
    for loss in of_kind(losses(), "policy").values()
    for dialect in loss.dialects
    if dialect.upstream == "verl" and dialect.source.endswith("compute_policy_loss_vanilla")
}


@pytest.mark.parametrize("name", VANILLA)
@settings(max_examples=20)
@given(data=st.data())
def test_every_row_that_is_vanilla_in_verl_equals_it_at_the_numbers_of_its_dialect(
    name: str, data: st.DataObject
) -> None:
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    params = VANILLA[name]
    numbers = {"clip_ratio_low": params["clip_low"], "clip_ratio_high": params["clip_high"]}
    numbers["clip_ratio_c"] = params["dual_clip"]
    loss, gradient, _ = verl_policy_loss("vanilla", batch, actor(info, **numbers), mode)
    assert_policy_parity(row_kernel("policy", f"{name}@verl"), batch, (loss, gradient), mode, info)


@examples
@given(data=st.data())
def test_gmpo_equals_verl_geo_mean(data: st.DataObject) -> None:
    batch = data.draw(policy_batches())
    batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    options: Options = {"clip_ratio_low": [0.01, 0.4, 3.0], "clip_ratio_high": [0.01, 0.4, 3.0]}
    drawn = draw_options(data, options)
    # It takes the mean over rows, the empty ones too, whatever mode and counts it is given.
    loss, gradient, _ = verl_policy_loss("geo_mean", batch, actor(**drawn), "token-mean")
    if batch.weights is not None:  # and of the weights their geometric mean
        log_weights = torch.where(batch.mask, (batch.weights + 1e-10).log(), 0.0).sum(-1, keepdim=True)
        mean = log_weights / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        batch = batch._replace(weights=mean.exp().expand(batch.mask.shape))
    kernel = row_kernel("policy", "gmpo@verl", **in_our_words(drawn, options, CLIP))
    info = {"global_batch_size": len(batch.mask)}
    assert_policy_parity(kernel, batch, (loss, gradient), "seq-mean-token-mean", info)


COVARIANCE: Options = {
    "clip_cov_ratio": [2e-4, 0.1, 0.5],
    "clip_cov_lb": [0.0, 0.1, 1.0],
    "clip_cov_ub": [0.5, 5.0, 1e3],
}


@examples
@given(data=st.data())
def test_clip_cov_equals_verl_when_both_draw_the_first_tokens(data: st.DataObject) -> None:
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    options = COVARIANCE | CLIPS
    drawn = draw_options(data, options)
    with mock.patch("torch.randperm", torch.arange):
        loss, gradient, _ = verl_policy_loss("clip_cov", batch, actor(info, **drawn), mode)
    keywords = ("cov_ratio", "cov_low", "cov_high", *CLIP)
    uniform = torch.linspace(0, 0.99, batch.mask.numel(), dtype=FLOAT64).view(batch.mask.shape)
    kernel = row_kernel("policy", "clip_cov@verl", **in_our_words(drawn, options, keywords))

    def call(*inputs: Tensor) -> Any:
        return kernel(*inputs, uniform=uniform)

    assert_policy_parity(call, batch, (loss, gradient), mode, info)


@examples
@given(data=st.data())
def test_kl_cov_equals_verl(data: st.DataObject) -> None:
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    options: Options = {"kl_cov_ratio": [2e-4, 0.1, 0.5], "ppo_kl_coef": [0.0, 0.1, 1.0]}
    drawn = draw_options(data, options)
    assume(highest_are_unique(batch, drawn.get("kl_cov_ratio", 2e-4)))
    loss, gradient, _ = verl_policy_loss("kl_cov", batch, actor(info, **drawn), mode)
    kernel = row_kernel("policy", "kl_cov@verl", **in_our_words(drawn, options, ("cov_ratio", "kl_coef")))
    assert_policy_parity(kernel, batch, (loss, gradient), mode, info)


def highest_are_unique(batch: Batch, fraction: float) -> bool:
    """Whether the share of highest covariance is the same by any arithmetic: torch.topk breaks ties."""
    advantages, log_p = batch.advantages[batch.mask], batch.logprobs[batch.mask]
    covariance = ((advantages - advantages.mean()) * (log_p - log_p.mean())).sort(descending=True).values
    count = max(1, int(fraction * len(covariance)))
    return count == len(covariance) or bool(covariance[count - 1] - covariance[count] > 1e-9)


def test_every_policy_loss_of_verl_is_compared_or_has_a_reason() -> None:
    assert_complete(POLICY_LOSS_REGISTRY, {*ROWS, *BY_THEMSELVES}, NOT_COMPARED)


def test_every_policy_row_with_a_dialect_of_verl_is_called_here() -> None:
    rows = {f"{loss.name}@verl" for loss in with_dialect("policy")}
    called = {row.ours for row in ROWS.values()} | {f"{name}@verl" for name in VANILLA}
    called |= {"gmpo@verl", "clip_cov@verl", "kl_cov@verl"}
    assert rows == called - {"dro"}  # whose number has no default, neither there nor here
