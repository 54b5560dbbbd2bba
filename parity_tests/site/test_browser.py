"""The pages in a real browser: no error, no request outside of the disk, nothing wider than a phone,
and at 1280 pixels no table wider than its page. Code that is wider than its box has a scroll bar."""

from pathlib import Path
from typing import Any

import pytest

from composer_plugins.losses.registry import losses
from docs.generator.tex import tex

# A page of each kind. Of the losses those with most on their page.
LONGEST = sorted(losses(), key=lambda loss: (len(loss.dialects), len(tex(loss))))
LOSSES = {loss.kind: loss for loss in LONGEST}.values()
PAGES = [
    "index", "docs/get_started", "docs/trl", "docs/trl_options", "docs/verl", "docs/prime_rl",
    "losses/index", "losses/names", "losses/laws", "docs/denominators", "docs/writing_a_loss",
    "docs/parity", "docs/migrate", "docs/health", "docs/status", "parity_tests/divergences",
    "benchmarks/index", "CHANGELOG",
    "recipes/trl/index", "kernels/policy/scored.py",
]  # fmt: skip
PAGES += [f"losses/{loss.kind}/{loss.name}" for loss in LOSSES]

# Those of which a part is hidden until the reader scrolls it sideways.
WIDE_TABLES = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.querySelector("th")?.textContent)"""

# Code of which a part is hidden, without a bar that is always drawn.
CUT_CODE = """[...document.querySelectorAll("pre > code")]
    .filter(one => one.scrollWidth > one.clientWidth + 1)
    .filter(one => getComputedStyle(one).overflowX != "auto" || getComputedStyle(one).scrollbarWidth != "auto"
        || !(parseFloat(getComputedStyle(one, "::-webkit-scrollbar").height) > 4))
    .map(one => one.textContent.slice(0, 60))"""

PLOTS = """[...document.querySelectorAll(".plot img")].filter(one => one.offsetParent)
    .map(one => one.src.match(/(wide|narrow)-(light|dark)[.]svg/)[0])"""

# Cells of a row with much text that do not stand one below another on a phone.
NARROW_CELLS = """[...document.querySelectorAll("[data-label]")]
    .filter(one => one.offsetParent && one.offsetWidth < 250).map(one => one.textContent.slice(0, 40))"""

INVERTED = """[...document.querySelectorAll(".md-content img")]
    .map(one => [!one.closest(".plot"), getComputedStyle(one).filter != "none"])"""

HAS_FONT = "[...document.fonts].some(f => f.family.includes('STIX') && f.status == 'loaded')"


@pytest.mark.parametrize("width", [390, 1280, 1920])
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
    plot = f"{'narrow' if width == 390 else 'wide'}-{scheme}.svg"
    for name in PAGES:
        tab.goto((site / f"{name}.html").as_uri())
        found = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if found[0] > found[1]:
            wide.append(f"{name}: {found[0]} in {found[1]}")
        wide += [f"{name}: {code!r}" for code in tab.evaluate(CUT_CODE)]
        if width >= 1280 and (tables := tab.evaluate(WIDE_TABLES)):
            wide.append(f"{name}: the tables {tables}")
        if width == 390:
            wide += [f"{name}: the narrow cell {cell!r}" for cell in tab.evaluate(NARROW_CELLS)]
        assert tab.evaluate(PLOTS) in ([], [plot]), name
        for has_white_ground, is_inverted in tab.evaluate(INVERTED):  # plots have dark files of their own
            assert is_inverted == (scheme == "dark" and has_white_ground), name
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
