"""Booleans on a device are read once the device has computed them."""

from typing import Any

import pytest
import torch

from composer_plugins.losses.flags import Flags


def test_flags_of_a_device_are_read_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        """A boolean on a device, which has computed it once `now` reaches a time."""

        is_cuda, waited, now = True, 0, 0

        def __init__(self, value: bool, ready: int) -> None:
            self.value, self.ready = value, ready

        def __bool__(self) -> bool:
            OnDevice.waited += OnDevice.now < self.ready
            return self.value

        def to(self, device: str, *, non_blocking: bool) -> "OnDevice":
            assert (device, non_blocking) == ("cpu", True)
            copied.append(self)
            return self

    class Event:
        def record(self) -> None:
            self.after = copied[-1].ready

        def query(self) -> bool:
            return OnDevice.now >= self.after

    copied = list[OnDevice]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    flags: Any = Flags()
    calls = ((False, 0), (False, 2), (True, 3), (False, 4), (False, 4), (True, 5), (False, 9))
    found = []
    for OnDevice.now, (value, ready) in enumerate(calls):
        found.append(flags.any(OnDevice(value, ready)))
    assert found == [False, False, False, True, False, True, False] and not OnDevice.waited
