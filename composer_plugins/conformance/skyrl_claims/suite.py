"""All claims about SkyRL, for the installed version."""

from collections.abc import Iterator
from importlib.metadata import version

from composer_plugins.conformance.claims import Absent, Claim, Place
from composer_plugins.conformance.running import Suite
from composer_plugins.frameworks.skyrl import LIKELIHOOD, SKYRL

RUN = ("0.3.0", "0.4.0")  # with which the claims were run
NO_KERNEL = {
    ("policy losses", LIKELIHOOD): "it is a likelihood for supervised fine-tuning, without advantages"
}
UNKNOWN = "this version of composer-plugins does not know it"


def suite() -> Suite:
    """The claims, and which losses the installed SkyRL has registered."""
    from composer_plugins.adapters.skyrl_loss.upstream import release_of
    from composer_plugins.conformance.skyrl_claims import policy, rest, upstream

    claims: list[Claim] = [*policy.CLAIMS, *rest.CLAIMS]
    registered, release = upstream.registered(), release_of(None)

    def is_there(place: Place) -> bool:
        first, end = place.options.get("since"), place.options.get("until")
        order = SKYRL.releases.index
        if (first and order(release) < order(first)) or (end and order(release) >= order(end)):
            return False
        names = registered.get(place.where)
        return names is None or "name" not in place.options or place.options["name"] in names

    def absent() -> Iterator[Absent]:
        compared = {(claim.place.where, claim.place.options.get("name")) for claim in claims}
        for registry, names in registered.items():
            for name in sorted(names):
                if (registry, name) not in compared:
                    reason = NO_KERNEL.get((registry, name), UNKNOWN)
                    yield Absent(name, reason, missing=reason == UNKNOWN)

    return Suite(version("skyrl"), RUN, claims, is_there, absent)
