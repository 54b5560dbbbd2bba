"""Whether the loss of a token depends on the other tokens of its row.

A framework that packs several sequences into a row, and does not say where each begins, cannot run such a
loss: GSPO would take the ratio of a row for the ratio of a sequence.
"""

import torch
from torch import Tensor

from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice

ROWS, TOKENS = 64, 6
# How far a row, and a token of it, is from the other policy, in nats: near, and beyond published thresholds.
SPREADS = (0.01, 0.3, 3.0)


def depends_on_its_row(choice: Choice) -> bool:
    """Whether a token has another loss in a row than alone, with the parameters of this choice.

    The loss is called with drawn rows and with each of their tokens as a row of its own. `choice.loss` needs
    log-probabilities per token, advantages and a mask only. Raises what the loss raises on a CPU, and
    ConfigError for a wrong result.
    """
    tensors = drawn(choice)
    whole = call(choice, tensors).loss.detach()
    alone = call(choice, {name: x.reshape(-1, 1) for name, x in tensors.items()}).loss.detach()
    return not torch.allclose(whole.reshape(-1, 1), alone, rtol=1e-9, atol=1e-12)


def drawn(choice: Choice) -> dict[str, Tensor]:
    """Rows [64, 6] for the inputs of a loss: log-probabilities at several distances, and advantages."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spread = torch.tensor(SPREADS, dtype=torch.float64).repeat(ROWS)[:ROWS].unsqueeze(-1)
    centre = -12 - normal(ROWS, TOKENS).abs()
    found: dict[str, Tensor] = {}
    for name in choice.loss.needs:
        if name == "mask":
            found[name] = torch.ones(ROWS, TOKENS, dtype=torch.bool)
        elif name == "advantages":
            differ = torch.arange(ROWS).unsqueeze(-1) % 2  # by token in every other row
            found[name] = normal(ROWS, 1) + differ * normal(ROWS, TOKENS)
        else:
            found[name] = (centre + spread * (normal(ROWS, 1) + normal(ROWS, TOKENS))).clamp(max=0)
    return found
