"""The one small example on which `explain` compares dialects: two rollouts of three tokens.

The second rollout has an empty last position; the numbers are chosen so that clips, caps and masks
differ: ratios between 0.4 and 2.7, advantages of both signs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.losses.calling import check_not_written, check_result, versions
from composer_plugins.losses.choosing import Choice, of_row
from composer_plugins.losses.inputs import INPUTS, PAIRS, ROWS, TOKENS, TOP_K, VOCAB
from composer_plugins.losses.row import REQUIRED, Dialect, Loss

LOGPROBS = [[-0.4, -1.2, -2.0], [-0.9, -0.1, -3.0]]
MASK = [[True, True, True], [True, True, False]]
# The difference of another policy's log-probabilities from `logprobs`, in nats.
SHIFTS = {
    "old_logprobs": [[-0.05, 0.3, -1.0], [0.9, -0.15, 0.0]],
    "rollout_logprobs": [[-0.1, 0.2, -0.9], [0.8, -0.2, 0.0]],
    "ref_logprobs": [[-0.5, 0.1, 0.4], [0.2, -0.6, 0.0]],
    "region_logprobs": [[-0.05, 0.3, -1.0], [0.9, -0.15, 0.0]],
    "teacher_logprobs": [[0.3, -0.8, 0.6], [0.1, -0.4, 0.0]],
}
GIVEN: dict[str, Any] = {
    "logprobs": LOGPROBS,
    "student_logprobs": LOGPROBS,
    "mask": MASK,
    "advantages": [[1.0], [-0.5]],
    "entropies": [[0.6, 1.1, 1.4], [0.9, 0.3, 0.0]],
    "token_loss": [[0.4, -0.2, 0.3], [0.5, 0.1, 0.0]],
    "token_rewards": [[0.0, 0.0, 1.0], [0.0, 0.2, 0.0]],
    "group_ids": [0, 0, 0, 1, 1, 2],
    "rewards": [1.0, 0.0, 0.2, 0.7, 0.7, 0.4],
    "lengths": [5.0, 9.0, 4.0, 7.0, 3.0, 6.0],
    "baselines": [0.5, 0.3],
    "reference_rewards": [[1.0, 0.0], [0.0, 0.0], [0.2, 0.4], [0.7, 0.7], [1.0, 0.4], [0.0, 0.4]],
    "sum_pi_squared": [[0.5, 0.3, 0.2], [0.91, 0.65, 0.2]],
    "chosen": [-4.0, -2.5, -6.0],
    "rejected": [-5.0, -2.0, -6.5],
    "ref_chosen": [-4.5, -2.2, -5.0],
    "ref_rejected": [-4.6, -2.4, -6.0],
    "chosen_nll": [0.8, 0.5, 1.2],
    "gold_nll": [0.7, 0.6, 1.0],
    "scores": [-4.0, -2.5, -6.0, -3.0, -5.0, -2.0],
    "ref_scores": [-4.5, -2.2, -5.0, -3.5, -4.0, -2.4],
    "desirable": [True, False, True, True, False, False],
    "reference_kl": 0.3,
}
VOCABULARY, K = 5, 3
# Positions of the example that are shown, [*batch, tokens]: the last is masked, and always 0.
SHOWN_TOKENS: list[tuple[int, ...]] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]

Results = dict[str, dict[str, Tensor]]  # by the name of a column ("default", "@trl"), then "loss", "gradient"


def tensors(loss: Loss) -> dict[str, Any]:
    """An input for each that the loss needs, in float64; raises KeyError for one that has no example."""
    return {need: _tensor(need, loss) for need in loss.needs}


def _tensor(need: str, loss: Loss) -> Any:
    if need == "generator":
        return torch.Generator().manual_seed(0)
    if need == "mask" and loss.kind == "advantage" and "token_rewards" not in loss.needs:
        return torch.ones(len(GIVEN["rewards"]), dtype=torch.bool)
    if need == "group_ids" and loss.kind == "aggregation":
        return torch.tensor([0, 1])
    if need == "group_ids" and "token_rewards" in loss.needs:
        return torch.tensor([0, 0])
    if need in GIVEN:
        values = torch.tensor(GIVEN[need])
        return values.double() if values.dtype.is_floating_point else values
    if need in SHIFTS:
        shifted = torch.tensor(LOGPROBS, dtype=torch.float64) + torch.tensor(
            SHIFTS[need], dtype=torch.float64
        )
        return shifted.clamp(max=-0.05)
    shape = INPUTS[need].shape
    if shape == "[]":
        return torch.tensor(0.1, dtype=torch.float64)
    size = {TOKENS: (2, 3), VOCAB: (2, 3, VOCABULARY), TOP_K: (2, 3, K), PAIRS: (3,), ROWS: (6,)}.get(
        shape, (6, 2)
    )
    drawn = torch.randn(
        size, generator=torch.Generator().manual_seed(sum(map(ord, need))), dtype=torch.float64
    )
    if need.endswith("_ids"):
        return drawn.argsort(-1)
    return torch.log_softmax(drawn, -1) - 0.1 if need.endswith("logprobs") else drawn


def examples(loss: Loss) -> dict[str, Any]:
    """A value for each parameter that has no default."""
    required = {n: loss.parameters[n].example for n, default in loss.defaults.items() if default is REQUIRED}
    for name, value in required.items():
        if value is None:
            raise ValueError(f"{name} has neither a default nor an example: Parameter(..., example=1)")
    return required


def fault(loss: Loss, error: BaseException) -> str:
    """What an exception of `run` says of the kernel; a wrong result in the words of `check_result`."""
    if isinstance(error, ConfigError):
        return f"{loss.kind} {loss.name!r}: {error.problem}; {error.remedy}"
    what = f"{loss.kind} {loss.name!r}: its kernel {loss.path} fails on the worked example"
    return f"{what}: {in_a_line(error)}"


def wrong_result(loss: Loss) -> str | None:
    """What is wrong with what a kernel returns; None if nothing is, or if it cannot be called here."""
    try:
        run(of_row(loss, loss.name))
    except (ConfigError, SystemExit) as error:  # an exit would end every `list`
        return fault(loss, error)
    except Exception:  # it may need a GPU, or an input that has no example: `explain` and `check` say so
        return None
    return None


def run(choice: Choice) -> dict[str, Tensor]:
    """The loss (or value) on the example, and the gradient of its sum with respect to its first input.

    Over a vocabulary the gradient's norm is given. A top_k beyond the example's vocabulary is cut to it.
    Raises ConfigError for a result of the wrong type or shape, and for a kernel that writes to its inputs.
    """
    loss, given = choice.loss, tensors(choice.loss)
    first = given[loss.needs[0]]
    if first.dtype.is_floating_point:
        first.requires_grad_()
    before = versions(given)
    result = loss.kernel()(*given.values(), **_keywords(choice))
    check_result(choice, given, result)
    check_not_written(choice, given, before)
    value = getattr(result, "loss", result)
    if not isinstance(value, Tensor):
        raise TypeError(f"it returned {value!r}; it should return a tensor or a TokenLoss")
    shown = {"loss" if hasattr(result, "loss") else "value": value.detach()}
    if value.requires_grad:
        gradient = torch.autograd.grad(value.sum(), first)[0]
        over_vocabulary = INPUTS[loss.needs[0]].shape == VOCAB
        shown |= {"|gradient|": gradient.norm(dim=-1)} if over_vocabulary else {"gradient": gradient}
    return shown


def _keywords(choice: Choice) -> dict[str, Any]:
    loss, dialect = choice.loss, choice.dialect
    counts = {"rows": 2, "width": 3}
    params = examples(loss) | {**choice.params}
    if dialect:
        params |= {name: counts[fact] for name, fact in dialect.denominators.items()}
        params |= {name: _tensor(name, loss) for name in dialect.optional}
    if top_k := params.get("top_k", loss.defaults.get("top_k")):
        params["top_k"] = min(top_k, VOCABULARY)
    if "generator" in loss.optional:
        params["generator"] = _tensor("generator", loss)
    return params


def results_of(loss: Loss, dialects: Sequence[Dialect]) -> Results:
    """What the loss gives with its defaults and in each dialect."""
    return {f"@{d.upstream}" if d else "default": run(of_row(loss, loss.name, d)) for d in (None, *dialects)}


def given_to(loss: Loss, result: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The example's inputs: those with more axes than the result, and those that stand beside it."""
    axes = next(iter(result.values())).dim()
    flat = {name: x for name, x in tensors(loss).items() if isinstance(x, Tensor) and x.dim() <= 2}
    above = {name: x for name, x in flat.items() if x.dim() > axes and (name != "mask" or not axes)}
    return above, {name: x for name, x in flat.items() if x.dim() <= axes and name != "mask"}


def as_data(loss: Loss, results: Results) -> dict[str, Any]:
    """The example as JSON can hold it: every input and result whole."""
    given = {name: number(x) for name, x in tensors(loss).items() if isinstance(x, Tensor)}
    shown = {name: {kind: number(x) for kind, x in result.items()} for name, result in results.items()}
    return {"parameters": examples(loss), "inputs": given, "results": shown}


def number(x: Tensor) -> Any:
    """A tensor as JSON can hold it: a number, or lists of them; "inf" and "nan" are strings."""
    if x.dim():
        return [number(one) for one in x]
    value = x.item() + 0.0 if x.is_floating_point() else x.item()  # -0.0 + 0.0 is 0.0
    return value if math.isfinite(value) else str(value)


def positions_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The positions of a result that are shown."""
    if not shape:
        return [()]
    return [(i,) for i in range(shape[0])] if len(shape) == 1 else SHOWN_TOKENS


def label_of(position: tuple[int, ...]) -> str:
    """A position in words."""
    return ("", "row {}", "rollout {} token {}")[len(position)].format(*position)


def at(x: Tensor, position: tuple[int, ...]) -> Tensor:
    """One number of a tensor that broadcasts against the positions."""
    return x[tuple(min(i, n - 1) for i, n in zip(position[len(position) - x.dim() :], x.shape, strict=True))]


def written(x: Tensor) -> str:
    """A tensor's numbers, as the page writes them."""
    if x.dim():
        return f"[{', '.join(map(written, x))}]"
    return f"{x.item() + 0.0:.4g}"  # -0.0 + 0.0 is 0.0
