"""The launchers: the same tests on this machine, and with Modal's and the Hub's clients against servers here.

Nothing of a client is replaced but the address that it calls. See platforms.py for the servers.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import huggingface_hub
import modal
import pytest
from grpclib.const import Status
from modal.exception import AuthError

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.diloco import launching
from composer_plugins.recipes.diloco.launching import Container, Platform, Replica, run_replicas
from composer_plugins.recipes.diloco.on_hf_jobs import HuggingFaceJobs
from composer_plugins.recipes.diloco.on_modal import Modal
from composer_plugins.recipes.diloco.on_this_machine import ThisMachine
from composer_plugins.recipes.shared import INTERRUPTED
from parity_tests.recipes.diloco.platforms import SECONDS, WAITS, Machine, hub, modal_server

OPTIONS = Replica(0, 3, 20, 10, 0, 60.0, store="memory://a bucket/run1")
CONTAINER = Container(
    flavor="",
    install=("composer-plugins[diloco] @ file:///x", "s3fs"),
    secrets=("A_SECRET",),
    job_timeout=600,
)
REMOTE = ("modal", "modal with a GPU", "hf-jobs")  # Modal has another protocol for Sandboxes with GPUs


@dataclass
class Rig:
    """A platform and what it has done."""

    name: str
    machine: Machine
    connect: Callable[[], Platform]
    asked: list[Any]
    has_gpu: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)

    def launch(
        self, options: Replica = OPTIONS, report: Callable[[Any], None] | None = None
    ) -> list[int | None]:
        return run_replicas(options, self.connect(), report or self.lines.append)

    def started(self) -> list[str]:
        return [name for name, _ in self.machine.started()]


class Refusing(ThisMachine):
    """This machine, which does not start so many processes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def start(self, options: Replica) -> Any:
        if self.machine.is_refused():
            raise ConfigError("--on local", "the test refuses", "")
        return super().start(options)


@contextmanager
def rig_of(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Rig]:
    machine = Machine(folder)
    patch.setenv("A_SECRET", "v4lue of the secret")
    if name == "local":
        patch.setattr(sys, "executable", str(machine.python))
        yield Rig(name, machine, lambda: Refusing(machine), [])
    elif name.startswith("modal"):
        container = launching.replace(CONTAINER, flavor="T4" if name == "modal with a GPU" else "")
        with modal_server(machine) as server:
            patch.setenv("MODAL_SERVER_URL", server.url)
            patch.setenv("MODAL_TOKEN_ID", "ak-of-the-test")
            patch.setenv("MODAL_TOKEN_SECRET", "as-of-the-test")
            machine.refusal = Status.RESOURCE_EXHAUSTED
            try:
                yield Rig("modal", machine, lambda: Modal(container), server.asked, bool(container.flavor))
            finally:
                with suppress(
                    AuthError
                ):  # the next test has another server, and this one may have had no token
                    modal.Client.from_env().close()
    else:
        with hub(machine) as (url, asked):
            # Read from HF_ENDPOINT and HF_HUB_OFFLINE when the package is imported.
            patch.setattr(huggingface_hub.constants, "ENDPOINT", url)
            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
            patch.setenv("HF_TOKEN", "hf_token_of_the_test")
            machine.refusal = 402
            container = launching.replace(CONTAINER, flavor="l4x1")
            yield Rig(name, machine, lambda: HuggingFaceJobs(container), asked)


@pytest.fixture(params=["local", *REMOTE])
def rig(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rig_of(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(params=REMOTE)
def remote(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rig_of(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def hub_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rig_of("hf-jobs", tmp_path, monkeypatch) as found:
        yield found


def test_each_replica_is_started_with_its_command(rig: Rig) -> None:
    assert rig.launch() == [0, 0, 0]
    started = rig.machine.started()
    assert [name for name, _ in started] == ["0-0", "1-0", "2-0"]
    for number, (_, one) in enumerate(started):
        expected = launching.replace(OPTIONS, replica=number).command("python")
        assert one["arguments"] == expected[1:] and "--store=memory://a bucket/run1" in expected
    rounds = sorted(line["replica"] for line in rig.lines if line.get("round") == 1)
    output = sorted(line["replica"] for line in rig.lines if line.get("output") == "a line that is not JSON")
    assert rounds == output == [0, 1, 2] and len(rig.lines) == 6


def test_a_replica_that_fails_once_is_started_again(rig: Rig) -> None:
    rig.machine.plan({1: [1, 0]})
    assert rig.launch() == [0, 0, 0]
    assert rig.started() == ["0-0", "1-0", "1-1", "2-0"]
    again = {"replica": 1, "exit_status": 1, "next": "it is started again"}
    assert [line for line in rig.lines if "exit_status" in line] == [again]


def test_all_are_stopped_when_a_replica_fails_twice(rig: Rig) -> None:
    """The one that failed has a status, and not another one that was started again."""
    rig.machine.plan({0: [1, WAITS], 1: [1, 1], 2: [WAITS]})
    assert rig.launch() == [None, 1, None] and not rig.machine.alive()
    said = [line["next"] for line in rig.lines if "exit_status" in line]
    assert set(said) == {"it is started again", launching.STOPPING} and said[-1] == launching.STOPPING
    assert set(rig.started()) >= {"0-0", "1-0", "1-1", "2-0"}


def test_without_a_store_a_failure_is_the_only_one(rig: Rig) -> None:
    """Over torchft the others train on."""
    rig.machine.plan({1: [1]})
    assert rig.launch(launching.replace(OPTIONS, store="")) == [0, 1, 0]
    assert rig.started() == ["0-0", "1-0", "2-0"]


@pytest.mark.parametrize("refused_start", [2, 4])
def test_a_refusal_leaves_nothing_running(rig: Rig, refused_start: int) -> None:
    """Of the second replica, or of the one that failed and is started again."""
    rig.machine.plan({0: [WAITS], 1: [1], 2: [WAITS]})
    rig.machine.refuse_from = refused_start
    with pytest.raises(ConfigError, match=f"^--on {rig.name}: .*the test refuses"):
        rig.launch()
    assert rig.started() and not rig.machine.alive()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_ctrl_c_kill_and_a_closed_terminal_stop_all(number: signal.Signals, rig: Rig) -> None:
    rig.machine.plan({number: [WAITS] for number in range(3)})

    def interrupt(line: dict[str, Any]) -> None:
        if "round" in line:
            signal.raise_signal(number)

    before = [signal.getsignal(one) for one in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        rig.launch(report=interrupt)
    assert rig.started() and not rig.machine.alive()
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_what_nohup_ignores_stays_ignored(hub_rig: Rig) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert hub_rig.launch(report=lambda _: signal.raise_signal(signal.SIGHUP)) == [0, 0, 0]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_during_a_start_stops_what_was_started(remote: Rig) -> None:
    remote.machine.plan({0: [WAITS]})
    remote.machine.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        remote.launch()
    assert not remote.machine.alive() and [job.poll() for job in remote.machine.jobs.values()] == [-9]


def test_a_second_ctrl_c_lets_the_launcher_stop_all(remote: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.machine.plan({number: [WAITS] for number in range(3)})
    kill = remote.machine.kill

    def interrupt(line: dict[str, Any]) -> None:
        remote.lines.append(line)
        if "round" in line:
            signal.raise_signal(signal.SIGINT)

    def interrupt_and_kill(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # the client still waits for the answer
        kill(name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remote.machine, "kill", interrupt_and_kill)
        remote.launch(report=interrupt)
    assert remote.started() and not remote.machine.alive()
    assert remote.lines[-1] == {"next": launching.STOPPING}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_whose_start_is_not_answered_may_run(hub_rig: Rig) -> None:
    hub_rig.machine.faults["start"] = 504
    said = (
        "a replica may be running: look at https://huggingface.co/settings/jobs and stop it, then start the"
    )
    with pytest.raises(ConfigError, match=f"^--on hf-jobs: .*; {said} same command again"):
        hub_rig.launch()


def test_a_start_that_two_ctrl_c_interrupt_may_have_begun(remote: Rig) -> None:
    remote.machine.plan({0: [WAITS]})
    remote.machine.interrupts = 2
    with pytest.raises(ConfigError, match=f"^--on {remote.name}: Keyb.*a replica may be running: look at"):
        remote.launch()


def test_what_cannot_be_stopped_is_named_and_the_others_are_stopped(remote: Rig) -> None:
    remote.machine.plan({0: [WAITS], 1: [1, 1], 2: [WAITS]})
    remote.machine.faults["stop"] = 500 if remote.name == "hf-jobs" else Status.PERMISSION_DENIED
    said = r"^replicas: replica 0 \(.*the test refuses.*\) could not be stopped; stop it on the platform's"
    with pytest.raises(DataError, match=said):
        remote.launch()
    assert remote.machine.alive() == ["0-0"]


def test_a_failed_stop_does_not_hide_the_first_error(remote: Rig) -> None:
    remote.machine.plan({number: [WAITS] * 2 for number in range(3)})
    remote.machine.refuse_from = 2
    remote.machine.faults["stop"] = 500 if remote.name == "hf-jobs" else Status.PERMISSION_DENIED
    with pytest.raises(DataError, match="^replicas: replica 0 .*could not be stopped") as found:
        remote.launch()
    assert f"\n--on {remote.name}: " in str(found.value)

    def report(_: object) -> None:
        raise OSError("the disk is full")

    remote.machine.refuse_from = sys.maxsize
    remote.machine.faults["stop"] = 500 if remote.name == "hf-jobs" else Status.PERMISSION_DENIED
    with pytest.raises(DataError, match="could not be stopped.*\nreplicas: OSError: the disk is full; start"):
        remote.launch(report=report)


def test_the_network_may_fail_while_a_job_trains(hub_rig: Rig) -> None:
    """The rest of its output is lost, and not its exit status."""
    hub_rig.machine.faults.update(logs=404, status=503)
    assert hub_rig.launch() == [0, 0, 0]
    assert any("the rest of the output cannot be read" in line.get("output", "") for line in hub_rig.lines)
    assert not hub_rig.machine.faults


def test_what_is_sent_for_a_replica(remote: Rig) -> None:
    """Secrets are sent as secrets only. What has spaces stays one argument."""
    remote.launch()
    assert remote.machine.installed() == [["install", "--quiet", *CONTAINER.install]] * 3
    for _, one in remote.machine.started():
        assert (
            one["environment"]["A_SECRET"] == "v4lue of the secret"
            and "MODAL_TOKEN_ID" not in one["environment"]
        )
    if remote.name == "hf-jobs":
        for spec in remote.asked:
            assert spec.pop("secrets") == {"A_SECRET": "v4lue of the secret"} and "v4lue" not in str(spec)
            assert (spec["dockerImage"], spec["flavor"], spec["timeoutSeconds"]) == (
                "python:3.12",
                "l4x1",
                600,
            )
            assert spec["environment"] == {}
        return
    images, sandboxes = (
        [one for one in remote.asked if hasattr(one, name)] for name in ("image", "definition")
    )
    assert images[0].image.dockerfile_commands[0] == "FROM python:3.12" and len(sandboxes) == 3
    for sandbox in (one.definition for one in sandboxes):
        assert "v4lue" not in str(sandbox) and sandbox.timeout_secs == 600
        assert (sandbox.resources.milli_cpu, sandbox.resources.memory_mb) == (2000, 4096)
        assert sandbox.resources.gpu_config.gpu_type == ("T4" if remote.has_gpu else "")


@pytest.mark.parametrize(
    ("platform", "refusal", "said"),
    [
        ("hf-jobs", 401, "run hf auth login, or set HF_TOKEN"),
        ("hf-jobs", 402, "buy credits at https://huggingface.co/settings/billing"),
        ("hf-jobs", 400, "start the same command again later: it goes on with the rounds in the store"),
        ("hf-jobs", 500, "a replica may be running: look at https://huggingface.co/settings/jobs"),
        ("modal", Status.UNAUTHENTICATED, "run modal token new, or set MODAL_TOKEN_ID"),
        ("modal", Status.RESOURCE_EXHAUSTED, "look at the workspace's limits and billing on modal.com"),
        (
            "modal",
            Status.INTERNAL,
            "a replica may be running: look at https://modal.com/apps and stop it, then",
        ),
    ],
)
def test_a_refusal_says_what_to_do(
    platform: str, refusal: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(platform, tmp_path, monkeypatch) as rig:
        rig.machine.refuse_from, rig.machine.refusal = 1, refusal
        with pytest.raises(ConfigError, match=f"^--on {platform}: .*; {said}"):
            rig.launch()
        assert not rig.started()


@pytest.mark.parametrize("is_absent", [True, False])
@pytest.mark.parametrize("platform", ["modal", "hf-jobs"])
def test_no_token_or_a_wrong_one_is_an_error(
    platform: str, is_absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(platform, tmp_path, monkeypatch) as rig:
        name = "HF_TOKEN" if platform == "hf-jobs" else "MODAL_TOKEN_SECRET"
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv(name, "" if is_absent else "wrong")
        with pytest.raises(ConfigError, match=f"^--on {platform}: .*(HF_TOKEN|MODAL_TOKEN_ID)") as found:
            rig.connect()
        assert str(found.value).count("modal token new") == (platform == "modal")


def test_without_the_hub_or_with_a_token_that_is_not_ascii_is_an_error(
    hub_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match="^--on hf-jobs: OfflineMode.*; run unset HF_HUB_OFFLINE$"):
            hub_rig.connect()
    monkeypatch.setenv("HF_TOKEN", "hf_t\xf6ken")
    said = "^--on hf-jobs: the token of Hugging Face has a character that is not ASCII; run hf auth login"
    with pytest.raises(ConfigError, match=said) as found:
        hub_rig.connect()
    assert "\xf6" not in str(found.value)


def test_a_status_that_is_refused_is_an_error(hub_rig: Rig) -> None:
    hub_rig.machine.plan({0: [WAITS], 1: [WAITS], 2: [WAITS]})
    hub_rig.machine.faults.update(logs=404, status=403)
    with pytest.raises(ConfigError, match="^--on hf-jobs: .*the test refuses; run hf auth login"):
        hub_rig.launch()
    assert not hub_rig.machine.alive() and hub_rig.machine.jobs
    assert {job.poll() for job in hub_rig.machine.jobs.values()} == {-signal.SIGKILL}


def test_a_secret_that_is_not_set_is_an_error(remote: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.connect()
    monkeypatch.setenv("A_SECRET", " ")
    with pytest.raises(ConfigError, match="^--secret: A_SECRET is blank in the environment; run export A_S"):
        remote.connect()
    monkeypatch.delenv("A_SECRET")
    with pytest.raises(ConfigError, match="^--secret: A_SECRET is not set in the environment; run export A_"):
        remote.connect()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_command_launches_and_ctrl_c_stops_it(is_interrupted: bool, remote: Rig) -> None:
    """As a user starts it, with the addresses and tokens in the environment."""
    remote.machine.plan({number: [WAITS if is_interrupted else 0] for number in range(3)})
    flags = f"--on {remote.name} --replicas 3 --steps 10 --store memory://x --install y --secret A_SECRET"
    flags += " --flavor T4" if remote.has_gpu else ""
    arguments = [sys.executable, "-m", "composer_plugins.recipes.diloco", *flags.split()]
    environment = {**os.environ, "HF_ENDPOINT": huggingface_hub.constants.ENDPOINT, "HF_HUB_OFFLINE": ""}
    program = Popen(arguments, stdout=PIPE, stderr=PIPE, text=True, env=environment)
    if is_interrupted:
        rounds = 0
        while rounds < 3:
            rounds += "round 1" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
    output, errors = program.communicate(timeout=SECONDS)
    assert "Traceback (" not in errors and remote.started() == ["0-0", "1-0", "2-0"]
    if is_interrupted:
        assert program.returncode == INTERRUPTED and not remote.machine.alive()
    else:
        assert program.returncode == 0, errors
        assert output.endswith("the weights of all replicas were equal after each of the 1 rounds\n")


def test_the_flavor_of_the_readme_is_known() -> None:
    assert {"cpu-upgrade", "l4x1"} < {one.value for one in huggingface_hub.JobHardware}
