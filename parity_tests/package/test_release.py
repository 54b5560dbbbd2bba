"""What a release says of itself is the same everywhere: the sentence, the version, the addresses."""

import re
import runpy
import tomllib

import yaml
from typer.testing import CliRunner

import composer_plugins
from composer_plugins.cli import program
from parity_tests.rigs.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SENTENCE, URLS = PROJECT["description"], PROJECT["urls"]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_wheel_help_site_and_citation_say_the_same_sentence() -> None:
    site = re.search(r"^site_description: (.+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site and site[1] == SENTENCE
    assert one_line((composer_plugins.__doc__ or "").partition("\n\n")[0]) == SENTENCE
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["abstract"] == SENTENCE
    assert SENTENCE in one_line(CliRunner().invoke(program(), ["--help"]).stdout)


def test_the_long_description_has_no_relative_link() -> None:
    text = runpy.run_path(str(ROOT / "setup.py"))["long_description"]()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and not [link for link in links if not link.startswith("https://")]
    files = re.compile(re.escape(URLS["Repository"]) + r"/(?:blob|raw)/v[^/]+/([^#]+)")
    paths = [found[1] for link in links if (found := files.match(link))]
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_one_version() -> None:
    version = composer_plugins.__version__
    assert CliRunner().invoke(program("list"), ["--version"]).stdout == f"composer-plugins {version}\n"
    assert "version" in PROJECT["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_files_name_the_address_of_pyproject() -> None:
    forge, site = URLS["Repository"], URLS["Documentation"]
    pages = [
        ROOT / name for name in ("CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/get_started.md")
    ]
    for page in (*pages, *(ROOT / ".github").rglob("*.*")):
        found = re.findall(
            r"https://[\w.-]*composer-plugins[\w.-]*/[\w./-]*|https://github\.com/composer[\w./-]*",
            page.read_text(),
        )
        assert not [one for one in found if not one.startswith((forge, site))], page
    assert all(url.startswith((forge, site)) for url in URLS.values())
