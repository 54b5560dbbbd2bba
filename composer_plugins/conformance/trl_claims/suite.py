"""All claims about TRL, for the installed version."""

import os
from importlib.metadata import version

from composer_plugins.conformance.running import Suite
from composer_plugins.frameworks.trl import TRL


def suite() -> Suite:
    """The claims, and which losses the installed TRL has."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from composer_plugins.conformance.trl_claims import (
        advantages,
        distillation,
        divergences,
        names,
        policy,
        preference,
        preference_others,
    )

    modules = (policy, distillation, divergences, preference, preference_others, advantages)
    claims = [claim for module in modules for claim in module.CLAIMS]
    return Suite(version("trl"), (TRL.release,), claims, names.is_there, lambda: names.absent(claims))
