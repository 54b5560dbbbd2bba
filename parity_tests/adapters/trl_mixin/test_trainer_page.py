"""The test of a whole trainer that docs/checking_a_loss.md shows: it finds a wrong division."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trl import GRPOTrainer

from parity_tests.rigs.faulty_trainers import MeanOfTheMicroBatch
from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "docs/checking_a_loss.md").read_text()


def snippet(name: str) -> str:
    return PAGE.partition(f"```python\n# {name}\n")[2].partition("```")[0]


@pytest.mark.parametrize(("base", "passes"), [(GRPOTrainer, True), (MeanOfTheMicroBatch, False)])
def test_the_test_of_the_page_finds_a_mean_of_the_micro_batch(
    base: type[GRPOTrainer], passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_trainer", module := ModuleType("my_trainer"))
    exec(snippet("my_trainer.py"), vars(module))
    monkeypatch.setattr(module, "MyTrainer", base)
    names: dict[str, Any] = {"__name__": "test_my_trainer"}
    exec(snippet("test_my_trainer.py"), names)
    if passes:
        names["test_micro_batches_leave_the_gradient_alone"](4)
    else:
        with pytest.raises(AssertionError):
            names["test_micro_batches_leave_the_gradient_alone"](4)
