"""How often a call runs each function of this package: counted by Python's profile hook."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

OURS = ("/composer_plugins/", "/kernels/", "/adapters/")


def qualified(frame: FrameType) -> str:
    """The name of the function that a frame runs, with its class."""
    return frame.f_code.co_qualname


def calls(function: Callable[[], Any], name: Callable[[FrameType], str] = qualified) -> Counter[str]:
    """How often each function of this package is called, or goes on as a generator.

    By `name` of its frame; a frame with the name "" is left out.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        is_ours = any(part in path for part in OURS) and "parity_tests" not in path
        if event == "call" and is_ours and (one := name(frame)):
            found[one] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found
