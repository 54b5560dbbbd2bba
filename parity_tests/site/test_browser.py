"""The pages in a real browser: no error, no request outside of the disk, nothing wider than a phone,
and at 1280 pixels no table wider than its page."""

from pathlib import Path
from typing import Any

import pytest

from composer_plugins.losses.registry import losses

# A page of each kind. Of the losses those with most on their page.
LONGEST = sorted(losses(), key=lambda loss: (len(loss.dialects), len(loss.tex)))
LOSSES = {loss.kind: loss for loss in LONGEST}.values()
PAGES = [
    "index", "docs/install", "docs/commands", "docs/trl", "docs/trl_options", "docs/verl", "docs/prime_rl",
    "losses/index", "losses/names", "losses/laws", "docs/denominators", "docs/writing_a_loss",
    "docs/checking_a_loss", "docs/parity", "docs/mistakes", "docs/migrate",
    "docs/trl_support", "parity_tests/divergences", "benchmarks/index", "docs/status", "CHANGELOG",
    "recipes/trl/index", "kernels/policy/scored.py",
]  # fmt: skip
PAGES += [f"losses/{loss.kind}/{loss.name}" for loss in LOSSES]

# Those of which a part is hidden until the reader scrolls it sideways.
WIDE_TABLES = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.querySelector("th")?.textContent)"""

HAS_FONT = "[...document.fonts].some(f => f.family.includes('STIX') && f.status == 'loaded')"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_load_without_errors_or_requests_and_fit(
    site: Path, browser: Any, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    tab = context.new_page()
    errors, requests = list[str](), set[str]()
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    # One that goes on when the next page is opened is broken off.
    tab.on(
        "requestfailed", lambda r: None if "ABORTED" in r.failure else errors.append(f"{r.url}: {r.failure}")
    )
    tab.on("request", lambda request: requests.add(request.url))
    wide, unformatted = [], []
    for name in PAGES:
        tab.goto((site / f"{name}.html").as_uri())
        found = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if found[0] > found[1]:
            wide.append(f"{name}: {found[0]} in {found[1]}")
        if width == 1280 and (tables := tab.evaluate(WIDE_TABLES)):
            wide.append(f"{name}: the tables {tables}")
        if tab.locator("math").count():
            tab.evaluate("document.fonts.ready")
            if not tab.evaluate(HAS_FONT):
                unformatted.append(name)
        palette = "default" if scheme == "light" else "slate"
        assert tab.evaluate("document.body.dataset.mdColorScheme") == palette
    context.close()
    assert not errors, "\n".join(errors[:10])
    assert not wide, "\n".join(wide)
    assert not unformatted, f"the font of formulas was not loaded in {unformatted}"
    outside = {url for url in requests if not url.startswith(("file:", "data:", "blob:"))}
    assert not outside, outside


def test_home_is_one_screen_and_search_finds_a_loss_by_a_function_of_verl(site: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.goto((site / "index.html").as_uri())
    assert tab.locator("article").evaluate("article => article.getBoundingClientRect().bottom") <= 900
    tab.locator("input.md-search__input").click()
    tab.locator("input.md-search__input").type("compute_policy_loss_geo_mean", delay=5)
    tab.wait_for_selector("a.md-search-result__link", timeout=60_000)
    links = tab.locator("a.md-search-result__link").evaluate_all("all => all.map(one => one.href)")
    context.close()
    assert any("losses/policy/gmpo" in link for link in links), links
