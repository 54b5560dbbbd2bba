"""Where the repository's files are, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "parity_tests"
GOLDEN = TESTS / "golden"
