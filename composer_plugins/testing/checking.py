"""`check_loss`: every law on one loss, as scikit-learn's `check_estimator` does for an estimator."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

from composer_plugins.errors import ConfigError, unknown, with_place
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.derived import row_of_function
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss, check_kind
from composer_plugins.testing.laws import LAWS, Law, NotApplicable
from composer_plugins.testing.laws.results import result_has_one_value_per_token
from composer_plugins.testing.report import Outcome, Report
from composer_plugins.testing.settings import settings

MOST = 300  # characters of an exception: those of torch.compile have paragraphs of advice
SHOWN = 3  # settings of a broken law that a report shows
FIRST = result_has_one_value_per_token.__name__  # without it no other law can be looked at

Named = Loss | str | Callable[..., Any]


def check_loss(loss: Named, *, kind: str | None = None, only: Iterable[str] = ()) -> Report:
    """Run every law on a loss, or `only` the laws of these names.

    `loss` is a name of the catalogue ("grpo"), an import path ("my_package.losses:my_loss"), a function, or a
    row. `kind` is needed where two kinds share the name, and where the first input of a function does not
    tell: "policy", "advantage", "divergence", "preference", "kl" or "correction".
    Raises ConfigError for a loss that cannot be loaded.
    """
    return check_row(find_row(loss, kind), only)


def parametrize_with_checks(
    named: Iterable[Named], *, kind: str | None = None, only: Iterable[str] = ()
) -> Any:
    """Parametrize a pytest test by `loss` and `check`, one check for each law of each loss.

        @parametrize_with_checks(["my_loss", "my_package.losses:another"])
        def test_my_losses_obey_the_laws(loss, check):
            check(loss)

    A check that does not apply skips the test, with the reason.
    """
    import pytest

    named = [named] if isinstance(named, str) else named
    cases = [
        pytest.param(row, partial(_pytest_check, law), id=f"{row.kind}-{row.name}-{law.name}")
        for row in (find_row(one, kind) for one in named)
        for law in laws_of(row, only)
    ]
    return pytest.mark.parametrize(("loss", "check"), cases)


def _pytest_check(law: Law, row: Loss) -> None:
    __tracebackhide__ = True
    outcome = run_law(law, row)
    if outcome.status == "not applicable":
        import pytest

        pytest.skip(outcome.detail)
    Report(row.name, (outcome,)).raise_if_failed()


def find_row(loss: Named, kind: str | None = None) -> Loss:
    """The row of a loss, by name, import path or function; ConfigError if there is none, or several."""
    if isinstance(loss, Loss):
        return loss
    if kind is not None:
        check_kind(kind, "kind")
    if not isinstance(loss, str):
        return row_of_function(loss, cast(Kind | None, kind), "loss", losses())
    if "@" in loss:
        base = loss.partition("@")[0]
        raise ConfigError("loss", f"{loss!r} is a dialect", f"check {base!r}, with all its dialects")
    return find_one(loss, kind).loss


def laws_of(row: Loss, only: Iterable[str] = ()) -> list[Law]:
    """The laws of the kind of a row, or those of them that are named."""
    only = (only,) if isinstance(only, str) else tuple(only)
    for name in only:
        if name not in LAWS:
            raise unknown("only", name, LAWS, noun="law")
    chosen = [law for law in LAWS.values() if row.kind in law.kinds and (not only or law.name in only)]
    if only and not chosen:
        problem = f"no law of {', '.join(only)} is for losses of the kind {row.kind}"
        raise ConfigError("only", problem, "composer-plugins check --laws says which kinds each law is for")
    return sorted(chosen, key=lambda law: law.name != FIRST)


def check_row(row: Loss, only: Iterable[str] = ()) -> Report:
    """Run every law of its kind on a row."""
    return Report(f"{row.name} ({row.kind})", tuple(_outcomes(row, laws_of(row, only))))


def exceptions_without_a_law(row: Loss, laws: Iterable[str], of: str) -> Iterator[Outcome]:
    """A failed outcome for each exception that the row declares and that none of these laws has."""
    named = {key.partition("(")[0].partition("+")[0].partition("@")[0] for key in row.exceptions}
    for name in sorted(named - {*laws}):
        cause = "a law that was renamed, a misspelling, or a law of other kinds: correct the row"
        problem = f"the row names it in its exceptions, and no law of {of} has that name"
        yield Outcome(name, "failed", problem, cause)


def _outcomes(row: Loss, chosen: list[Law]) -> Iterator[Outcome]:
    yield from exceptions_without_a_law(row, [law.name for law in laws_of(row)], f"a {row.kind}")
    unusable = ""
    for law in chosen:
        if unusable:
            yield Outcome(law.name, "not applicable", unusable)
            continue
        yield (outcome := run_law(law, row))
        if law.name == FIRST and outcome.status == "failed":
            unusable = f"not run: mend {FIRST} first"


def run_law(law: Law, row: Loss) -> Outcome:
    """One law on a loss, in all its settings: with its defaults, optional inputs, dialects and choices."""
    broken, inapplicable, held, raised = dict[str, str](), list[str](), 0, False
    for setting in settings(row, thorough=law.thorough):
        try:
            law.check(setting)
            held += 1
        except NotApplicable as reason:
            inapplicable.append(str(reason))
        except (Exception, SystemExit) as error:
            found = isinstance(error, AssertionError)
            problem = str(error)[:900] if found else with_place(error, most=MOST)
            broken[setting.label.removeprefix(row.name)] = problem
            raised |= not found
    declared = {
        key.removeprefix(law.name): reason
        for key, reason in row.exceptions.items()
        if key.startswith(law.name) and not key[len(law.name) : len(law.name) + 1].isidentifier()
    }
    if law.name in row.exceptions:
        if broken:
            return Outcome(law.name, "not applicable", f"declared: {row.exceptions[law.name]}")
        return _stale(law, law.name)
    if broken and (excuse := law.excuse(row)):
        return Outcome(law.name, "not applicable", excuse)
    for suffix in declared:
        if suffix not in broken:
            return _stale(law, f"{law.name}{suffix}")
        del broken[suffix]
    if broken:
        lines = [f"{row.name}{suffix}: {problem}" for suffix, problem in list(broken.items())[:SHOWN]]
        if len(broken) > SHOWN:
            lines.append(f"and in {len(broken) - SHOWN} more settings: {', '.join(list(broken)[SHOWN:])}")
        by_itself = raised and law.name == FIRST  # the other laws call it with what it may not be made for
        cause = "the loss itself raises this error" if by_itself else f"usual cause: {law.cause}"
        return Outcome(law.name, "failed", "\n".join(lines), cause)
    if not held and not declared:
        return Outcome(law.name, "not applicable", "; ".join(dict.fromkeys(inapplicable)))
    return Outcome(law.name, "passed")


def _stale(law: Law, key: str) -> Outcome:
    problem = f"the row declares the exception {key!r}, and the law holds without it"
    return Outcome(law.name, "failed", problem, "usual cause: the loss was mended: remove the exception")
