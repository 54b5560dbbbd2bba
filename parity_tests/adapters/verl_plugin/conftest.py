"""What the tests of verl's trainers share: which of them can run here, the trainer, and its TransferQueue."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.recipes.verl.on_a_cpu import missing

# Tests that import verl's v1 trainer or start its workers. Those with the fixture `trained` skip themselves.
OF_THE_TRAINER = "channels driver hint_of_logits mistakes sessions top_k trainer update worker"
collect_ignore = [f"test_{name}.py" for name in OF_THE_TRAINER.split()] if missing() else []


def pytest_report_header() -> str:
    """Say which tests this environment cannot run."""
    return f"verl's trainer: {missing()}; not collected: {OF_THE_TRAINER}" if missing() else ""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its data."""
    from composer_plugins.recipes.verl.on_a_cpu import tiny

    made = tmp_path_factory.mktemp("tiny")
    tiny.make(made)
    return made


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """A function that makes composer_sync's trainer: `verl_trainer.trainer_of` without its folders."""
    from parity_tests.rigs.verl_trainer import trainer_of

    return partial(trainer_of, folder, tmp_path)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A TransferQueue of this process, in place of verl's."""
    from parity_tests.rigs.verl_queue import Queue

    made = Queue()
    for module in ("hint", "replay", "scoring", "batch_layout", "trainer", "health"):
        name = f"composer_plugins.adapters.verl_plugin.sync_trainer.{module}.transfer_queue"
        monkeypatch.setattr(name, made)
    return made
