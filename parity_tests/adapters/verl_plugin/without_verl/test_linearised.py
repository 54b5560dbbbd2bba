"""The replay loss as coefficients: their term has the preference loss's own gradient."""

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.sync_trainer.linearised import linearise
from composer_plugins.kernels import preference
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity

LENGTHS = {"chosen": (3, 1, 5), "rejected": (2, 4, 1)}
WEIGHTS = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
LOSSES = {  # of the chosen, the rejected and both of the reference, as tokens of one pair
    "dpo": lambda c, r, c0, r0: preference.dpo(c.sum(), r.sum(), c0.sum(), r0.sum()),
    "simpo": lambda c, r, *_: preference.simpo(c.mean(), r.mean()),
    "rpo": lambda c, r, c0, r0: preference.rpo(c.sum(), r.sum(), c0.sum(), r0.sum(), -c.mean()),
    "cpo": lambda c, r, *_: preference.cpo(c.sum(), r.sum(), -c.mean()),
    "orpo": lambda c, r, *_: preference.orpo(c.mean(), r.mean(), -c.mean()),
    "sft": lambda c, *_: preference.sft(-c.mean()),
}


def rows(seed: int) -> dict[str, list[Tensor]]:
    """log pi of each token of each completion, by side."""
    g = torch.Generator().manual_seed(seed)
    return {
        side: [-0.1 - torch.rand(n, generator=g, dtype=torch.float64) for n in lengths]
        for side, lengths in LENGTHS.items()
    }


@pytest.mark.parametrize("name", LOSSES)
def test_the_term_has_the_gradient_of_the_loss_pair_by_pair(name: str) -> None:
    choice, mine, reference = choose("preference", name), rows(1), rows(2)
    needed = {"chosen": mine["chosen"]} if name == "sft" else mine
    ref_logprobs = reference if "ref_chosen" in choice.loss.needs else {}
    loss, coefficients = linearise(choice, needed, ref_logprobs, WEIGHTS)
    leaves = [row.requires_grad_() for side in needed.values() for row in side]
    pairs = zip(*mine.values(), *reference.values(), strict=True)
    expected = WEIGHTS * torch.stack([LOSSES[name](*pair).loss for pair in pairs])
    assert_parity(loss.loss, expected, terms=16)
    for found, wanted in zip(coefficients, torch.autograd.grad(expected.mean(), leaves), strict=True):
        assert_parity(found, wanted, terms=64)
