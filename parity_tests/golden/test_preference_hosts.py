"""Preference losses against AReaL as recorded: value and gradient, by catalogue row."""

import torch

from composer_plugins.conformance import reductions
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim

ROWS = {"sigmoid": "dpo@areal", "ipo": "ipo@areal"}


@claim("areal_preference")
def test_dpo_and_ipo_equal_areal(case: Case) -> None:
    """Scores are sums over the completion, and averages for IPO; AReaL computes the loss in float32."""
    name = ROWS[case["loss_type"]]
    policy = golden.tensor(case["policy_logps"]).requires_grad_()
    ref, lengths = golden.tensor(case["ref_logps"]), golden.tensor(case["lengths"])
    divisor = lengths if choose("preference", name).average else torch.ones_like(lengths)
    (chosen, rejected), (ref_chosen, ref_rejected) = (policy / divisor).unbind(1), (ref / divisor).unbind(1)
    pair = reductions.kernel("preference", name)(chosen, rejected, ref_chosen, ref_rejected, **case["kwargs"])
    (gradient,) = torch.autograd.grad(pair.loss.sum(), policy)
    largest = float((1 / (2 * case["kwargs"]["beta"])) ** 2)
    for ours, recorded, what in (
        (pair.loss, case["loss"], "value"),
        (gradient, case["grad_policy_logps"], "gradient"),
    ):
        wanted = golden.tensor(recorded)
        assert_parity(ours, wanted, terms=4, dtype=torch.float32, magnitude=largest, what=what)
