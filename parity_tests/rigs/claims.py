"""The claims that `composer-plugins conform` runs, as tests on cases that Hypothesis draws and shrinks."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, reject, settings

from composer_plugins.conformance.claims import VALUE, Claim
from composer_plugins.frameworks.contract import Framework, Sets
from composer_plugins.losses.row import Kind
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.draws import Draw, Refused
from composer_plugins.testing.strategies import ByHypothesis
from parity_tests.rigs.commands import invoke


def proves(claims: Iterable[Claim], *, examples: int = 40) -> Callable[[Any], Any]:
    """Parametrize a test by these claims, on drawn `data`."""

    def decorate(test: Any) -> Any:
        drawn = settings(max_examples=examples)(given(data=st.data())(test))
        return pytest.mark.parametrize("claim", claims, ids=str)(drawn)

    return decorate


def check(claim: Claim, data: st.DataObject) -> None:
    """Draw a case, and assert that everything compared of it is equal within rounding."""
    __tracebackhide__ = True
    try:
        for one in claim.compare(ByHypothesis(data.draw)):
            assert_parity(**{name: x for name, x in one._asdict().items() if name != "scale"})
    except Refused:
        reject()


def could_fail(claim: Claim, what: str = VALUE) -> bool:
    """Whether a difference of a thousandth would be noticed in any of forty cases."""
    for seed in range(40):
        try:
            found = [one for one in claim.compare(Draw(seed)) if one.what == what]
        except Refused:
            continue
        for one in found:
            changed = one._replace(ours=one.theirs * 1.001)
            if changed.error.found > changed.error.allowed:
                return True
    return False


def conform(framework: str, *losses: str) -> tuple[int, dict[str, str]]:
    """The status of `conform` for these losses, and the result by the upstream's name."""
    chosen = [word for loss in losses for word in ("--loss", loss)]
    done = invoke("conform", framework, *chosen, "--json")
    (found,) = json.loads(done.stdout)
    return done.exit_code, {row["upstream"]: row["status"] for row in found["rows"]}


def with_sets(framework: Framework, key: str, *wrong: Sets, kind: Kind = "policy") -> Framework:
    """The framework with another meaning of an option."""
    right = next(one for one in framework.options_of(kind) if one.key == key)
    assert right.sets != wrong
    changed = (replace(one, sets=wrong) if one is right else one for one in framework.options)
    return replace(framework, options=tuple(changed))


def with_loss(framework: Framework, options: dict[str, str], **wrong: Any) -> Framework:
    """The framework with another row, or another fixed mode, for the loss that these options choose."""
    (right,) = [one for one in framework.losses if one.options == options]
    assert right._replace(**wrong) != right
    changed = (one._replace(**wrong) if one is right else one for one in framework.losses)
    return replace(framework, losses=tuple(changed))


def with_denominator(framework: Framework, name: str, mode: str) -> Framework:
    """The framework with another denominator of one of its modes."""
    assert framework.denominators[name] != mode
    return replace(framework, denominators={**framework.denominators, name: mode})
