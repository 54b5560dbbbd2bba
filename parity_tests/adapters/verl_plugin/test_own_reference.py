"""A policy loss with ref_logprobs: composer_sync passes verl's; where there are none, the error says how."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.errors import ComposerWarning, ConfigError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import own_loss
from parity_tests.rigs.verl_actor import ONES, composer_actor, policy_loss
from parity_tests.rigs.verl_rows import (
    EVERY,
    LENGTHS,
    Drawn,
    called,
    drawn,
    flat,
    logprobs_of_responses,
    normal,
    of_responses,
    response_logits,
)
from parity_tests.rigs.verl_trained import LOSS, REFERENCE, SYNC, Trained, apart, finished

# torchdata's loader calls it, and torch 2.13 warns.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
NODE = {"policy": own_loss.NAME}
OTHERS = (
    *(one for one in SYNC if "composer.policy" not in one and "loss_mode" not in one),
    "critic.enable=False",
)
OURS = (*OTHERS, f"{LOSS}.loss_mode=composer", f"+algorithm.composer.policy='{own_loss.NAME}'")


@pytest.fixture(autouse=True)
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_loss.written(tmp_path, monkeypatch)


def with_both(lengths: list[tuple[int, int]] = LENGTHS) -> Drawn:
    """Rows with the reference's and the rollout engine's log-probabilities."""
    rows, g = drawn(lengths), torch.Generator().manual_seed(3)
    logprobs = logprobs_of_responses(rows)
    more = {
        name: [(x + 0.4 * normal(g, len(x))).clamp(max=0) for x in logprobs]
        for name in ("ref_log_prob", "rollout_log_probs")
    }
    return rows._replace(fields=rows.fields | more)


def wanted(rows: Drawn, of: str) -> tuple[Tensor, Tensor]:
    """The formula's mean over the unmasked tokens of all rows, and its gradient in the responses' logits."""
    logits, mask = response_logits(rows), flat(rows, "loss_mask").bool()
    ids = torch.cat(rows.responses)
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    advantages = flat(rows, "advantages")
    if of == "ref_log_prob":
        token = own_loss.by_hand(logprobs, flat(rows, of), advantages)
    else:
        token = -advantages * (logprobs - flat(rows, of)).exp()
    value = token[mask].sum() / mask.sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    ("policy", "field"),
    [(own_loss.NAME, "ref_log_prob"), ("my_losses:ratio", "rollout_log_probs")],
)
def test_composer_sync_has_the_value_and_gradient_of_the_formula(
    policy: str, field: str, parts: int, tmp_path: Path
) -> None:
    rows, size = with_both(), len(EVERY) // parts
    if field == "rollout_log_probs":
        with (tmp_path / "my_losses.py").open("a") as file:
            file.write("""
def ratio(logprobs, rollout_logprobs, advantages, mask):
    from composer_plugins.kernels.masking import keep, safe_exp
    from composer_plugins.kernels.ratios import log_ratio
    return TokenLoss(keep(-advantages * safe_exp(log_ratio(logprobs, rollout_logprobs, mask)), mask), {})
""")
    node = {"policy": policy}
    inputs = ["ref_logprobs" if field == "ref_log_prob" else "rollout_logprobs"]
    loss = ComposerLoss(composer_actor(node), node, inputs)
    found = [called(loss, rows, EVERY[i : i + size], {}) for i in range(0, len(EVERY), size)]
    value, gradients = sum(one[0] for one in found), [row for one in found for row in one[1]]
    for ours, theirs in zip((value, of_responses(rows, gradients)), wanted(rows, field), strict=True):
        assert_parity(torch.as_tensor(ours), theirs, terms=64, magnitude=1.0)


def test_verls_own_trainers_have_no_reference_for_it() -> None:
    with pytest.raises(ConfigError) as refused:
        policy_loss("composer", ONES, **NODE)
    assert refused.value.key == "algorithm.composer.policy"
    sets = "set trainer.v1.trainer_mode=composer_sync (verl 0.9 or later, with trainer.use_v1=True) and "
    assert refused.value.remedy.startswith(f"{sets}{REFERENCE[0]} {REFERENCE[1]}; or leave the KL out")


def test_composer_sync_sets_its_loss_where_there_is_a_reference(make: Any) -> None:
    with pytest.raises(ConfigError, match="needs ref_logprobs, and this run has no reference policy; set "):
        make({}, *OURS)
    trainer = make({}, *OURS, *REFERENCE)
    assert trainer.policy_only and trainer.sets_loss and trainer.inputs == ["ref_logprobs"]
    with pytest.warns(ComposerWarning, match="^actor_rollout_ref.actor.kl_loss_coef: verl adds its own KL"):
        make({}, *OURS, REFERENCE[0])


def test_the_rollout_engines_log_probabilities_are_passed_where_verl_keeps_them(make: Any) -> None:
    kept, dppo = "actor_rollout_ref.rollout.calculate_log_probs=", f"{LOSS}.loss_mode=composer/dppo_tv"
    corrected = "algorithm.rollout_correction.rollout_is=token"
    lines = (*OTHERS, dppo)
    assert make({}, *lines, f"{kept}True").inputs == ["rollout_logprobs"]
    with pytest.raises(ConfigError, match="rollout_is: 'dppo_tv' contains the ratio to the rollout engine"):
        make({}, *lines, f"{kept}True", corrected)
    with pytest.warns(ComposerWarning, match=f"^{kept[:-1]}: .* recomputation; set {kept}True, with which"):
        assert not make({}, *lines, f"{kept}False").sets_loss
    dialect = (*OTHERS, f"{LOSS}.loss_mode=composer", "+algorithm.composer.policy=dppo_tv@verl")
    assert make({}, *dialect, f"{kept}True").inputs == []


@pytest.mark.slow
def test_in_main_ppo_it_trains_as_reinforce_beside_verls_own_kl(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KL is so large that without it the parameters end 0.05 apart."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    actor, beta = "actor_rollout_ref.actor", 50.0
    ours = trained(*OURS, *REFERENCE, f"+algorithm.composer.policy_params={{beta: {beta}}}")
    own_kl = (REFERENCE[0], f"{actor}.kl_loss_coef={beta}", f"{actor}.kl_loss_type=low_var_kl")
    theirs = trained(*OTHERS, f"{LOSS}.loss_mode=composer/reinforce", *own_kl)
    for mine, own in zip(finished(ours).parameters, finished(theirs).parameters, strict=True):
        assert apart(mine, own) < 1e-3
