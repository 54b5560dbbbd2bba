"""Run a module of these benchmarks where verl runs on a CPU, in a process that leaves none behind."""

import subprocess
import tempfile
from pathlib import Path

from composer_plugins.recipes.verl.on_a_cpu.runner import TIMEOUT, end, environment, prepared, short_paths


def run_module(
    module: str, *arguments: str, capture: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a module with a folder of the files that verl needs, and these arguments."""
    with tempfile.TemporaryDirectory() as made:
        token = prepared(Path(made))
        try:
            with short_paths() as (_, python):
                given = environment(Path(made), token) | variables
                given["PYTHONPATH"] += f":{Path.cwd()}"
                return subprocess.run(
                    [python, "-m", module, made, *arguments],
                    env=given,
                    timeout=TIMEOUT,
                    start_new_session=True,
                    capture_output=capture,
                    text=True,
                )
        finally:
            end(token, grace=10.0)
