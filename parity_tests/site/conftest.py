"""The built site, and a browser that reads it without a network."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs.programs import python

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site: the one that `make docs` has just built, or one built here in strict mode."""
    if built := os.environ.get("SITE"):
        return Path(built).resolve()
    out = tmp_path_factory.mktemp("site")
    done = python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium. Playwright drives the one that is installed, and downloads none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
