"""verl's real `python -m verl.trainer.main_ppo` on two cores: Ray, TransferQueue, FSDP2 over gloo.

`runner.py` starts it in a process of its own. Each of verl's processes imports `register.py`, which
VERL_USE_EXTERNAL_MODULES names, and which registers:

- a platform that is the CPU and the FSDP engine on it (`device.py`);
- a rollout engine, `model.generate` in a Ray actor, that draws the same tokens in every run (`rollout.py`).

Three touches are no registry's: verl names the process group "cpu:gloo,cpu:gloo" on a CPU, which torch
refuses; it pins a reference policy's memory for a GPU; and its table of rollout adapters has no function
to add to. TRL must not be installed beside verl 0.9.1, whose FSDP actor would import what TRL 1 no longer
has. No GPU, no download, verl as it stands.
"""

from importlib.util import find_spec

PLATFORM = "cpu_for_tests"
KEPT = "VERL_CPU_OUT"  # the environment variable with the folder for the parameters of each step
NEEDED = ("verl", "transfer_queue", "zmq", "msgspec", "cachetools", "fastapi", "uvicorn", "psutil")


def missing() -> str:
    """The reason why main_ppo cannot run in this environment; empty if it can."""
    if gone := [name for name in NEEDED if not find_spec(name)]:
        return f"no {', '.join(gone)}"
    return "trl is installed, with which verl's FSDP actor does not start" if find_spec("trl") else ""
