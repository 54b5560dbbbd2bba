"""Start the replicas, each as a process of its own, here on this machine.

A launcher for other machines needs the same three things: the command of each replica, the lines of JSON that
it prints, and its exit status. With --store, a replica that failed goes on when its command is started again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from composer_plugins.recipes.diloco import Replica


def command_of(options: Replica) -> list[str]:
    """Return the command line of one replica."""
    given = {name.replace("_", "-"): value for name, value in vars(options).items() if value != ""}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "composer_plugins.recipes.diloco", *flags]


def run_replicas(options: Replica, report: Callable[[dict[str, Any]], None]) -> list[int]:
    """Train all replicas, call `report` with each line that they print, and return their exit statuses."""
    output, ours = os.pipe()
    processes = []
    try:
        for number in range(options.replicas):
            processes.append(subprocess.Popen(command_of(replace(options, replica=number)), stdout=ours))
        os.close(ours)
        with open(output) as lines:
            for line in lines:
                report(json.loads(line))
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
