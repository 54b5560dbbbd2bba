"""Every kernel under torch.compile (one graph), on fake tensors, and every policy loss under torch.fx.

They run in another process, because jaxtyping's checks are on in this one: see `traced.py`.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from composer_plugins.catalogue import Loss
from parity_tests.support.every import row_id, rows
from parity_tests.support.paths import ROOT

# The fast set compiles one kind alone, because each kernel takes a second or more.
IN_THE_FAST_SET = ("divergence",)
ROWS = [
    pytest.param(row, id=row_id(row), marks=() if row.kind in IN_THE_FAST_SET else pytest.mark.slow)
    for row in rows()
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    """The failures of every row that is to be tested, by its id: one process for all of them."""
    asked = [
        item.callspec.id for item in request.session.items if getattr(item, "module", None) is request.module
    ]
    done = subprocess.run(
        [sys.executable, "-m", "parity_tests.support.traced", *asked],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["row"]: line["failures"] for line in lines}


@pytest.mark.parametrize("row", ROWS)
def test_kernel_compiles_in_one_graph_and_never_waits_for_a_number(
    row: Loss, reports: dict[str, dict[str, str]]
) -> None:
    failures = reports[row_id(row)]
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
