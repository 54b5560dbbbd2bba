"""How often a call runs each function of this package: counted by Python's profile hook."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import composer_plugins
from parity_tests.rigs.paths import ROOT

# As Python finds them, and by the links of the package.
FOLDERS = (Path(composer_plugins.__file__).parent, ROOT / "kernels", ROOT / "adapters")
OURS = tuple(f"{folder}{os.sep}" for folder in FOLDERS)


def qualified(frame: FrameType) -> str:
    """The name of the function that a frame runs, with its class."""
    return frame.f_code.co_qualname


def calls(function: Callable[[], Any], name: Callable[[FrameType], str] = qualified) -> Counter[str]:
    """How often each function of this package is called, or goes on as a generator.

    By `name` of its frame; a frame with the name "" is left out.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        is_ours = frame.f_code.co_filename.startswith(OURS)
        if event == "call" and is_ours and (one := name(frame)):
            found[one] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found
