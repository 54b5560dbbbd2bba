"""slime and Miles: any policy loss of the catalogue, with a hint channel, by `--custom-loss-function-path`.

    loss_type: custom_loss
    custom_loss_function_path: composer_plugins.adapters.slime_loss.loss_fn
    composer:
      policy: cispo
      policy_params: {clip_high: 4.0}

is a file for `--custom-config-path`. The user's page is docs/slime.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def loss_fn(
    args: Any, batch: Any, logits: "Tensor", sum_of_sample_mean: Any
) -> "tuple[Tensor, dict[str, Tensor]]":
    """The loss of one micro-batch and its metrics, as slime and Miles reduce them: see `loss.SlimeLoss`."""
    from composer_plugins.adapters.slime_loss.loss import loss_of

    return loss_of(args)(args, batch, logits, sum_of_sample_mean)
