"""A recorded session, three scripted teachers over HTTP, a parquet file, and TRL's training.

The same file in verl's training is in adapters/verl_plugin/test_trace_replay.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("detect_secrets", "openai", "pyarrow", "trl"):
    pytest.importorskip(needed)

MARGINS = "composer/replay/rewards/margins of 3 steps: "


@pytest.mark.slow
def test_the_demo_trains_on_what_the_teachers_agreed_on(tmp_path: Path) -> None:
    """As a stranger runs it; the margin of the first step is 0, because policy and reference are equal."""
    line = [sys.executable, "-m", "composer_plugins.recipes.trace_replay", "demo", "--steps", "3"]
    ran = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (shown,) = [one.removeprefix(MARGINS) for one in ran.stdout.splitlines() if one.startswith(MARGINS)]
    margins = [float(one) for one in shown.split()]
    assert margins[0] == 0 and margins == sorted(margins) and margins[-1] > 0.2
    assert "33 new answers, 0 from before" in ran.stdout and "5 pairs" in ran.stdout
    assert (tmp_path / "replay_demo/pairs.parquet").exists()
