"""What a program writes into the pages: each part, the function that makes it, and what the function needs.

`make pages` writes all of them, and `python -m docs.generator` those that this environment can make.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
END = "<!-- end of table -->"
# A cell that is an error after rounding: it differs between machines.
ROUNDED = re.compile(r"(?<=\| )(?:0|\d\.\de[-+]\d\d)(?=[ ;])")

TRL, VERL = "TRL", "verl"
SKYRL, TORCHTITAN = "SkyRL", "torchtitan"
CHECKOUT = "a checkout of PRIME-RL: PRIME_RL_SOURCE=DIR .nox/prime_rl/bin/python -m docs.generator"
NEMO_RL = "a checkout of NeMo-RL: NEMO_RL_SOURCE=DIR .nox/kernels/bin/python -m docs.generator"
SLIME = "a checkout of slime: SLIME_SOURCE=DIR .nox/kernels/bin/python -m docs.generator"
VERSIONS = "every version of TRL: nox -s trl_versions -- --write"
RUNS = "real runs, which take minutes: python -m benchmarks.health trl --write, and verl"
IS_HERE: dict[str, Callable[[], bool]] = {
    "": lambda: True,
    TRL: lambda: find_spec("trl") is not None,
    VERL: lambda: find_spec("verl") is not None,
    CHECKOUT: lambda: bool(os.environ.get("PRIME_RL_SOURCE")),
    VERSIONS: lambda: False,
    RUNS: lambda: False,
    SKYRL: lambda: find_spec("skyrl") is not None,
    TORCHTITAN: lambda: find_spec("torchtitan") is not None,
    NEMO_RL: lambda: bool(os.environ.get("NEMO_RL_SOURCE")),
    SLIME: lambda: bool(os.environ.get("SLIME_SOURCE")),
}
# What no environment of `make pages` has.
NOT_BY_MAKE = (CHECKOUT, NEMO_RL, SLIME, TORCHTITAN, VERSIONS, RUNS)


class Part(NamedTuple):
    """A table of a page, between two marks that name it, or a whole file."""

    page: str
    table: str  # "": the whole file
    make: str  # "module:function" of this folder, called with `given`
    given: tuple[str, ...] = ()
    needs: str = ""
    is_rounded: bool = False

    def __str__(self) -> str:
        return f"{self.page}, {self.table}" if self.table else self.page

    def made(self) -> str:
        """What belongs on the page."""
        module, _, function = self.make.partition(":")
        text: str = getattr(import_module(f"docs.generator.{module}"), function)(*self.given)
        return text.rstrip() + "\n"

    def check(self) -> None:
        """Raise AssertionError unless the page has what is made now."""
        page = (ROOT / self.page).read_text()
        stale = f"{self} is out of date: run `make pages`, or `python -m docs.generator` here"
        assert self._same(page, self._filled(page)), stale

    def write(self) -> bool:
        """Write the part, and return whether anything but the last digits of an error has changed."""
        page = (ROOT / self.page).read_text()
        filled = self._filled(page)
        if changed := not self._same(page, filled):
            (ROOT / self.page).write_text(filled)
        return changed

    def _filled(self, page: str) -> str:
        made = self.made()
        if not self.table:
            return made
        start = f"<!-- table: {self.table} -->\n"
        before, found, rest = page.partition(start)
        _, end, after = rest.partition(END)
        assert found and end, f"{self.page} has no lines {start.strip()} and {END}"
        return f"{before}{start}{made}{END}{after}"

    def _same(self, page: str, filled: str) -> bool:
        texts = (ROUNDED.sub("N", text) if self.is_rounded else text for text in (page, filled))
        return len({*texts}) == 1


in_trl_options = partial(Part, "docs/trl_options.md")
FRAMEWORKS = (("trl", TRL), ("verl", VERL), ("prime-rl", CHECKOUT))
MORE = (("skyrl", SKYRL), ("nemo-rl", NEMO_RL), ("slime", SLIME), ("torchtitan", TORCHTITAN))

PARTS = (
    Part("composer_plugins/cli/recorded.json", "", "examples:recorded"),
    Part("docs/denominators.svg", "", "picture:draw"),
    Part("docs/get_started.ipynb", "", "notebook:made"),
    Part("docs/status.md", "last runs", "records:runs"),
    Part("docs/health.md", "rules", "health:rules"),
    *(Part("docs/health.md", f"seen in {name}", "health:seen", (name,), RUNS) for name in (TRL, VERL)),
    Part("docs/prime_rl.md", "options", "options:of_prime_rl"),
    Part("docs/verl.md", "options", "options:of_verl"),
    Part("docs/writing_a_loss.md", "inputs", "inputs:of_policy_losses"),
    in_trl_options("options", "options:ours_in_trl", needs=TRL),
    in_trl_options("options of TRL", "options:of_trl"),
    *(
        in_trl_options(f"{kind} {what}", f"options:{what}_of", (kind,))
        for kind in ("policy", "divergence", "preference")
        for what in ("losses", "parameters")
    ),
    in_trl_options("versions", "trl_support:versions", needs=VERSIONS),
    in_trl_options("composition", "trl_support:composition", needs=TRL),
    *(Part("docs/writing_a_loss.md", name, "findings:section", (name,), needs) for name, needs in FRAMEWORKS),
    *(Part("docs/parity.md", name, "printed:conform", (name,), needs, True) for name, needs in FRAMEWORKS),
    *(Part("docs/parity.md", name, "printed:conform", (name,), needs, True) for name, needs in MORE),
)


def part(page: str, table: str) -> Part:
    """The part of that page and name."""
    return next(one for one in PARTS if (one.page, one.table) == (page, table))
