"""The small example on which `explain` compares dialects, computed: two rollouts of three tokens.

The second rollout has an empty last position; the numbers are chosen so that clips, caps and masks
differ: ratios between 0.4 and 2.7, advantages of both signs.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_plugins.cli.recorded import Example, Numbers, code, column, digest, examples
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
DIGITS = 6  # of a number, so that it is the same on every machine


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
        return torch.tensor([LOGPROBS, SHIFTS[need]], dtype=torch.float64).sum(0).clamp(max=-0.05)
    shape = INPUTS[need].shape
    if shape == "[]":
        return torch.tensor(0.1, dtype=torch.float64)
    sizes = {TOKENS: (2, 3), VOCAB: (2, 3, VOCABULARY), TOP_K: (2, 3, K), PAIRS: (3,), ROWS: (6,)}
    generator = torch.Generator().manual_seed(sum(map(ord, need)))
    drawn = torch.randn(sizes.get(shape, (6, 2)), generator=generator, dtype=torch.float64)
    if need.endswith("_ids"):
        return drawn.argsort(-1)
    return torch.log_softmax(drawn, -1) - 0.1 if need.endswith("logprobs") else drawn


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


def computed(loss: Loss, dialects: Sequence[Dialect | None]) -> Example:
    """What the loss gives with its defaults (None) and in dialects."""
    results = {column(one): run(of_row(loss, loss.name, one)) for one in dialects}
    shown = {name: {what: numbers(x) for what, x in result.items()} for name, result in results.items()}
    given = {name: numbers(x) for name, x in tensors(loss).items() if isinstance(x, Tensor)}
    return Example(examples(loss), given, shown)


def numbers(x: Tensor) -> Numbers:
    """A tensor as JSON can hold it, with six digits: a number, or lists; "inf" and "nan" are strings."""
    if x.dim():
        return [numbers(one) for one in x]
    if not x.is_floating_point():
        return x.item()
    value = float(f"{x.item() + 0.0:.{DIGITS}g}")  # -0.0 + 0.0 is 0.0
    return value if math.isfinite(value) else str(value)


def record(losses: Iterable[Loss]) -> str:
    """The text of `recorded.json`, one to a line. A dialect with the row's numbers is left out."""
    found: dict[str, Any] = {"code": code()}
    for loss in losses:
        _, inputs, results = computed(loss, (None, *loss.dialects))
        found[f"{loss.kind} {loss.name}"] = {
            "row": digest(loss),
            "defaults": {name: x for name, x in loss.defaults.items() if x is not REQUIRED},
            "inputs": inputs,
            "results": {k: x for k, x in results.items() if k == "default" or x != results["default"]},
        }
    lines = [f"{json.dumps(name)}:{json.dumps(one, separators=(',', ':'))}" for name, one in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
