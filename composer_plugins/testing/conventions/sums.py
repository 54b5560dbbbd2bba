"""The conventions of SkyRL and Tinker, which add up what a loss function returns.

Read in skyrl 0.3.0 (`skyrl/backends/skyrl_train/utils/ppo_utils.py` and `workers/worker.py`) and in tinker
0.38.0 (`tinker/lib/public_interfaces/training_client.py`). Neither is imported.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair
from composer_plugins.errors import did_you_mean, near
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.skyrl import ALGORITHM, CONFIG
from composer_plugins.frameworks.skyrl import SKYRL as TABLE


def is_number(value: Any) -> bool:
    """Whether it is a Python number, which a framework can divide and add up."""
    return isinstance(value, int | float)


class Algorithm(SimpleNamespace):
    """The check's AlgorithmConfig of SkyRL, or a table of it; another key is an error that says so."""

    def put(self, key: str, value: Any) -> None:
        """Set an option by its key, "cispo.cispo_anchor"."""
        first, _, rest = key.partition(".")
        if rest:
            vars(self).setdefault(first, Algorithm()).put(rest, value)
        elif isinstance(value, dict):
            for name, one in value.items():
                self.put(f"{first}.{name}", one)
        else:
            setattr(self, first, value)

    def __getattr__(self, name: str) -> Any:
        known = f"it has {', '.join(vars(self))}"
        hint = did_you_mean(nearest) if (nearest := near(name, vars(self))) else known
        raise AttributeError(f"the check's config of SkyRL has no {name!r}: {hint}")


def scaled(advantages: Tensor, mask: Tensor, counts: Counts, reduction: str) -> Tensor:
    """SkyRL's advantages: divided so that a sum over the batch is the reduction that the user has set."""
    if reduction == "token_mean":
        return advantages / counts.tokens
    if reduction == "sequence_mean":
        return advantages / (counts.rows * mask.sum(-1, keepdim=True).clamp(min=1))
    return advantages / (counts.rows * counts.width)


def algorithm(own: Mapping[str, Any]) -> Algorithm:
    """SkyRL's AlgorithmConfig with its defaults, and with these options over them."""
    config = Algorithm()
    stem = f"{ALGORITHM}."
    options = {one.key: one.default for one in TABLE.options if one.key.startswith(stem)}
    for key, value in ({key.removeprefix(stem): value for key, value in options.items()} | CONFIG).items():
        config.put(key, value)
    for key, value in own.items():
        config.put(key.removeprefix(stem), value)
    return config


def call_skyrl(
    function: Function,
    tensors: Mapping[str, Tensor],
    counts: Counts,
    options: Mapping[str, Any],
    *,
    own: Mapping[str, Any] = NOTHING,
) -> Called:
    """Call it as the policy worker does, with advantages that hold the denominator."""
    mask, reduction = tensors["mask"], options["loss_reduction"]
    config = algorithm({"max_seq_len": counts.width, **own, "loss_reduction": reduction})
    result = function(
        tensors["logprobs"],
        tensors["old_logprobs"],
        scaled(tensors["advantages"], mask, counts, reduction),
        config=config,
        loss_mask=mask.long(),
        rollout_logprobs=tensors.get("rollout_logprobs"),
    )
    loss, problems = checked_pair(result, is_number, "a number")
    return Called(loss, problems)


SKYRL = Convention(
    framework="skyrl",
    signature="fn(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None)",
    returns="(loss, metrics): the sum over the unmasked tokens, with a gradient, and a dict of Python "
    "numbers. The advantages hold the denominator already",
    call=call_skyrl,
    has_config=True,
    optional=("rollout_logprobs",),
    options={"loss_reduction": ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")},
    names={"logprobs": "log_probs", "old_logprobs": "old_log_probs", "mask": "loss_mask"},
)


def tensor_data(x: Tensor) -> SimpleNamespace:
    """One entry of a datum's `loss_fn_inputs`, read as Tinker's TensorData is."""
    return SimpleNamespace(data=x.tolist(), shape=[*x.shape], to_torch=lambda: x, tolist=x.tolist)


def call_tinker(
    function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call it as `forward_backward_custom` does: with a datum and the log-probabilities of each sequence.

    The mask is in `loss_fn_inputs` as "mask" and as "weights", the advantages hold the denominator.
    """
    mask, advantages = tensors["mask"], tensors["advantages"] / counts.tokens
    data = []
    for row, unmasked in enumerate(mask):
        weights = unmasked.to(advantages.dtype)
        fields = {
            "target_tokens": unmasked.long(),
            "logprobs": tensors["rollout_logprobs"][row],
            "advantages": advantages[row],
            "mask": weights,
            "weights": weights,
        }
        entries = {name: tensor_data(x) for name, x in fields.items()}
        data.append(SimpleNamespace(model_input=None, loss_fn_inputs=entries))
    loss, problems = checked_pair(function(data, list(tensors["logprobs"])), is_number, "a number")
    return Called(loss, problems)


TINKER = Convention(
    framework="tinker",
    signature="fn(data, logprobs_list)",
    returns="(loss, metrics): one number with a gradient in every sequence's log-probabilities, a sum over "
    "the tokens, and a dict of Python numbers. Tinker adds up the gradients of all calls",
    call=call_tinker,
    needs=("logprobs", "rollout_logprobs", "advantages", "mask"),
    names={"logprobs": "logprobs_list", "rollout_logprobs": "logprobs in loss_fn_inputs"},
)
