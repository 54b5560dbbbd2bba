"""The own loss of docs/writing_a_loss.md, REINFORCE with a KL to the reference, and its formula by hand."""

import re
import sys
from pathlib import Path

import pytest
from torch import Tensor

from parity_tests.rigs.paths import ROOT

NAME, BETA = "my_losses:reinforce_kl", 0.1


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `my_losses.py` as the page has it, and let Python import it."""
    page = (ROOT / "docs" / "writing_a_loss.md").read_text()
    (code,) = re.findall(r"```python\n(# my_losses.py\n(?:(?!```).)*def reinforce_kl.*?)```", page, re.DOTALL)
    (folder / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)


def by_hand(logprobs: Tensor, reference: Tensor, advantages: Tensor, beta: float = BETA) -> Tensor:
    """-A log pi + beta (r - log r - 1) of each token, with r = pi_ref / pi."""
    log_r = reference - logprobs
    return -advantages * logprobs + beta * (log_r.exp() - log_r - 1)
