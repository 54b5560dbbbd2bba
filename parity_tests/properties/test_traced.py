"""Every kernel under torch.compile (one graph), on fake tensors, and every policy loss under torch.fx.

One process per kind of loss, because jaxtyping's checks are on in this one: see `traced.py`.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from composer_plugins.catalogue import Loss
from parity_tests.support.make_inputs import row_id, rows
from parity_tests.support.paths import ROOT


@cache
def reports(kind: str) -> dict[str, dict[str, str]]:
    """What failed, by row."""
    done = subprocess.run(
        [sys.executable, "-m", "parity_tests.support.traced", kind],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["row"]: line["failures"] for line in lines}


@pytest.mark.parametrize("row", rows(), ids=row_id)
def test_kernel_compiles_in_one_graph_and_never_waits_for_a_number(row: Loss) -> None:
    failures = reports(row.kind)[row.name]
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
