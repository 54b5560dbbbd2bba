"""All claims about slime, for a checkout of it."""

from collections.abc import Iterator
from pathlib import Path

from composer_plugins.conformance.claims import Absent
from composer_plugins.conformance.running import Suite
from composer_plugins.conformance.stubs import commit_of

KNOWN = ("624b824",)
COMPARED = {"policy_loss_function", "loss_function"}
NOT_COMPARED = {
    "value_loss_function": "of a critic",
    "sft_loss_function": "the cross-entropy of given tokens",
}
UNKNOWN = "this version of composer-plugins does not know it"


def suite(source: Path) -> Suite:
    """The claims, and which losses the checkout has."""
    from composer_plugins.conformance.slime_claims import claims, upstream

    loaded = upstream.load(source.resolve())

    def absent() -> Iterator[Absent]:
        for name in sorted({one for one in vars(loaded.loss) if one.endswith("loss_function")} - COMPARED):
            yield Absent(name, NOT_COMPARED.get(name, UNKNOWN), missing=name not in NOT_COMPARED)

    return Suite(commit_of(source), KNOWN, claims.claims(loaded), lambda _: True, absent)
