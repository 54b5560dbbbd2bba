"""The platforms of the tests: servers on loopback that speak Modal's and the Hub's protocols.

A container is a process here whose PATH begins with two scripts, `pip` and `python`. `python` writes down how
it was started, prints a round, and ends as the test has planned.
"""

import asyncio
import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpclib.server
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

WAITS = -1  # a planned status: the replica ends only when it is stopped
SECONDS = 60  # longer than any planned process needs

PYTHON = """#!/bin/sh
exec {python} "$0.py" "$@"
"""
PROGRAM = """
import json, os, sys, time
from pathlib import Path
folder = Path({folder!r})
flags = dict(one[2:].split("=", 1) for one in sys.argv if "=" in one)
number, replicas = flags["replica"], int(flags["replicas"])
attempt = len(list(folder.glob(f"replica-{{number}}-[0-9]")))
started = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}
path = folder / f"replica-{{number}}-{{attempt}}"
path.with_suffix(".partial").write_text(json.dumps(started))
path.with_suffix(".partial").rename(path)
print("a line that is not JSON", flush=True)
print(json.dumps({{"replica": int(number), "round": 1, "weights": "aa"}}), flush=True)
planned = json.loads((folder / "plan").read_text()).get(number, [0])[attempt]
ends = time.monotonic() + {seconds}
while planned > 0 and time.monotonic() < ends and len(list(folder.glob("replica-*-0"))) < replicas:
    time.sleep(0.02)  # nothing fails before all have begun
if planned == {waits}:
    time.sleep({seconds})  # a test that does not stop it must end too
sys.exit(planned)
"""
PIP = """#!/bin/bash
printf '%s\\n' "$@" > {folder}/pip-$$
"""


class Machine:
    """Runs what a platform is asked to run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "started", folder / "bin"
        self.python = self.bin / "python"
        self.jobs: dict[str, subprocess.Popen[str]] = {}
        self.refuse_from = sys.maxsize  # the number of the start, from 1, that is refused, and all after it
        self.refusal: Any = None  # the status of HTTP or gRPC
        self.interrupts = 0  # how often Ctrl-C comes when a job has begun and its start was not answered
        self.starts = 0
        self.faults: dict[
            str, Any
        ] = {}  # what fails once ("start", "stop", "logs", "status"), with a status of HTTP or gRPC
        for one in (self.folder, self.bin):
            one.mkdir()
        self.python.with_name("python.py").write_text(
            PROGRAM.format(folder=str(self.folder), waits=WAITS, seconds=SECONDS)
        )
        for path, script in ((self.python, PYTHON), (self.bin / "pip", PIP)):
            path.write_text(script.format(python=shlex.quote(sys.executable), folder=self.folder))
            path.chmod(0o755)
        self.plan({})

    def plan(self, statuses: dict[int, list[int]]) -> None:
        """Set how the attempts of each replica end; without a plan, with 0."""
        (self.folder / "plan").write_text(json.dumps(statuses))

    def is_refused(self) -> bool:
        """Count a start; return whether the platform refuses it."""
        if self.starts + 1 < self.refuse_from:
            self.starts += 1
            return False
        ends = time.monotonic() + SECONDS  # for the others to begin: what is killed before has not run at all
        while len(self.started()) < self.starts and time.monotonic() < ends:
            time.sleep(0.02)
        return True

    def run(self, command: list[str], environment: dict[str, str]) -> str:
        """Run a container; return its ID."""
        path = f"{self.bin}:/usr/bin:/bin"
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PATH": path},
            start_new_session=True,
        )
        self.jobs[name := f"sb-{len(self.jobs)}"] = job
        for _ in range(self.interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the client still waits for the answer
        return name

    def kill(self, name: str) -> None:
        """Kill the processes of a container."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.jobs[name].pid, signal.SIGKILL)

    async def output(self, name: str) -> AsyncIterator[str]:
        """Yield the lines of a container."""
        stdout = self.jobs[name].stdout
        assert stdout
        while line := await asyncio.to_thread(stdout.readline):
            yield line

    def close(self) -> None:
        """Kill all containers."""
        for name, job in self.jobs.items():
            self.kill(name)
            job.communicate()

    def started(self) -> list[tuple[str, dict[str, Any]]]:
        """Return each replica's number and attempt, "1-0", with what it was started with, in this order."""
        paths = sorted(self.folder.glob("replica-*-[0-9]"))
        return [(path.name.removeprefix("replica-"), json.loads(path.read_text())) for path in paths]

    def installed(self) -> list[list[str]]:
        """Return the arguments of each call of pip."""
        return [path.read_text().splitlines() for path in self.folder.glob("pip-*")]

    def alive(self) -> list[str]:
        """Return which attempts of replicas have not ended."""
        for job in self.jobs.values():  # one that was just killed has a moment
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(1)
        return [name for name, one in self.started() if Path(f"/proc/{one['pid']}").exists()]


@contextlib.contextmanager
def hub(machine: Machine) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve the Hub's API of Jobs; yield the address and the list of the Jobs that were asked for."""
    asked: list[dict[str, Any]] = []
    canceled = set[str]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def answer(self, data: Any, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def is_known(self) -> bool:
            known = self.headers["Authorization"] == "Bearer hf_token_of_the_test"
            if not known:
                self.answer({"error": "Invalid username or password."}, 401)
            return known

        def info(self, name: str) -> dict[str, Any]:
            status = machine.jobs[name].poll()
            stage = "RUNNING" if status is None else "ERROR" if status else "COMPLETED"
            stage = "CANCELED" if name in canceled else stage
            owner = {"id": "1", "name": "me", "type": "user"}
            return {"id": name, "status": {"stage": stage, "message": None}, "owner": owner}

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if not self.is_known():
                return
            if self.path == "/api/jobs/me":
                if machine.is_refused():
                    return self.answer({"error": "the test refuses"}, machine.refusal)
                asked.append(spec := json.loads(body))
                environment = {**spec["environment"], **spec.get("secrets", {})}
                info = self.info(machine.run(spec["command"], environment))
                if "start" in machine.faults:
                    return self.answer({"error": "the answer is lost"}, machine.faults.pop("start"))
                return self.answer(info)
            name, action = self.path.removeprefix("/api/jobs/me/").split("/")
            assert action == "cancel"
            if "stop" in machine.faults:
                return self.answer({"error": "the test refuses"}, machine.faults.pop("stop"))
            if machine.jobs[name].poll() is not None:
                return self.answer({"error": "the Job has ended"}, 400)
            canceled.add(name)
            machine.kill(name)
            self.answer({})

        def do_GET(self) -> None:
            if not self.is_known():
                return
            if self.path == "/api/whoami-v2":
                return self.answer({"type": "user", "name": "me"})
            name, *action = self.path.removeprefix("/api/jobs/me/").split("/")
            if (what := action[0] if action else "status") in machine.faults:
                return self.answer({"error": "the test refuses"}, machine.faults.pop(what))
            if not action:
                return self.answer(self.info(name))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            output = machine.jobs[name].stdout
            assert action == ["logs"] and output
            for line in output:
                event = {"data": line.rstrip("\n"), "timestamp": "2026-11-30T00:00:00.000Z"}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            machine.jobs[name].wait(SECONDS)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            machine.close()
            server.shutdown()
            thread.join()


async def not_implemented(self: Any, stream: Any) -> None:
    """Answer a call that the tests do not expect."""
    raise GRPCError(Status.UNIMPLEMENTED, "the server of the tests does not implement it")


def only(base: Any) -> Any:
    """Return a service with all calls of `base`, which answers none of them."""
    return type(base.__name__, (base,), dict.fromkeys(base.__abstractmethods__, not_implemented))


class ModalService(only(api_grpc.ModalClientBase)):  # type: ignore[misc]
    """What a launch asks of Modal."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.asked, self.url = machine, list[Any](), ""
        self.secrets: dict[str, dict[str, str]] = {}
        self.terminated = set[str]()

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        data = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 3600}).encode()).decode()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=f"x.{data}.x"))

    async def AppGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        if stream.metadata["x-modal-token-secret"] != "as-of-the-test":
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(
            api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        )

    async def ImageGetOrCreate(self, stream: Any) -> None:
        self.asked.append(await stream.recv_message())
        built = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=built))

    async def SecretGetOrCreate(self, stream: Any) -> None:
        name = f"st-{len(self.secrets)}"
        self.secrets[name] = dict((await stream.recv_message()).env_dict)
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=name))

    def create(self, request: Any, secrets: dict[str, str]) -> str:
        if self.machine.is_refused():
            raise GRPCError(self.machine.refusal, "the test refuses")
        self.asked.append(request)
        return self.machine.run(list(request.definition.entrypoint_args), secrets)

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        name = self.create(
            request, {k: v for one in request.secret_sources for k, v in one.env.contents.items()}
        )
        access = api_pb2.CommandRouterAccess(url=self.url, jwt="x.e30.x")
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=name, command_router_access=access)
        )

    async def SandboxCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        ids = request.definition.secret_ids
        name = self.create(request, {k: v for one in ids for k, v in self.secrets[one].items()})
        await stream.send_message(api_pb2.SandboxCreateResponse(sandbox_id=name))

    async def SandboxGetTaskId(self, stream: Any) -> None:
        name = (await stream.recv_message()).sandbox_id
        await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=name))

    async def SandboxWait(self, stream: Any) -> None:
        request = await stream.recv_message()
        name, result = request.sandbox_id, api_pb2.GenericResult()
        ends = time.monotonic() + request.timeout
        while (status := self.machine.jobs[name].poll()) is None and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        if status is not None:
            kind = "TERMINATED" if name in self.terminated else "FAILURE" if status else "SUCCESS"
            result.status = getattr(api_pb2.GenericResult, f"GENERIC_STATUS_{kind}")
            result.exitcode = max(status, 0)
        await stream.send_message(api_pb2.SandboxWaitResponse(result=result))

    async def SandboxTerminate(self, stream: Any) -> None:
        name = (await stream.recv_message()).sandbox_id
        if "stop" in self.machine.faults:
            raise GRPCError(self.machine.faults.pop("stop"), "the test refuses")
        if self.machine.jobs[name].poll() is None:
            self.terminated.add(name)
            self.machine.kill(name)
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    async def SandboxGetLogs(self, stream: Any) -> None:
        async for line in self.machine.output((await stream.recv_message()).sandbox_id):
            await stream.send_message(api_pb2.TaskLogsBatch(items=[api_pb2.TaskLogs(data=line)]))
        await stream.send_message(api_pb2.TaskLogsBatch(eof=True))

    SandboxWaitV2, SandboxTerminateV2 = SandboxWait, SandboxTerminate


class RouterService(only(task_command_router_grpc.TaskCommandRouterBase)):  # type: ignore[misc]
    """Modal's server of a Sandbox's output."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    async def SandboxStdioReadV2(self, stream: Any) -> None:
        offset = 0
        async for line in self.machine.output((await stream.recv_message()).task_id):
            data = line.encode()
            await stream.send_message(
                task_command_router_pb2.SandboxStdioReadV2Response(data=data, starting_offset=offset)
            )
            offset += len(data)


async def start_server(*services: Any) -> Any:
    """Start a server on a free port."""
    server = grpclib.server.Server(services)
    await server.start("127.0.0.1", 0)
    return server


async def stop_server(server: Any, loop: Any) -> None:
    """Stop a server, and close the connections, which grpclib leaves open."""
    server.close()
    await server.wait_closed()
    if accepting := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(accepting)
    while connections := [one for one in loop._transports.values() if one._sock is not None]:
        for transport in connections:
            transport.abort()
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def modal_server(machine: Machine) -> Iterator[ModalService]:
    """Serve what a launch asks of Modal."""
    loop, service = asyncio.new_event_loop(), ModalService(machine)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(SECONDS)

    try:
        server = call(start_server(service, RouterService(machine)))
        service.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        yield service
        machine.close()
        call(stop_server(server, loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
