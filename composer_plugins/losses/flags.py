"""Booleans that a loss computes on a device and reads later, so that it does not wait for the device."""

import torch
from torch import Tensor


class Flags:
    """Booleans on a GPU, which are looked at without waiting for it."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, torch.cuda.Event]] = []  # copied to the host once the event is there

    def read(self, flags: Tensor) -> list[Tensor]:
        """Return the flags of this and of earlier calls that the device has computed by now, on the host."""
        if not flags.is_cuda:
            return [flags]
        event = torch.cuda.Event()
        self.pending.append((flags.to("cpu", non_blocking=True), event))
        event.record()
        found = []
        while self.pending and self.pending[0][1].query():
            found.append(self.pending.pop(0)[0])
        return found

    def any(self, flag: Tensor) -> bool:
        """Whether one of the flags so far is true, of those that the GPU has computed by now."""
        return any([bool(one) for one in self.read(flag)])
