"""Checkouts of NeMo-RL and slime, for the tests that need one."""

from pathlib import Path

import pytest

from composer_plugins.conformance.nemo_rl_claims import upstream as nemo_rl
from composer_plugins.conformance.slime_claims import upstream as slime

with_nemo_rl = pytest.mark.skipif(
    nemo_rl.source() is None,
    reason=f"no checkout of NeMo-RL: nox -s nemo_rl -- --source DIR (or {nemo_rl.SOURCE}=DIR)",
)
with_slime = pytest.mark.skipif(
    slime.source() is None,
    reason=f"no checkout of slime: nox -s slime -- --source DIR (or {slime.SOURCE}=DIR)",
)


def given(source: Path | None) -> Path:
    """The folder of a checkout, which a skipped test does not ask for."""
    assert source is not None
    return source.resolve()
