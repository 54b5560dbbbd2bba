"""Whether a policy loss is proportional to the advantages, for a framework that divides them in its place.

Such a framework divides the advantages by the denominator, and adds up what a loss returns. Of a loss with
x_t(c A) = c x_t(A) the sum is then the mean. A term without the advantages would not be divided.
"""

import torch

from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.choosing import Choice

FACTOR = 2.0**-10  # a power of two: multiplying by it rounds nothing
SPREADS = (0.1, 1.0, 4.0)  # nats between the policies: within every clip, about at it, and beyond
ROUNDING = 1e-9


def is_proportional(choice: Choice) -> bool:
    """Whether this loss of c A is c times that of A, on drawn batches; True for a loss that fails on them."""
    g = torch.Generator().manual_seed(0)
    for spread in SPREADS:
        logprobs, old, rollout = (-5 * torch.rand(6, 8, generator=g, dtype=torch.float64) for _ in range(3))
        logprobs, old = logprobs * 1.0, logprobs + spread * (old - logprobs) / 5
        rollout = logprobs + spread * (rollout - logprobs) / 5
        advantages = torch.randn(6, 1, generator=g, dtype=torch.float64).expand(6, 8)
        tensors = {"logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": rollout}
        tensors["mask"] = torch.ones(6, 8, dtype=torch.bool)
        try:
            whole, part = (
                call_unchecked(choice, tensors | {"advantages": advantages * factor}).loss
                for factor in (1.0, FACTOR)
            )
        except Exception:  # of a user's own loss, which the first batch shows
            return True
        if not torch.allclose(whole * FACTOR, part, rtol=ROUNDING, atol=0.0):
            return False
    return True
