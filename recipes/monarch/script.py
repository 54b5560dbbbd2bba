"""Run a script as `python script.py` or `python -m module` would, in a process of Monarch.

SPMDActor runs `hosted` with -m, which calls `run`. SPMDActor alone would abort at SystemExit, also if the
status is 0, and it does not put the folder of the script on sys.path.
"""

import os
import runpy
import sys
import traceback

RUNPY = "<frozen runpy>"  # the file of runpy's frames

failures: list[str] = []  # of this process: a traceback, or what the script said when it exited


def run(kind: str, name: str, *arguments: str) -> None:
    """Run the module or the file of this name as __main__."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    sys.argv = [name, *arguments]
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(name))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as exit:
        if exit.code is None or exit.code == 0:
            return
        failures.append(exit.code if isinstance(exit.code, str) else f"it ended with exit status {exit.code}")
    except BaseException as error:
        failures.append(traceback_of(error))
    if failures:
        raise RuntimeError(failures[-1])  # the script's own may not be picklable, or abort the actor


def traceback_of(error: BaseException) -> str:
    """The traceback from the script on, without the frames that ran it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, RUNPY):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()
