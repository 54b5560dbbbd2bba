"""Whether a policy loss is proportional to the advantages, for a framework that divides them in its place.

Such a framework divides the advantages by the denominator, and adds up what a loss returns. Of a loss with
x_t(c A) = c x_t(A) the sum is then the mean. A term without the advantages would not be divided.
"""

import torch

from composer_plugins.losses.by_token import drawn
from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.choosing import Choice

FACTOR = 2.0**-10  # a power of two: multiplying by it rounds nothing
ROUNDING = 1e-9


def is_proportional(choice: Choice) -> bool:
    """Whether this loss of c A is c times the loss of A, on a drawn batch; True for a loss that fails on it.

    A loss that takes no advantages is not, because it is the same for each c.
    """
    tensors = drawn(choice)
    divided = {name: x * FACTOR if name == "advantages" else x for name, x in tensors.items()}
    try:
        whole, part = (call_unchecked(choice, given).loss for given in (tensors, divided))
    except Exception:  # of a user's own loss, which the first batch shows
        return True
    return torch.allclose(whole * FACTOR, part, rtol=ROUNDING, atol=0.0)
