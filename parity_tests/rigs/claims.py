"""The claims that `composer-plugins conform` runs, as tests on cases that Hypothesis draws and shrinks."""

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, reject, settings

from composer_plugins.conformance.claims import VALUE, Claim
from composer_plugins.testing.draws import Refused, Seeded
from composer_plugins.testing.strategies import ByHypothesis

NAMED: list[Claim] = []  # by a test that was collected


def proves(
    claims: Iterable[Claim], *names: str, theirs: str = "", examples: int = 40
) -> Callable[[Any], Any]:
    """Parametrize a test by the claims about these losses of ours (all, without a name), on drawn `data`.

    `theirs` is what their name at the upstream begins with.
    """
    found = [
        claim for claim in claims if (claim.ours in names or not names) and claim.theirs.startswith(theirs)
    ]
    missing = {*names} - {claim.ours for claim in found}
    assert found and not missing, f"no claim about {missing or theirs}"
    NAMED.extend(found)

    def decorate(test: Any) -> Any:
        drawn = settings(max_examples=examples)(given(data=st.data())(test))
        return pytest.mark.parametrize("claim", found, ids=str)(drawn)

    return decorate


def check(claim: Claim, data: st.DataObject) -> None:
    """Draw a case, and assert that everything compared of it is equal within rounding."""
    __tracebackhide__ = True
    try:
        for one in claim.compare(ByHypothesis(data.draw)):
            one.check()
    except Refused:
        reject()


def could_fail(claim: Claim, what: str = VALUE) -> bool:
    """Whether a difference of a thousandth would be noticed in any of forty cases."""
    for seed in range(40):
        try:
            found = [one for one in claim.compare(Seeded(seed)) if one.what == what]
        except Refused:
            continue
        for one in found:
            changed = one._replace(ours=one.theirs * 1.001)
            if changed.error.found > changed.error.allowed:
                return True
    return False
