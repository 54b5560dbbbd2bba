"""A promise that every row of a kind keeps, in every setting, but for the rows it names with a reason.

An exception that is no longer needed fails: the row must break the promise.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.catalogue import Kind, Loss
from parity_tests.support.make_inputs import Batch, Setting, floats, row_id, rows, settings

Check = Callable[[Setting], None]
Exceptions = Mapping[str, str]  # "policy-kl_cov": "the reason"


def each(*kinds: Kind) -> Any:
    """Run a test, as `row`, on every row of these kinds."""
    return pytest.mark.parametrize("row", rows(*kinds), ids=row_id)


def holds(row: Loss, check: Check, exceptions: Exceptions | None = None) -> None:
    """Run `check` on every setting of a row, but for the settings and rows that `exceptions` names.

    A setting that is named ("advantage-grpo(scale='batch')") must fail, of a row one setting at least.
    """
    __tracebackhide__ = True
    named = set(exceptions or ())
    broken: dict[str, Exception] = {}
    for setting in settings(row):
        try:
            check(setting)
        except Exception as error:
            broken[f"{row.kind}-{setting.label}"] = error
    if row_id(row) in named:  # the label of the first setting too: so the row as a whole
        assert broken, f"{row_id(row)} keeps this promise: drop it from the exceptions"
        return
    kept = {f"{row.kind}-{setting.label}" for setting in settings(row)} & named - set(broken)
    assert not kept, f"{', '.join(sorted(kept))}: this promise is kept, drop the exception"
    unexpected = {label: error for label, error in broken.items() if label not in named}
    if unexpected:
        lines = [f"{label}: {type(e).__name__}: {str(e)[:900]}" for label, e in unexpected.items()]
        raise AssertionError("\n".join(lines)) from next(iter(unexpected.values()))


def stale(exceptions: Iterable[Exceptions]) -> set[str]:
    """The names that no row and no setting has."""
    known = {f"{row.kind}-{setting.label}" for row in rows() for setting in settings(row)}
    return {name for each in exceptions for name in each} - known


def trainable(setting: Setting, batch: Batch) -> Batch:
    """The batch, with a gradient asked of every input that is trained."""
    names = setting.trained
    return {n: x.detach().clone().requires_grad_() if n in names else x for n, x in batch.items()}


def value_and_gradients(
    setting: Setting, batch: Batch, weight: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the row gives, and the gradients of its sum, or of its sum weighted by `weight`."""
    batch = trainable(setting, batch)
    result = setting.result(batch)
    total = (result if weight is None else torch.where(result == 0, 0.0, weight) * result).sum()
    wanted = {name: batch[name] for name in setting.trained}
    if not wanted or not total.requires_grad:
        return result, {}
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True)
    return result.detach(), dict(zip(wanted, found, strict=True))


def attached(batch: Batch) -> Batch:
    """The batch, with a gradient asked of every float."""
    return batch | {n: x.detach().clone().requires_grad_() for n, x in floats(batch).items()}
