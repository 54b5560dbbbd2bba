"""Tests that compile with C++."""

import shutil

import pytest
import torch

# Torch's compiler takes no blank and no quote in the path of torch itself.
needs_cpp = pytest.mark.skipif(
    shutil.which("g++") is None or not {*" '"}.isdisjoint(torch.__file__),
    reason="torch.compile needs g++ on a CPU, and torch in a path without a blank or a quote",
)
