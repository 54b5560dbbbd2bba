"""The rows of the catalogue, as cases of a test."""

from typing import Any

import pytest

from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss


def rows(*kinds: Kind) -> list[Loss]:
    """The rows of the catalogue of these kinds, or all rows."""
    return [loss for loss in losses() if not kinds or loss.kind in kinds]


def row_id(row: Loss) -> str:
    """The test id of a row: "policy-grpo"."""
    return f"{row.kind}-{row.name}"


def each(*kinds: Kind) -> Any:
    """Parametrize a test by `row`, over every row of these kinds."""
    return pytest.mark.parametrize("row", rows(*kinds), ids=row_id)
