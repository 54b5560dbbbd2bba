"""Every kernel under torch.compile (one graph), on fake tensors, and every policy loss under torch.fx.

They run in another process, because jaxtyping's checks are on in this one: see `traced.py`.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from composer_plugins.catalogue import Loss
from parity_tests.support.every import row_id, rows
from parity_tests.support.paths import ROOT


@cache
def reports() -> dict[str, dict[str, str]]:
    """The failures of every row, by its id."""
    done = subprocess.run(
        [sys.executable, "-m", "parity_tests.support.traced"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["row"]: line["failures"] for line in lines}


@pytest.mark.parametrize("row", rows(), ids=row_id)
def test_kernel_compiles_in_one_graph_and_never_waits_for_a_number(row: Loss) -> None:
    failures = reports()[row_id(row)]
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
