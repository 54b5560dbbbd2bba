"""What the parity table and its test compare: our policy losses in verl's registry with verl's own.

Batches are those of the live tests' strategies. An error is relative to the largest term of the sum behind
a number, since the sum may cancel; a gradient's to its largest entry. `allowed` is what the dtype and the
number of terms leave room for.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor

from composer_plugins.diagnosis import ComposerWarning
from composer_plugins.testing.assertions import tolerance
from parity_tests.adapters.verl.test_plugin import policy_loss
from parity_tests.live.verl.test_policy import CLIP, ROWS, VANILLA, Row, draw_options, in_our_words
from parity_tests.support.verl_drawn import largest_term
from parity_tests.support.verl_facts import (
    FLOAT64,
    MODES,
    actor,
    global_batches,
    policy_batches,
    row_kernel,
    verl_policy_loss,
)

GEO_MEAN = Row("gmpo@verl", {"clip_ratio_low": [0.01, 0.4], "clip_ratio_high": [0.01, 0.4]}, CLIP)

# Dialects of verl that its registries do not get from us, so that there is nothing to call.
BATCH = "a statistic of the whole batch, and verl passes micro-batches; the kernel: live/verl/test_policy.py"
KERNEL = "the kernel: live/verl/test_advantages.py"
LEFT_OUT = {
    "clip_cov@verl": f"{BATCH}; it also draws tokens at random, each side its own",
    "kl_cov@verl": BATCH,
    "gdpo@verl": f"an estimator is handed the sum of the reward's components alone; {KERNEL}",
    "remax@verl": f"verl computes its baselines for its own estimator only; {KERNEL}",
    "gae@verl": f"verl calls its own without asking the registry, and hands no other values; {KERNEL}",
}


class Error(NamedTuple):
    """How far apart two numbers are and may be, relative to `scale`."""

    found: float
    allowed: float


def error(ours: Tensor, theirs: Tensor, scale: float, *, terms: int, dtype: torch.dtype = FLOAT64) -> Error:
    """The largest difference over `scale`; 0 where there is none, whatever the scale."""
    assert ours.shape == theirs.shape and ours.isfinite().all() and theirs.isfinite().all()
    difference = float((ours - theirs).detach().abs().max())
    relative = difference / scale if scale else float("inf")
    return Error(relative if difference else 0.0, tolerance(dtype, terms, 1.0))


class Claim(NamedTuple):
    """One row of a table: `errors` compares an example of `cases`."""

    ours: str
    theirs: str
    cases: st.SearchStrategy[Any]
    errors: Callable[[Any], tuple[Error, ...]]
    note: str = ""


def policy_claim(theirs: str, row: Row, *, fixed: dict[str, float] | None = None, note: str = "") -> Claim:
    """`fixed`: verl's options are those of our dialect; else each is drawn half of the time."""

    @st.composite
    def cases(draw: st.DrawFn) -> Any:
        batch, data = draw(policy_batches()), draw(st.data())
        mode, info = draw(st.sampled_from(MODES)), draw(global_batches(batch.mask))
        if theirs == "geo_mean":  # one mean over all rows, whatever is set
            mode, info = "seq-mean-token-mean", {"global_batch_size": len(batch.mask)}
            batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape), weights=None)
        drawn = draw_options(data, row.options, required=row.required)
        return batch, mode, info, drawn

    def errors(case: Any) -> tuple[Error, ...]:
        batch, mode, info, drawn = case
        own, own_gradient, _ = verl_policy_loss(theirs, batch, actor(info, **(fixed or drawn)), mode)
        params = in_our_words(drawn, row.options, row.keywords)
        node = {"policy": row.ours, "policy_params": params}
        name = f"composer/{row.ours.partition('@')[0]}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ComposerWarning)  # of a reduction that is not the loss's own
            loss, gradient, _ = policy_loss(name, batch, mode, info, **node)
        kernel = row_kernel("policy", row.ours, **params)
        called = kernel if row.needs_old else lambda p, _, *rest: kernel(p, *rest)
        scale = largest_term(called, batch, row.mode or mode, info)
        rows, tokens = batch.mask.shape
        return (
            error(loss, own, scale, terms=rows * tokens),
            error(gradient, own_gradient, float(own_gradient.abs().max()), terms=tokens),
        )

    return Claim(row.ours, theirs, cases(), errors, note)


def policies() -> list[Claim]:
    """Every policy loss that both registries have."""
    notes = {"sapo": "verl's mode is always seq-mean-token-mean"}
    claims = [policy_claim(name, row, note=notes.get(name, "")) for name, row in ROWS.items()]
    shared = {row.ours for row in ROWS.values()}
    for name, params in VANILLA.items():
        if f"{name}@verl" in shared:
            continue
        theirs = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
        fixed = dict(zip(theirs, (params[k] for k in (*CLIP, "dual_clip")), strict=True))
        claims.append(
            policy_claim("vanilla", Row(f"{name}@verl"), fixed=fixed, note="at the dialect's numbers")
        )
    note = "one advantage per row, no rollout weights; verl's is a mean over all rows, empty ones too"
    return [*claims, policy_claim("geo_mean", GEO_MEAN, note=note)]
