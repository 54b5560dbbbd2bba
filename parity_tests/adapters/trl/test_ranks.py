"""Two processes on gloo, against one: the same rows give the same gradient, channel by channel."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from parity_tests.support import tiny
from parity_tests.support.paths import ROOT
from parity_tests.support.two_ranks import CHANNELS, first_gradients

LOSS_TYPES = [
    "dapo",
    "grpo",
    "dr_grpo",
]  # bnpo's mean over a rank's own tokens depends on the cut, in TRL too


def test_two_ranks_give_the_gradient_of_one(tmp_path: Path) -> None:
    """One launch for all, since starting two processes is most of the work."""
    found = tmp_path / "gradients.pt"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    # --multi_gpu is the launcher that starts torch.distributed; use_cpu in the config makes it gloo.
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += [
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
        "-m",
        "parity_tests.support.two_ranks",
        str(found),
        *LOSS_TYPES,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    two = torch.load(found)
    assert two["ranks"] == 2
    for loss_type in LOSS_TYPES:
        one = first_gradients(loss_type, ranks=1)
        for channel in CHANNELS:
            difference = tiny.relative_difference(one[channel], two["gradients"][loss_type][channel])
            assert difference <= 1e-6, f"{loss_type}, {channel}: {difference}"
