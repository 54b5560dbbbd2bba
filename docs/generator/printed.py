"""Tables of the documentation that a command prints."""

import subprocess
import sys

from composer_plugins.conformance.stubs import source
from docs.generator.written import ROOT


def conform(framework: str) -> str:
    """What `composer-plugins conform --markdown` prints for a framework."""
    checkout = source(framework)
    given = ("--source", str(checkout)) if checkout else ()
    command = (sys.executable, "-m", "composer_plugins", "conform", framework, "--markdown", *given)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout.strip()
