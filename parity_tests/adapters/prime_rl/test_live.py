"""PRIME-RL itself, from a checkout: its losses equal ours behind its own `type = "custom"`."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from parity_tests.support import prime_rl_live
from parity_tests.support.assertions import assert_parity
from parity_tests.support.prime_rl_claims import OURS, claims, compared, drawn
from parity_tests.support.prime_rl_live import SOURCE, Upstream

pytestmark = pytest.mark.skipif(
    prime_rl_live.source() is None,
    reason=f"no checkout of PRIME-RL: nox -s prime_rl -- --source DIR (or {SOURCE}=DIR)",
)


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    checkout = prime_rl_live.source()
    assert checkout is not None
    return prime_rl_live.load(checkout)


def test_its_losses_equal_ours_behind_its_own_door(upstream: Upstream) -> None:
    found = list(claims(upstream))
    assert found

    @settings(max_examples=60)
    @given(seed=st.integers(0, 2**20), scale=st.integers(1, 500))
    def check(seed: int, scale: int) -> None:
        pack = drawn(upstream, seed)
        for claim in found:
            theirs, ours = compared(upstream, claim, pack, scale)
            largest = max(float(gradient.abs().max()) for gradient in theirs[1:])
            assert_parity(ours[0], theirs[0], terms=60, magnitude=max(60 * largest, 1e-3), what=claim.name)
            for i, (a, b) in enumerate(zip(ours[1:], theirs[1:], strict=True)):
                assert_parity(a, b, terms=60, what=f"{claim.name}, gradient {i}")

    check()


def test_an_unknown_key_of_ours_surfaces_through_its_door(upstream: Upstream) -> None:
    table = {"type": "custom", "import_path": OURS, "kwargs": {"polcy": "dppo_tv"}}
    with pytest.raises(ValueError, match="unknown option 'polcy': did you mean 'policy'"):
        upstream.compute_loss(drawn(upstream, 1), upstream.loss_fn(**table), 7)
