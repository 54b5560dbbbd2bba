"""The recipe over HTTP: the first numbers of its README, and rewards that rise."""

import re
import subprocess
import sys

import pytest

from parity_tests.rigs.paths import ROOT

pytestmark = pytest.mark.slow

FIRST_REWARD, FIRST_LOSS = 0.1172, -1.292318


def test_three_channels_over_http_raise_the_reward() -> None:
    command = [sys.executable, "-m", "composer_plugins.recipes.tinker"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = re.findall(r"step (\d+): reward ([\d.]+), loss (-?[\d.]+)", done.stdout)
    rewards = [float(reward) for _, reward, _ in steps]
    assert rewards[0] == FIRST_REWARD
    # The model is trained before, and two processors left losses that differ by 1.3e-4.
    assert float(steps[0][2]) == pytest.approx(FIRST_LOSS, rel=1e-3)
    assert sum(rewards[-5:]) / 5 > 2 * rewards[0]
