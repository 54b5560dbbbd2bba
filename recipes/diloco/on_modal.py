"""Replicas in Sandboxes of Modal (https://modal.com/docs/guide/sandboxes).

It was run with modal 1.6.4 and a server of the tests that speaks Modal's protocol. No account of Modal was
used.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import modal
from modal.exception import AuthError, Error, PermissionDeniedError, ResourceExhaustedError

from composer_plugins.recipes.diloco.launching import Container, Replica, client_errors

CPUS, MEGABYTES = 2.0, 4096  # reserved for a replica; by default Modal reserves an eighth of a CPU


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about a refusal, if it is known."""
    if isinstance(error, AuthError):
        log_in = "" if "modal token new" in str(error) else "run modal token new, or "  # Modal may say it
        return f"{log_in}set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
    if isinstance(error, ResourceExhaustedError | PermissionDeniedError):
        return "look at the workspace's limits and billing on modal.com, and start the same command again"
    return None


modal_errors = partial(client_errors, "modal", (Error,), remedy_of)


class SandboxJob:
    """A replica in a Sandbox."""

    def __init__(self, sandbox: modal.Sandbox) -> None:
        self.sandbox = sandbox

    def lines(self) -> Iterator[str]:
        """Yield what the Sandbox prints."""
        yield from self.sandbox.stdout

    def wait(self) -> int:
        """Return the exit status: 124 after `job_timeout`, 137 if the Sandbox was stopped."""
        with modal_errors(), suppress(modal.exception.SandboxTimeoutError):
            self.sandbox.wait(raise_on_termination=False)
        status = self.sandbox.returncode
        return 1 if status is None else status

    def stop(self) -> None:
        """Terminate the Sandbox."""
        self.sandbox.terminate()


class Modal:
    """The platform. The Sandboxes are listed on modal.com under the app's name."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.secret = modal.Secret.from_dict({**container.secret_values()})
        with modal_errors():
            self.app = modal.App.lookup("composer-plugins-diloco", create_if_missing=True)

    def start(self, options: Replica) -> SandboxJob:
        """Start a replica. With a GPU this returns when Modal has found one."""
        with modal_errors(page="https://modal.com/apps"):
            sandbox = modal.Sandbox.create(
                *self.container.command(options),
                app=self.app,
                image=modal.Image.from_registry(self.container.image),
                secrets=[self.secret],
                gpu=self.container.flavor or None,
                cpu=CPUS,
                memory=MEGABYTES,
                timeout=self.container.job_timeout,
            )
        return SandboxJob(sandbox)
