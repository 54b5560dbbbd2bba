"""What the tests of the doctor share: an interpreter that is a double, and modules for one that is real."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin import doctor as prime_rl_doctor
from composer_plugins.adapters.prime_rl_plugin.store import StoreWriter
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream, load
from composer_plugins.diagnosis import Target
from composer_plugins.findings import Finding
from parity_tests.cases.prime_rl import facts
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_checkout import checkout


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """The findings in a file of this text; the interpreter is a double, unless `python` names one."""
    StoreWriter(tmp_path / "pairs.store").close()
    monkeypatch.chdir(tmp_path)

    def found(text: str, version: str | None = None, python: str = "", **answers: Any) -> list[Finding]:
        file = tmp_path / "rl.toml"
        file.write_text(text)
        with monkeypatch.context() as patch:
            if not python:
                patch.setattr(prime_rl_doctor, "ask", lambda *_: facts(**answers))
            return list(prime_rl_doctor.examine([file], Target(python or "python", version)).findings)

    return found


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
    (folder / "my_env.py").write_text("def finalize(): stamp_reference()\nx = {'ref_kl': 1}")
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), str(ROOT), old])))
    return folder
