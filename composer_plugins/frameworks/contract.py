"""`Framework`: what is known of one framework, as data, and the refusal of a loss that it cannot run.

Everything that needs such a fact reads it here: an adapter, the doctor, `migrate`, `conform`, `check --as`,
the pages. "Option X of framework U is parameter Y of loss L" is an `Option` with a `Sets`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import REQUIRED, Kind, Loss

NOTHING: Mapping[Any, Any] = MappingProxyType({})
DIGITS = 12  # of a converted number, so that 1.2 - 1 is 0.2; 1.2 - 1 moves by less than a rounding
ROUNDING = 4e-16


# What cuts or bends the distribution that is sampled, with the values that do not.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}


class Conversion(NamedTuple):
    """How a framework's value becomes ours: `factor * theirs + offset`, or its entry in `values`."""

    factor: float = 1.0
    offset: float = 0.0
    values: Mapping[Any, Any] = NOTHING
    text: str = ""  # the formula in words, where it needs another option too, as "simpo_gamma / beta"

    def ours(self, theirs: Any) -> Any:
        """Our value for a framework's value. A value that is not a number is returned unchanged."""
        if self.values:
            return self.values[theirs]
        if self == SAME or isinstance(theirs, bool) or not isinstance(theirs, int | float):
            return theirs
        exact = self.factor * theirs + self.offset
        rounded = round(exact, DIGITS)
        return rounded if abs(rounded - exact) <= ROUNDING * max(1.0, abs(theirs)) else exact

    def theirs(self, ours: Any) -> Any:
        """The framework's value for ours; KeyError where it has none."""
        if self.values:
            return {value: key for key, value in self.values.items()}[ours]
        if self == SAME or isinstance(ours, bool) or not isinstance(ours, int | float):
            return ours
        return Conversion(1 / self.factor, -self.offset / self.factor).ours(ours)

    def formula(self, name: str) -> str:
        """Our value in terms of the option `name`: "ratio_high - 1"."""
        if self.text or self == SAME:
            return self.text or name
        if self.values:
            return " or ".join(f"{ours!r} (for {name}={theirs!r})" for theirs, ours in self.values.items())
        if self.factor == -1:
            return f"{self.offset:g} - {name}"
        scaled = name if self.factor == 1 else f"{self.factor:g} * {name}"
        return f"{scaled} {'-' if self.offset < 0 else '+'} {abs(self.offset):g}"


SAME, MINUS_ONE, ONE_MINUS = Conversion(), Conversion(offset=-1.0), Conversion(-1.0, 1.0)


class Sets(NamedTuple):
    """The parameters that an option sets in the losses that are named, or else in all that have them."""

    parameters: tuple[str, ...]
    losses: tuple[str, ...] = ()
    conversion: Conversion = SAME

    def is_of(self, loss: Loss) -> bool:
        """Whether this loss has the parameters, with this meaning."""
        named = not self.losses or loss.name in self.losses
        return named and all(one in loss.parameters for one in self.parameters)


def parameters_of(sets: Iterable[Sets], loss: Loss) -> dict[str, Conversion]:
    """The parameters of a loss that are set, with their conversion, by the first of `sets` that fits it."""
    found = next((one for one in sets if one.is_of(loss)), None)
    return dict.fromkeys(found.parameters, found.conversion) if found else {}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a framework that its loss reads, and what it does when our loss runs.

    The first of `sets` that fits the loss says which parameters it sets. Otherwise `objective` names what
    else of the objective it sets, or `effect` says what it does.
    """

    key: str  # as it is written in the framework's config, below the table of its kind
    kind: Kind = "policy"
    default: Any = None
    sets: tuple[Sets, ...] = ()
    # A field of Objective: "entropy", "mode", "temperature", "kl.weight", "channels.policy_weight" ...
    objective: str = ""
    conversion: Conversion = SAME  # of its value into that field's
    effect: str = ""
    fallback: str = ""  # the option that is read where this one is null
    # It is read only if the option of the same kind with this key has this value. None is any value except
    # null and False.
    only_with: tuple[str, Any] | None = None

    @property
    def acts_by_parameters(self) -> bool:
        """Whether it acts on our losses only by setting parameters."""
        return not (self.effect or self.objective)

    def is_read_beside(self, value: Any) -> bool:
        """Whether it is read where the option of `only_with` has this value."""
        needed = self.only_with[1] if self.only_with else None
        return bool(value == needed) if needed is not None else value not in (None, False)

    def values(self, loss: Loss, value: Any) -> dict[str, Any]:
        """The parameters of a loss that the option sets at this value; empty if the loss has none of them."""
        return {name: one.ours(value) for name, one in parameters_of(self.sets, loss).items()}


class NamedLoss(NamedTuple):
    """A loss as a framework names it: the options that choose it, and its row or dialect here."""

    row: str
    options: Mapping[str, Any]
    own: tuple[Option, ...] = ()  # the options that only this loss reads, with its defaults
    params: Mapping[str, Any] = NOTHING  # what the row is called with that no option of its sets
    since: str = ""  # the first of `Framework.releases` that has it; "": it was always there
    until: str = ""  # the first one without it; "": none
    mode: str = ""  # the aggregation mode that it always has, whatever is configured
    needs_mode: str = ""  # the aggregation mode without which the framework refuses it
    kind: Kind = "policy"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework. The modules of its adapter are named, because importing them may load the framework."""

    name: str  # in commands, and in the name of a dialect: "trl"
    title: str  # in prose: "TRL"
    summary: str = ""
    path: str = ""  # of its adapter, "module:object", what a user imports; "" without an adapter
    releases: tuple[str, ...] = ()  # in their order, where a loss is not in all of them
    losses: tuple[NamedLoss, ...] = ()
    denominators: Mapping[str, str] = field(default_factory=dict)  # our mode for its name
    options: tuple[Option, ...] = ()
    tables: Mapping[Kind, str] = field(default_factory=dict)  # by kind, where its options stand: "algorithm"
    # Other names of parameters: of its other trainers, its functions, its earlier releases.
    names: Mapping[str, tuple[Sets, ...]] = field(default_factory=dict)
    # By kind of loss, the inputs that a loss can be called with.
    provides: Mapping[Kind, frozenset[str]] = field(default_factory=dict)
    # By kind, why a statistic of the whole batch is not available: "TRL cuts the batch into micro-batches".
    partial_batch: Mapping[Kind, str] = field(default_factory=dict)
    # Whether a row of its batch holds several sequences, and a loss is not told where each begins.
    packs_rows: bool = False
    # By kind and name, losses that would be another loss on the inputs as this framework has them, and why.
    refuses: Mapping[tuple[Kind, str], str] = field(default_factory=dict)
    # By our option, or an option of another framework: what does its work here, and what to do.
    unavailable: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Why each term of a policy loss must be proportional to the advantages: "X divides only them"; "" if not.
    divides_advantages: str = ""
    # Keys at the top of its configs that no config of another framework has.
    marks: tuple[str, ...] = ()
    # Keys at the top of a config that trains no policy loss of the table, with the reason: "it is DPO".
    trains_otherwise: Mapping[str, str] = field(default_factory=dict)
    # Keys that bear on the loss and that an Objective has no field for, with the values that change nothing;
    # and keys without a bearing on the loss. Each stands for everything below it.
    not_carried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    release: str = ""  # the release whose options the table has
    package: str = ""  # what is imported; "" where it is run from a checkout, because no index has it
    install: str = ""  # how to install it, for a message
    without_config: str = ""  # what to do in place of a config file, where it has none
    suffixes: tuple[str, ...] = ()  # of its config files, those that no other framework has
    inherits: str = ""  # the key of a config file that names the files whose options it replaces: "defaults"
    # How the words of its own command line are read (`objective.words`): by "hydra", as "flags"; "": not.
    command_line: Literal["", "hydra", "flags"] = ""
    config_flag: str = ""  # the word before a config file there: "--config", or "@"
    file_wins: bool = False  # whether that file replaces the options of the command line
    configs: tuple[str, ...] = ()  # configs of its own that hydra finds by name, the default first
    convention: str = ""  # "module:object", the calling convention of its loss functions
    registry: str = ""  # "module:function", its policy losses by their names there; it is not loaded before
    claims: str = ""  # the module with the claims of `conform`
    doctor: str = ""  # the package with its doctor
    migration: str = ""  # the module with its side of `migrate`

    def missing(self, loss: Loss) -> list[str]:
        """The inputs of `loss` that this framework does not have; all of them for a kind it never runs."""
        return [need for need in loss.needs if need not in self.provides.get(loss.kind, frozenset())]

    def runs(self, loss: Loss) -> bool:
        """Whether this framework has every input of `loss`, and the whole batch or row if it needs that."""
        if loss.over_batch or (self.packs_rows and (loss.per_sequence or loss.over_sequence)):
            return False
        if loss.kind not in self.provides or (loss.kind, loss.name) in self.refuses:
            return False
        # Reading the defaults of a loss imports its kernel.
        return not (self.missing(loss) or self._penalties(loss, lambda name: loss.defaults[name]))

    def _penalties(self, loss: Loss, value_of: Callable[[str], Any]) -> list[str]:
        """The parameters of a policy loss that weigh a term that would not be divided here."""
        if not self.divides_advantages or loss.kind != "policy":
            return []
        return [name for name, one in loss.parameters.items() if one.weighs_a_penalty and value_of(name) != 0]

    def require(self, choice: Choice) -> None:
        """Raise ConfigError, at the option that names the loss, unless this framework can run it."""
        loss, listed = choice.loss, f"composer-plugins list --framework {self.name} --kind "
        remedy = f"choose another: {listed}{loss.kind} shows those that run here"
        over_weights = choice.params.get("normalise") and loss.kind in self.partial_batch
        if loss.over_batch or over_weights:
            why = self.partial_batch.get(loss.kind, "the loss would change with the size of a micro-batch")
            what = f"{choice.name!r}{' with normalise' * bool(over_weights)}"
            raise ConfigError(choice.option, f"{what} is a statistic of the whole batch, and {why}", remedy)
        if refused := self.refuses.get((loss.kind, loss.name)):
            raise ConfigError(choice.option, f"{choice.name!r} {refused}", remedy)
        if missing := self.missing(loss):
            available = ", ".join(sorted(self.provides.get(loss.kind, frozenset()))) or "none"
            problem = f"{choice.name!r} needs {', '.join(missing)}, which {self.name} does not provide"
            from composer_plugins.frameworks.inputs import INSTEAD  # a process that trains does without it

            instead = INSTEAD.get(self.name, {}) if loss.kind == "policy" else {}
            ways = [instead[name] for name in missing if name in instead]
            raise ConfigError(
                choice.option, f"{problem} (inputs here: {available})", "; or ".join([*ways, remedy])
            )
        if penalties := self._penalties(loss, choice.value):
            problem = f"{choice.name!r} has a term without the advantages, and {self.divides_advantages}"
            off = " and ".join(f"{name}=0" for name in penalties)
            raise ConfigError(choice.option, problem, f"switch the term off ({off}), or {remedy}")

    def releases_of(self, named: NamedLoss) -> tuple[str, ...]:
        """The releases that have this loss of its own."""
        first = self.releases.index(named.since) if named.since else 0
        return self.releases[first : self.releases.index(named.until) if named.until else None]

    def of_release(self, release: str) -> "Framework":
        """This framework as one of `releases` is: its losses, and its options with the defaults there.

        An option is left out if only losses of other releases read it.
        """
        losses = tuple(one for one in self.losses if release in self.releases_of(one))
        own = {option.key: option for one in losses for option in one.own}
        others = {option.key for one in self.losses for option in one.own} - {*own}
        options = tuple(own.get(one.key, one) for one in self.options if one.key not in others)
        return replace(self, release=release, losses=losses, options=options)

    def row_of(self, **options: Any) -> str | None:
        """The row of the loss that these options choose; None if the catalogue does not have it."""
        return next((one.row for one in self.losses if one.options == options), None)

    def name_here(self, kind: Kind, name: Any) -> str | None:
        """The row of a loss that one option of this framework calls `name`: verl's "vanilla" is grpo@verl."""
        ours = (
            one.row
            for one in self.losses
            if one.kind == kind and not one.params and [*one.options.values()] == [name]
        )
        return next(ours, None)

    def parameters(self, loss: Loss, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a loss that options set at these values; the later one wins.

        Raises ConfigError, at the option's key, for a value that the option or the parameter does not have.
        """
        found = dict[str, Any]()
        for option in self.options_of(loss.kind):
            if option.key not in given:
                continue
            key, value = self.key(option), given[option.key]
            for name, conversion in parameters_of(option.sets, loss).items():
                if conversion.values and (not isinstance(value, Hashable) or value not in conversion.values):
                    known = " or ".join(map(repr, (option.default, *conversion.values)))
                    raise ConfigError(key, f"it is {value!r}", f"set {known}")
                found[name] = ours = conversion.ours(value)
                try:
                    loss.parameters[name].check(key, ours, loss.defaults.get(name, REQUIRED))
                except ConfigError as error:
                    if ours == value:
                        raise
                    problem = f"it is {value!r}, which sets {name} to {ours!r}"
                    remedy = f"{error.remedy} as {conversion.formula(option.key)}"
                    raise ConfigError(key, problem, remedy) from None
        return found

    def options_of(self, kind: Kind) -> list[Option]:
        """The options that concern losses of this kind."""
        return [one for one in self.options if one.kind == kind]

    def key(self, option: Option) -> str:
        """The key of an option from the root of the config."""
        table = self.tables.get(option.kind, "")
        return f"{table}.{option.key}" if table else option.key

    @property
    def default_mode(self) -> str:
        """The aggregation mode of a loss where nothing is set; "" where no option chooses one."""
        option = next((one for one in self.options if one.objective == "mode"), None)
        if option is None or option.default is None:
            return ""
        found: str = self.values_of(option).get(option.default, "")
        return found

    def values_of(self, option: Option) -> Mapping[Any, Any]:
        """Our value for each of the option's values, if these are names; for a mode, the denominators."""
        if option.conversion.values or option.objective != "mode":
            return option.conversion.values
        return self.denominators
