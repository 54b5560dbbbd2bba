"""Replicas as Jobs of Hugging Face (https://huggingface.co/docs/hub/jobs).

It was run with huggingface_hub 2.4.0 and a server of the tests that answers as the Hub does. No account of
Hugging Face was used.
"""

import time
from collections.abc import Iterator
from functools import partial

from httpx2 import HTTPError
from huggingface_hub import HfApi, JobInfo, JobStage, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.launching import AGAIN, Container, Replica, client_errors

LOG_IN = "run hf auth login, or set HF_TOKEN to a token that may start Jobs"
REMEDIES = {
    401: LOG_IN,
    402: "buy credits at https://huggingface.co/settings/billing, and start the same command again",
    403: LOG_IN,
}
STATUSES = {JobStage.COMPLETED: 0, JobStage.ERROR: 1, JobStage.CANCELED: 137, JobStage.DELETED: 137}
POLL_SECONDS = 2.0


def code_of(error: BaseException) -> int:
    """Return the status of HTTP, 503 if the Hub has not answered."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else 503


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about a refusal, if it is known."""
    if isinstance(error, OfflineModeIsEnabled):
        return "run unset HF_HUB_OFFLINE"
    return REMEDIES.get(code_of(error), AGAIN if code_of(error) < 500 else None)


hub_errors = partial(client_errors, "hf-jobs", (HTTPError, OfflineModeIsEnabled), remedy_of)


class HubJob:
    """A replica in a Job."""

    def __init__(self, api: HfApi, info: JobInfo) -> None:
        self.api, self.id = api, {"job_id": info.id, "namespace": info.owner.name}

    def lines(self) -> Iterator[str]:
        """Yield what the Job prints."""
        yield from self.api.fetch_job_logs(**self.id, follow=True)

    def status(self) -> int | None:
        """Return the exit status, or None if the Job has not ended. The Hub tells no number of an error."""
        return STATUSES.get(self.api.inspect_job(**self.id).status.stage)

    def wait(self) -> int:
        """Wait until the Job ends. It trains on while the Hub cannot be reached."""
        while True:
            try:
                if (status := self.status()) is not None:
                    return status
            except HTTPError as error:
                if code_of(error) < 500 and code_of(error) != 429:
                    with hub_errors():
                        raise
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Cancel the Job."""
        try:
            self.api.cancel_job(**self.id)
        except HTTPError:
            if self.status() is None:
                raise


class HuggingFaceJobs:
    """The platform. The Jobs are listed at https://huggingface.co/settings/jobs."""

    def __init__(self, container: Container) -> None:
        self.container, self.api = container, HfApi()
        self.secrets = container.secret_values()
        token = get_token() or ""
        if not token or not token.isascii():
            problem = "the token of Hugging Face has a character that is not ASCII"
            raise ConfigError("--on hf-jobs", problem if token else "no token of Hugging Face is set", LOG_IN)
        with hub_errors():
            self.namespace = self.api.whoami()["name"]

    def start(self, options: Replica) -> HubJob:
        """Start a replica."""
        with hub_errors(page="https://huggingface.co/settings/jobs"):
            info = self.api.run_job(
                image=self.container.image,
                command=self.container.command(options),
                secrets=self.secrets,
                flavor=self.container.flavor or None,
                timeout=self.container.job_timeout,
                namespace=self.namespace,
            )
        return HubJob(self.api, info)
