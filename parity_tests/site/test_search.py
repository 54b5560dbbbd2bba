"""The search box of the site leads from a question to the page that answers it, among the first three."""

from pathlib import Path
from typing import Any

START, OWN, HEALTH = "docs/get_started", "docs/writing_a_loss", "docs/health"
TRL, OPTIONS, VERL, DENOMINATORS = "docs/trl", "docs/trl_options", "docs/verl", "docs/denominators"
QUESTIONS = {
    "start": START,
    "quickstart": START,
    "getting started": START,
    "install": START,
    "my own loss": OWN,
    "custom loss": OWN,
    "write a loss": OWN,
    "check my loss": OWN,
    "hint": TRL,
    "self distillation": TRL,
    "DPO pairs": TRL,
    "memory": TRL,
    "epsilon_high": OPTIONS,
    "loss_type": OPTIONS,
    "verl yaml": VERL,
    "loss_agg_mode": VERL,
    "denominator": DENOMINATORS,
    "prime-rl import_path": "docs/prime_rl",
    "tinker": "docs/tinker",
    "clip fraction": HEALTH,
    "sampler mismatch": HEALTH,
    "which clip does TRL use for cispo": "losses/policy/cispo",
    "cispo": "losses/policy/cispo",
    "DPO": "losses/preference/dpo",
    "compute_policy_loss_geo_mean": "losses/policy/gmpo",
}
# One key for the whole question: with one for each letter, results of a part of it would come first.
ASK = "(box, question) => { box.value = question; box.dispatchEvent(new KeyboardEvent('keyup')) }"
RESULTS = "li.md-search-result__item"
FIRST = f"[...document.querySelectorAll('{RESULTS}')].slice(0, 3).map(one => one.querySelector('a').href)"
IS_READY = "document.querySelector('.md-search-result__meta').textContent.startsWith('Type')"


def test_the_page_that_answers_a_question_is_among_the_first_three(site: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.goto((site / "index.html").as_uri())
    box = tab.locator("input.md-search__input")
    box.click()
    tab.wait_for_function(IS_READY, timeout=60_000)
    missed = []
    for question, page in QUESTIONS.items():
        box.evaluate(ASK, "")
        tab.wait_for_function(f"!document.querySelector('{RESULTS}')")
        box.evaluate(ASK, question)
        tab.wait_for_selector(f"{RESULTS}, .md-search-result__meta:has-text('No matching')", timeout=60_000)
        found = [link.partition(f"{site.as_uri()}/")[2].partition(".html")[0] for link in tab.evaluate(FIRST)]
        if page not in found:
            missed.append(f"{question!r} leads to {found}, and not to {page}")
    context.close()
    assert not missed, "\n".join(missed)
