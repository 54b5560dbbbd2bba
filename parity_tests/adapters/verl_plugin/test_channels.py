"""The actor's loss under composer_sync, on drawn rows: the kernels' terms, however the batch is cut."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from benchmarks.verl_logits import gathered
from composer_plugins.adapters.verl_plugin.sync_trainer.batch_layout import (
    BatchLayout,
    interleave,
    rows_per_share,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import HINT_MASK, REPLAY, TEACHER
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import sums_to_means
from composer_plugins.conformance.verl_claims.upstream import actor
from composer_plugins.frameworks.verl import MODES
from composer_plugins.kernels import divergences
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_rows import (
    EVERY,
    EXTRA,
    JSD,
    LENGTHS,
    PARAMS,
    SAMPLED,
    SIMPO,
    VOCABULARY,
    called,
    drawn,
    flat,
    logprobs_of_responses,
    loss_of,
    of_responses,
    response_logits,
    with_teacher,
    without_entries,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("node", [SAMPLED, JSD, SIMPO, {**JSD, **SIMPO}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_cuts_and_ranks_leave_the_gradient_alone(mode: str, node: dict[str, Any], ranks: int) -> None:
    rows, extra = with_teacher(drawn(LENGTHS)), EXTRA if "hint_top_k" in node else {}
    whole = called(loss_of(node, mode), rows, EVERY, extra)[1]
    rows = without_entries(rows)
    for cuts in (1, 2, 4):
        found: list[Tensor] = [torch.zeros(0)] * 8
        for of_rank in torch.arange(8).chunk(ranks):  # FSDP takes the mean of the ranks' gradients
            for part in of_rank.chunk(cuts):
                gradients = called(loss_of(node, mode), rows, part.tolist(), extra, ranks=ranks)[1]
                for i, gradient in zip(part.tolist(), gradients, strict=True):
                    found[i] = gradient / ranks
        largest = max(float(x.abs().max()) for x in whole)
        for mine, all_ in zip(found, whole, strict=True):
            assert_parity(mine, all_, terms=8 * VOCABULARY, magnitude=largest)


@pytest.mark.parametrize("params", [{}, {"ratio_cap": 2.0}], ids=str)
def test_the_sampled_tokens_hint_is_the_kernels_over_the_policys_denominator(
    params: dict[str, float],
) -> None:
    """With a cap, each token is weighed by its ratio to the old policy."""
    rows = with_teacher(drawn(LENGTHS))
    loss = loss_of(SAMPLED | {"hint_params": params}, policy=0.0)
    value, gradients, metrics = called(loss, rows, EVERY, {})
    logits, mask = response_logits(rows), flat(rows, HINT_MASK).bool()
    logprobs = gathered(logits, torch.cat(rows.responses))
    more = params | {"old_logprobs": flat(rows, "old_log_probs")} if params else {}
    token = divergences.sampled_token(logprobs, flat(rows, TEACHER), mask, **more)
    wanted = 0.7 * token.loss.sum() / flat(rows, "loss_mask").sum()
    terms = mask.numel() * VOCABULARY
    assert_parity(value, wanted, terms=terms, magnitude=float(token.loss.detach().abs().max()))
    assert_parity(of_responses(rows, gradients), torch.autograd.grad(wanted, logits)[0], terms=terms)
    assert metrics["actor/composer/hint/loss"].values == [pytest.approx(wanted.item() / 0.7, rel=1e-12)]
    tokens = metrics["actor/composer/hint/#tokens"].values[0]
    assert tokens == int(mask.sum()) and "actor/composer/hint/kl#sum" in metrics


@pytest.mark.parametrize("rows", [[2], [7], [0, 2]])
@pytest.mark.parametrize("divergence", ["jsd", "sdpo", "taid", "forward_kl_topk"])
def test_rows_without_entries_add_nothing_and_log_the_same_names(rows: list[int], divergence: str) -> None:
    """Row 2 has no hint, and row 7 is a replayed one: a micro-batch may consist of such rows."""
    given, node = with_teacher(drawn(LENGTHS)), JSD | {"hint_divergence": divergence}
    node |= {"hint_params": PARAMS[divergence]} if divergence in PARAMS else {}
    whole = called(loss_of(node), given, rows, EXTRA)
    found = called(loss_of(node), without_entries(given), rows, EXTRA)
    assert_parity(found[0], whole[0], terms=8)
    for mine, all_ in zip(found[1], whole[1], strict=True):
        assert_parity(mine, all_, terms=8)
    assert {n: m.values for n, m in found[2].items()} == {n: m.values for n, m in whole[2].items()}
    assert "actor/composer/hint/kl#sum" in found[2]


def test_the_kl_of_the_first_update_has_one_name_and_one_value_for_every_divergence() -> None:
    rows = with_teacher(drawn(LENGTHS))
    mask = flat(rows, HINT_MASK).bool()
    wanted = float((flat(rows, "old_log_probs") - flat(rows, TEACHER))[mask].sum())
    nodes = [JSD | {"hint_divergence": name, "hint_params": params} for name, params in PARAMS.items()]
    for node in [SAMPLED, JSD, *nodes]:
        extra = EXTRA if "hint_top_k" in node else {}
        metrics = called(loss_of(node), without_entries(rows), EVERY, extra)[2]
        assert metrics["actor/composer/hint/kl#sum"].values == [pytest.approx(wanted, rel=1e-6)]


@pytest.mark.parametrize("cuts", [1, 2, 8])
def test_verls_own_metrics_of_the_policy_are_those_of_verls_own_loss(cuts: int) -> None:
    """Also where the batch has replayed rows, and aggregated as verl does."""
    rows = with_teacher(drawn(LENGTHS))
    own = ComposerLoss(actor(loss_scale_factor=5), SAMPLED)
    ours = loss_of(SAMPLED | {"policy": "grpo@verl", "policy_params": {"dual_clip": 3.0}})
    for part in torch.arange(8).chunk(cuts):
        theirs = called(own, rows, part.tolist(), {})[2]
        found = called(ours, rows, part.tolist(), {})[2]
        names = {name for name in theirs if not name.startswith("actor/composer/")}
        assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"} < names
        for name in names:
            assert found[name].aggregation == theirs[name].aggregation
            assert found[name].values == pytest.approx(theirs[name].values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("cuts", [1, 2, 8])
def test_what_is_logged_is_the_mean_over_tokens_however_the_batch_is_cut(cuts: int) -> None:
    """The last row is a replayed one: alone in its micro-batch it has no token to be a mean of."""
    rows, added = with_teacher(drawn(LENGTHS)), dict[str, float]()
    for part in torch.arange(8).chunk(cuts):
        metrics = called(loss_of(SAMPLED), rows, part.tolist(), {})[2]
        for name, metric in metrics.items():
            if "#" in name:
                added[name] = added.get(name, 0.0) + metric.values[0]
    sums_to_means(added)
    live, hinted = flat(rows, "response_mask").bool(), flat(rows, HINT_MASK).bool()
    logprobs = torch.cat(logprobs_of_responses(rows))
    ratio = (logprobs - flat(rows, "old_log_probs")).exp()[live].mean()
    kl = (flat(rows, "old_log_probs") - flat(rows, TEACHER))[hinted].mean()
    assert added["actor/composer/policy/ratio"] == pytest.approx(float(ratio), rel=1e-6)  # logged in float32
    assert added["actor/composer/hint/kl"] == pytest.approx(float(kl), rel=1e-6)
    assert not [name for name in added if "#" in name]
    sums_to_means(nothing := {"actor/composer/hint/kl#sum": 0.0, "actor/composer/hint/#tokens": 0.0})
    assert nothing == {}


def test_the_replay_term_is_linear_in_the_log_probabilities() -> None:
    """Its coefficients are the slopes of the preference loss: test_driver.py."""
    rows = with_teacher(drawn(LENGTHS))
    value, gradients, _ = called(loss_of(SIMPO, policy=0.0), rows, EVERY, {})
    logits = response_logits(rows)
    wanted = 0.3 * (flat(rows, REPLAY) * gathered(logits, torch.cat(rows.responses))).sum()
    assert float(wanted.detach().abs()) > 0.1
    assert_parity(value, wanted, terms=8 * VOCABULARY)
    assert_parity(of_responses(rows, gradients), torch.autograd.grad(wanted, logits)[0], terms=8)


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 3),
    width=st.integers(1, 6),
    minis=st.integers(1, 4),
    micro=st.integers(1, 3),
    count=st.integers(1, 40),
)
def test_every_mini_batch_of_every_rank_has_its_policy_rows_in_order_and_as_many_others(
    ranks: int, width: int, minis: int, micro: int, count: int
) -> None:
    layout = BatchLayout(ranks, ranks * width, micro)
    rows = [("policy", i) for i in range(ranks * width * minis)]
    each = rows_per_share(count, len(rows), layout)
    extra = [("replay", i) for i in range(each * ranks * minis)]
    assert len(extra) >= count > len(extra) - ranks * minis * micro and each % micro == 0
    whole = interleave(rows, extra, layout)
    assert sorted(whole) == sorted(rows + extra)
    cells = [whole[i : i + width + each] for i in range(0, len(whole), width + each)]
    for i, cell in enumerate(cells):
        assert [one for one in cell if one[0] == "policy"] == rows[i * width : (i + 1) * width]
        assert abs(sum(one[1] < count for one in cell if one[0] == "replay") - count / len(cells)) < 1
