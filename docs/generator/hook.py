"""The hook of mkdocs.yml: gather the pages of the site, and make those of the catalogue."""

from pathlib import Path
from typing import Any

from docs.generator import laws, losses, names, pages, plots

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: Any) -> Any:
    """Write every page below build/site-source, which mkdocs then reads, and list the losses in `nav`."""
    out = ROOT / "build" / "site-source"
    made = losses.pages() | names.pages() | laws.pages()
    pages.write(out, made, plots.files())
    config.docs_dir = str(out)
    (section,) = [entry for entry in config.nav if "Losses" in entry]
    section["Losses"] += losses.navigation()
    return config
