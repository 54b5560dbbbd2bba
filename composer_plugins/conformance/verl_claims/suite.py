"""All claims about verl, for the installed version."""

import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version

from composer_plugins.conformance.claims import Absent, Claim, Place
from composer_plugins.conformance.running import Suite
from composer_plugins.frameworks.verl import VERL

BY_KL = "no kernel: a row or token is left out by an estimate of the KL, not by its weight"
NO_KERNEL = {
    ("rollout corrections", f"{level}_{k}"): BY_KL
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in ("k2", "k3")
}
UNKNOWN = "this version of composer-plugins does not know it"


def suite() -> Suite:
    """The claims, and which losses the installed verl has registered."""
    logging.disable(logging.WARNING)  # verl logs that there is no accelerator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of each engine that is not installed
            from composer_plugins.conformance.verl_claims import (
                advantages,
                distillation,
                policy,
                reduction,
                token_advantages,
                upstream,
            )
    finally:
        logging.disable(logging.NOTSET)
    modules = (policy, advantages, token_advantages, reduction, distillation)
    claims: list[Claim] = [claim for module in modules for claim in module.CLAIMS]
    registered = upstream.registered()

    def is_there(place: Place) -> bool:
        names = registered.get(place.where)  # of what verl has no registry for, a claim fails if it is gone
        return names is None or "name" not in place.options or place.options["name"] in names

    def absent() -> Iterator[Absent]:
        compared = {(claim.place.where, claim.place.options.get("name")) for claim in claims}
        for registry, names in registered.items():
            for name in sorted(names):
                if (registry, name) not in compared:
                    reason = NO_KERNEL.get((registry, name), UNKNOWN)
                    yield Absent(name, reason.removeprefix("no kernel: "), missing=True)

    return Suite(version("verl"), (VERL.release,), claims, is_there, absent)
