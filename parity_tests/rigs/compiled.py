"""Tests that compile with C++: torch's compiler takes no blank or quote in the path of torch itself."""

from pathlib import Path

import pytest
import torch

from parity_tests.rigs.programs import python


def ran_by_a_link(request: pytest.FixtureRequest, folder: Path) -> bool:
    """Where torch's path has a blank or a quote: run this test again with a link to torch in `folder`.

    True if it was run so, and has passed; the caller has then nothing left to do.
    """
    if not {*" '"} & {*torch.__file__}:
        return False
    (folder / "site").symlink_to(Path(torch.__file__).parents[1])
    done = python("-m", "pytest", "-q", request.node.nodeid, first=folder / "site")
    assert "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    return True
