"""What every test shares: Hypothesis' profiles, one thread, and which files need TRL."""

import os
from importlib.util import find_spec

import torch
from hypothesis import settings

# No deadline: the first call into torch outlasts Hypothesis' 200 ms, and a slower second machine
# would make a test flaky. CI draws the same examples each time, and prints how to repeat one.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# The tensors here are tiny: a second thread costs more than it saves, and sums in another order.
torch.set_num_threads(1)

# Nothing here reaches a hub. TRL warns of rollout_func, with which the tests script their rollouts.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

TRL_IS_MISSING = find_spec("trl") is None
collect_ignore_glob = ["test_trl_*.py"] if TRL_IS_MISSING else []


def pytest_report_header() -> str:
    """Say which tests this environment cannot run."""
    if TRL_IS_MISSING:
        return "trl: not installed, so test_trl_*.py are not collected (nox -s trl runs them)"
    return "trl: installed, so test_trl_*.py are collected"
