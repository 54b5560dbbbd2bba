"""What the tests of several recipes share."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from composer_plugins.recipes.smollm.model import Loaded


@pytest.fixture(scope="module")
def smollm() -> "Loaded":
    """The model of the wheel."""
    from composer_plugins.recipes.smollm.model import load  # not every recipe has its packages

    return load(None, "cpu")


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The log of each step that `tiny.train` has made so far."""
    from composer_plugins.recipes import tiny

    run, made = tiny.train, list[dict[str, float]]()

    def recorded(*args: Any, **options: Any) -> list[dict[str, float]]:
        made.extend(found := run(*args, **options))
        return found

    monkeypatch.setattr(tiny, "train", recorded)
    return made
