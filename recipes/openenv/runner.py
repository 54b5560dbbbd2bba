"""The program that runs in the sandbox: it calls functions of a module and reports what they return.

`sandbox.py` passes its text to `python -c`, so it imports the standard library only. It reads a job as JSON
from standard input, and writes one line of JSON per call to standard output. What the code prints is dropped.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Set the limits, give up root, execute the module, and make the calls."""
    job = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    for name, limit in job["limits"].items():
        later = limit + 1 if name == "RLIMIT_CPU" else limit  # SIGXCPU at the first, SIGKILL at the second
        resource.setrlimit(getattr(resource, name), (limit, later))
    report.write(json.dumps({"index": -1}) + "\n")  # sandbox.STARTED
    report.flush()
    names: dict[str, object] = {"__name__": "submission"}
    problem = None
    try:
        exec(compile(job["source"], "<submission>", "exec"), names)
    except BaseException as error:  # SystemExit too
        problem = describe(error)
    for index, (function, arguments) in enumerate(job["calls"]):
        outcome = {"index": index, "error": problem} if problem else call(names, function, arguments, index)
        report.write(json.dumps(outcome) + "\n")
        report.flush()
    os._exit(0)  # without waiting for the threads of the code


def call(names: dict, function: str, arguments: list, index: int) -> dict:
    """The outcome of one call: its value, or an error."""
    try:
        value = names[function](*arguments)
        json.dumps(value)
    except KeyError as error:
        missing = function not in names
        return {"index": index, "error": f"{function} is not defined" if missing else describe(error)}
    except BaseException as error:
        return {"index": index, "error": describe(error)}
    return {"index": index, "value": value}


def describe(error: BaseException) -> str:
    """The type and the first line of the message of an exception."""
    try:
        text = str(error).splitlines()[0]
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
