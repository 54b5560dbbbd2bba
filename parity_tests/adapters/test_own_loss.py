"""REINFORCE with a KL to the reference, as docs/writing_a_loss.md has it, where it needs no framework."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters import prime_rl_plugin, slime_loss, tinker_loss
from composer_plugins.adapters.nemo_rl_loss.loss import ComposerLoss
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.kernels.policy.parts import score
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import nemo_rl_doubles, own_loss, prime_rl_doubles, slime_doubles, tinker_data
from parity_tests.rigs.commands import output
from parity_tests.rigs.paths import ROOT

PARTS = [1, 2, 4]


@pytest.fixture(autouse=True)
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_loss.written(tmp_path, monkeypatch)


def equals(value: Tensor, gradient: Tensor, logprobs: Tensor, token: Tensor, mask: Tensor, over: Any) -> None:
    """The sum of the tokens' losses over this number, and its gradient, exactly 0 at masked tokens."""
    total = torch.where(mask.bool(), token, 0.0).sum() / over
    assert_parity(value, total.detach(), terms=64, magnitude=4.0)
    assert_parity(gradient, torch.autograd.grad(total, logprobs)[0], terms=4, magnitude=1.0)
    assert not gradient[~mask.bool()].any() and gradient.any()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("parts", PARTS)
def test_in_prime_rl(parts: int) -> None:
    samples = [prime_rl_doubles.sample(seed, 5 + seed, reference=True) for seed in range(4)]
    samples = prime_rl_doubles.trained(samples)
    loss = partial(prime_rl_plugin.loss_fn, policy=own_loss.NAME)
    cuts = [samples[i : i + 4 // parts] for i in range(0, 4, 4 // parts)]
    packs = [prime_rl_doubles.packed(cut) for cut in cuts]
    over = prime_rl_doubles.scale(packs)
    value = torch.stack([prime_rl_doubles.compute_loss(one, loss, over)[0] for one in packs]).sum()
    own = [one["trainer_logprobs"] for one in samples]
    gradient, logprobs = torch.cat(torch.autograd.grad(value, own)), leaf(torch.cat(own))
    whole = {name: torch.cat([one[name] for one in samples]) for name in samples[0]}
    token = own_loss.by_hand(logprobs, whole["reference"], whole["advantages"])
    equals(value.detach(), gradient, logprobs, token, whole["loss_mask"], over)


def test_in_tinker() -> None:
    data, given = tinker_data.batch()
    loss = tinker_loss.loss_fn(policy=own_loss.NAME)
    value, gradients, _ = tinker_data.loss_and_gradients(loss, data, given)
    entries = {
        name: torch.cat([one.loss_fn_inputs[name].to_torch() for one in data])
        for name in ("ref_logprobs", "advantages", "mask")
    }
    logprobs = leaf(torch.cat(given))
    token = own_loss.by_hand(logprobs, entries["ref_logprobs"], entries["advantages"])
    equals(value, torch.cat(gradients), logprobs, token, entries["mask"], entries["mask"].sum())
    with pytest.raises(Exception, match="call add_ref_logprobs"):
        tinker_data.loss_and_gradients(loss, [tinker_data.without(x, "ref_logprobs") for x in data], given)


@pytest.mark.parametrize("parts", PARTS)
def test_in_nemo_rl(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss", nemo_rl_doubles.MODULE):
        monkeypatch.setitem(sys.modules, name, nemo_rl_doubles.interfaces())
    own, batch = nemo_rl_doubles.data()
    loss = ComposerLoss({"reference_policy_kl_penalty": 0.0}, policy=own_loss.NAME)
    sequences, tokens = nemo_rl_doubles.counts(batch)
    value = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(4).chunk(parts):
        cut = {name: x[rows] for name, x in batch.items()}
        value = value + loss(own[rows], cut, sequences, tokens)[0]
    gradient, logprobs = torch.autograd.grad(value, own)[0], leaf(own)
    reference, advantages = batch["reference_policy_logprobs"][:, 1:], batch["advantages"][:, 1:]
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    equals(
        value.detach(), gradient, logprobs, own_loss.by_hand(logprobs, reference, advantages), mask, tokens
    )


@pytest.mark.parametrize("parts", PARTS)
def test_in_slime(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in slime_doubles.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    own, batch = slime_doubles.batch()
    options = {"calculate_per_token_loss": True, "use_kl_loss": True, "kl_loss_coef": 0.0}
    args = slime_doubles.args(**options, composer={"policy": own_loss.NAME})
    lengths, value = batch["response_lengths"], torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(4).chunk(parts):
        cut = slime_doubles.part(batch, slice(int(rows[0]), int(rows[-1]) + 1))
        of_rows = own[:, sum(lengths[: rows[0]]) : sum(lengths[: rows[-1] + 1])]
        value = value + slime_loss.loss_fn(args, cut, of_rows, slime_doubles.reducer(cut, per_token=True))[0]
    gradient, logprobs = torch.autograd.grad(value, own)[0][0], leaf(own[0])
    token = own_loss.by_hand(logprobs, torch.cat(batch["ref_log_probs"]), torch.cat(batch["advantages"]))
    equals(value.detach(), gradient, logprobs, token, torch.cat(batch["loss_masks"]), 1)


@pytest.mark.parametrize("name", ["skyrl", "torchtitan"])
def test_where_there_is_no_reference_the_error_says_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match="needs ref_logprobs, which") as refused:
        frameworks()[name].require(find_one(own_loss.NAME))
    own_kl = "leave the KL out of the loss, and set trainer.algorithm.use_kl_loss=true; or choose another"
    assert refused.value.remedy.startswith(own_kl if name == "skyrl" else "choose another")


def test_the_weight_of_a_score_may_be_a_number() -> None:
    logprobs, advantages = torch.tensor([[-1.0, -2.0]]).requires_grad_(), torch.tensor([[3.0]])
    mask = torch.tensor([[True, False]])
    for weight in (2, 2.0, torch.tensor(2.0), torch.full((1, 2), 2.0).requires_grad_()):
        loss = score(weight, advantages, logprobs, mask)
        assert loss.tolist() == [[6.0, 0.0]]
        assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-6.0, 0.0]]


def test_the_page_has_what_check_prints_and_explain_says_when_there_is_a_reference() -> None:
    page = (ROOT / "docs" / "writing_a_loss.md").read_text()
    printed = page.partition(f"composer-plugins check {own_loss.NAME}\n")[2].partition("```")[0]
    assert output("check", own_loss.NAME) == printed
    explained = output("explain", own_loss.NAME)
    assert "in verl  " in explained and "in tinker  " in explained and "after `add_ref_logprobs`" in explained
