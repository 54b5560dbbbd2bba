"""What the tests here share: a checkout's own loss, and modules for the interpreter that the doctor asks."""

import os
from pathlib import Path

import pytest

from composer_plugins.conformance.prime_rl_claims.upstream import Upstream, load
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_checkout import checkout


@pytest.fixture(scope="session")
def upstream() -> Upstream:
    """PRIME-RL's own loss, from the checkout."""
    return load(checkout())


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of every interpreter that is asked."""
    folder = tmp_path / "modules"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "mod.py").write_text(
        "print('noise')\nclass Loss:\n    def step(inputs): ...\ndef loss_fn(inputs): ...\nnumber = 3\n"
    )
    (folder / "pkg" / "broken.py").write_text("import not_there_at_all")
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), str(ROOT), old])))
    return folder
