"""Every law of `composer_plugins.testing.laws` holds for every loss of the catalogue, in every setting."""

import json
from functools import cache, partial
from typing import Any

import pytest

from composer_plugins.losses.row import Kind, Loss
from composer_plugins.testing import parametrize_with_checks
from composer_plugins.testing.inputs import float_tensors, tensors
from composer_plugins.testing.laws import LAWS
from composer_plugins.testing.laws.traced import TRACED
from composer_plugins.testing.settings import settings
from parity_tests.rigs.every import each, row_id, rows
from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

LOSSES = [row for row in rows() if row.kind != "aggregation"]
TRACED_NAMES = [check.__name__ for check in TRACED]


@parametrize_with_checks(LOSSES, only=[name for name in LAWS if name not in TRACED_NAMES])
def test_the_loss_obeys_the_law(loss: Loss, check: Any) -> None:
    check(loss)


@cache
def traced(kind: Kind) -> dict[str, Any]:
    """The reports of the laws of tracing, in another process: jaxtyping's checks are on in this one."""
    names = [row.name for row in LOSSES if row.kind == kind]
    only = [f"--only={name}" for name in TRACED_NAMES if kind in LAWS[name].kinds]
    words = ("check", "--json", f"--kind={kind}", *only, *names)
    done = python("-m", "composer_plugins", *words, OMP_NUM_THREADS="1")
    assert done.returncode in (0, 1), done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return dict(zip(names, reports, strict=True))


slow = partial(pytest.param, marks=pytest.mark.slow)
# The fast set compiles one kind alone, because each kernel takes a second or more.
PARAMS = [(pytest.param if row.kind == "divergence" else slow)(row, id=row_id(row)) for row in LOSSES]


@pytest.mark.parametrize("row", PARAMS)
def test_kernel_compiles_in_one_graph_and_never_waits_for_a_number(row: Loss) -> None:
    report = traced(row.kind)[row.name]
    assert report["passed"], report
    assert any(one["status"] == "passed" for one in report["checks"])


@pytest.mark.usefixtures("annotation_checks")
@each("policy", "divergence", "kl", "correction", "preference", "advantage")
def test_integers_for_floats_and_masks_of_numbers_are_refused_where_types_are_checked(row: Loss) -> None:
    for setting in settings(row, thorough=False):
        batch = setting.draw()
        wrong = [(name, x.long()) for name, x in float_tensors(batch).items()]
        wrong += [(name, tensors(batch)[name].double()) for name in ("mask", "group_ids") if name in batch]
        if row.kind != "advantage" and "mask" in batch:
            wrong.append(("mask", batch["mask"].long()))
        for name, x in wrong:
            with pytest.raises(Exception, match="(?i)type-check|violates|beartype"):
                setting.result(batch | {name: x})
