"""What is asked of each process while the script runs in it: an actor beside Monarch's SPMDActor."""

import os
import sys
import traceback

from monarch.actor import Actor, endpoint

from composer_plugins.recipes.monarch import script

RENDEZVOUS = "init_process_group"  # torch.distributed's function, in which a rank waits for all others


class Process(Actor):
    """Answers questions about its process, also while the script runs there."""

    @endpoint
    def prepare(self, log: str | None, keeps_records: bool) -> int:
        """Send the process's output to a file, and keep the records of trainers, if asked. Return its id."""
        if log is not None:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sys.stdout.flush()
            os.dup2(file, 1)
            os.dup2(file, 2)
        if keeps_records:
            from composer_plugins.recipes.monarch import records

            records.keep_those_of_trainers()
        return os.getpid()

    @endpoint
    def waits_at(self) -> str | None:
        """The file and line from which init_process_group was called and has not returned, if any."""
        for frame in sys._current_frames().values():
            stack = traceback.extract_stack(frame)
            for number, entry in enumerate(stack):
                if entry.name == RENDEZVOUS:
                    caller = next(one for one in reversed(stack[:number]) if one.name != "wrapper")
                    return f"{caller.filename}:{caller.lineno}"
        return None

    @endpoint
    def failure(self) -> str | None:
        """Why the script failed in this process; None if it did not."""
        return script.failures[-1] if script.failures else None

    @endpoint
    def record(self) -> tuple[int, list[float], str] | None:
        """The fields of records.Record, of the run that ended last in this process."""
        records = sys.modules.get("composer_plugins.recipes.monarch.records")
        return tuple(records.kept[-1]) if records is not None and records.kept else None
