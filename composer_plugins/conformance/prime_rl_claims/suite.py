"""All claims about PRIME-RL, for a checkout of it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from composer_plugins.conformance.claims import Absent
from composer_plugins.conformance.running import Suite
from composer_plugins.errors import ConfigError

KNOWN = ("v0.8.0", "559b447")

RECORDED = "compared with recorded numbers (parity_tests/golden)"
NOT_COMPARED = {
    "ce_loss_fn": f"the cross-entropy of given tokens; {RECORDED}",
    "ref_kl_loss_fn": f"the loss of samples with a reference; {RECORDED}",
}
COMPARED = {"default_loss_fn", "ipo_loss_fn"}
UNKNOWN = "this version of composer-plugins does not know it"


def suite(source: Path) -> Suite:
    """The claims, and which losses the checkout has."""
    if not (source / "src" / "prime_rl").is_dir():
        problem = f"{source} is not a checkout of PRIME-RL: it has no src/prime_rl"
        raise ConfigError("--source", problem, "git clone https://github.com/PrimeIntellect-ai/prime-rl")
    from composer_plugins.conformance.prime_rl_claims import claims, upstream

    loaded = upstream.load(source.resolve())

    def absent() -> Iterator[Absent]:
        for name in sorted(upstream.loss_functions(loaded) - COMPARED):
            yield Absent(name, NOT_COMPARED.get(name, UNKNOWN), missing=name not in NOT_COMPARED)

    return Suite(version_of(source), KNOWN, claims.claims(loaded), lambda _: True, absent)


def version_of(source: Path) -> str:
    """The tag or the commit of a checkout."""
    names = list[str]()
    for command in (("tag", "--points-at", "HEAD"), ("rev-parse", "--short=7", "HEAD")):
        if (source / ".git").exists():
            done = subprocess.run(["git", "-C", source, *command], capture_output=True, text=True)
            names += done.stdout.split()
    known = [name for name in names if name in KNOWN]
    return next(iter([*known, *names]), "without git")
