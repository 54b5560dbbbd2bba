"""Tables of the documentation that a command prints."""

import os
import subprocess
import sys

from composer_plugins.conformance.stubs import source
from docs.generator.written import ROOT, wheel_of_trl


def conform(framework: str) -> str:
    """What `composer-plugins conform --markdown` prints for a framework."""
    checkout = source(framework)
    given = ("--source", str(checkout)) if checkout else ()
    return _printed("composer_plugins", "conform", framework, "--markdown", *given)


def migrated(*options: str) -> str:
    """What docs/generator/migrated.py prints, in a process that has verl and TRL."""
    return _printed("docs.generator.migrated", *options, PYTHONPATH=f"{wheel_of_trl()}{os.pathsep}{ROOT}")


def _printed(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout.strip()
