"""The commands of a shell script, with its variables and arrays expanded. Nothing is executed.

The grammar is tree-sitter's of bash. Assignments, arrays, functions, `${NAME:-default}` and integer
arithmetic are followed as bash does. The environment and the arguments of the script are not known: a default
value is taken, and a word that needs another value than the script's own says why it is unknown. So does one
that depends on a loop, on a branch whose condition is not known, or on the output of a program.
"""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import tree_sitter
import tree_sitter_bash

from composer_plugins.objective.shell_words import (
    EMPTY,
    SUBSTITUTIONS,
    Place,
    Value,
    Word,
    Words,
    joined,
    nodes,
)

LANGUAGE = tree_sitter.Language(tree_sitter_bash.language())
DEEPEST = 20  # function calls within each other; a recursion is cut there
MOST = 10_000  # commands that are followed: loops within calls within loops double with each level
STAYING = ("eval", "source", ".")  # what these are given sets variables of the script
# Files that set up a shell and not a training. What they set counts as the environment.
HARMLESS = re.compile(
    r"(activate|\.?(bash|zsh)(rc|_profile)|\.?(bash_|z)?profile|(conda|mamba|nvm|modules?|setvars)\.sh|/bash)$"
)
READERS = ("read", "mapfile", "readarray", "getopts")  # they set the variables that they name
ORDERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Command(NamedTuple):
    """A command that the script may run: its words, its line, and what it is given as environment."""

    words: tuple[Word, ...]
    line: int
    exported: tuple[tuple[str, str], ...]


class Leaving(Exception):
    """The script or a function ends here."""


class TooLong(Exception):
    """More commands than are followed."""


class Read(NamedTuple):
    """What was read of a script."""

    commands: list[Command]  # in the order of their text
    not_bash: list[int]  # lines
    written: dict[str, int]  # the files that it writes, with their lines


def commands(text: str, sourced: Callable[[str], str | None] = lambda name: None, folder: str = ".") -> Read:
    """The commands of a script that stands in this folder. Raises TooLong for one with too many.

    `sourced` has the text of a file that the script reads with `source`; None if it is not there.
    """
    script = Script(sourced, folder.encode(errors="replace").decode("latin-1"))
    wrong = script.read(text.replace("\r\n", "\n").encode(errors="replace"))
    return Read(list(map(legible, script.found)), wrong, script.written)


def legible(command: Command) -> Command:
    """A command whose bytes are read as UTF-8 again."""

    def text(one: str) -> str:
        return one.encode("latin-1").decode(errors="replace")

    words = tuple(Word(text(one.text), text(one.unknown), one.is_many) for one in command.words)
    return Command(words, command.line, tuple((name, text(one)) for name, one in command.exported))


class Script(Words):
    """Follows a script: its functions, what it exports, and the commands so far."""

    def __init__(self, sourced: Callable[[str], str | None], folder: str) -> None:
        super().__init__(folder)
        self.sourced = sourced
        self.exported: set[str] = set()
        self.functions: dict[str, tuple[tree_sitter.Node, Place]] = {}
        self.depth = self.followed = 0
        self.found: list[Command] = []
        self.written: dict[str, int] = {}  # files that the script writes, and where

    def read(self, source: bytes, first_line: int = 1, is_handed_over: bool = False) -> list[int]:
        """Follow a text. Returns the lines that are not bash."""
        before = self.place
        self.place = Place(source.decode("latin-1"), first_line, is_handed_over)
        every = list(nodes(tree_sitter.Parser(LANGUAGE).parse(source).root_node))
        found = [one for one in every if one.type in SUBSTITUTIONS]
        ends = {one.end_byte - len(self.source(one)): (one.type, one.end_byte) for one in found}
        self.place = self.place._replace(substitutions=ends)
        with suppress(Leaving):
            self.run(every[0])
        self.place = before
        return sorted({one.start_point.row + 1 for one in every if one.type == "ERROR"})

    def line(self, node: tree_sitter.Node) -> int:
        """The line of a node in the script."""
        return self.place.first_line + (0 if self.place.is_handed_over else node.start_point.row)

    # Statements. Each returns whether it succeeds, or None if that is not known.

    def run(self, node: tree_sitter.Node) -> bool | None:
        """Follow a statement, or the statements in a node."""
        handler = getattr(self, f"run_{node.type}", None)
        if handler is not None:
            done: bool | None = handler(node)
            return done
        return self.run_each(node.named_children)

    def run_each(self, statements: Sequence[tree_sitter.Node]) -> bool | None:
        """Follow these statements; whether the last succeeds."""
        status: bool | None = None
        for one in statements:
            status = self.run(one)
        return status

    def run_redirected_statement(self, node: tree_sitter.Node) -> bool | None:
        """`body > file`."""
        body = node.child_by_field_name("body")
        for one in node.named_children:
            destination = one.child_by_field_name("destination")
            if destination is not None and self.source(one).lstrip("0123456789&")[:1] == ">":
                self.written.setdefault(self.joined(destination).text, self.line(one))
        return None if body is None else self.run(body)

    def run_subshell(self, node: tree_sitter.Node) -> None:
        """Commands whose assignments end with them: ( ... ), and each part of a pipeline."""
        before = dict(self.variables)
        with suppress(Leaving):
            self.run_each(node.named_children)
        self.variables = before

    run_pipeline = run_subshell

    def run_negated_command(self, node: tree_sitter.Node) -> bool | None:
        """`! command`."""
        return _negated(self.run(node.named_children[0]))

    def run_list(self, node: tree_sitter.Node) -> bool | None:
        """`left && right` and `left || right`."""
        left, right = node.named_children[0], node.named_children[-1]
        status = self.run(left)
        runs = status if any(one.type == "&&" for one in node.children) else _negated(status)
        if runs is None:
            self.branches(self.line(node), [lambda: self.run(right), lambda: None])
            return None
        return self.run(right) if runs else status

    def run_if_statement(self, node: tree_sitter.Node) -> None:
        """`if`, `elif`, `else`: the branch that is taken, or each that may be."""
        possible: list[Callable[[], object]] = []
        for condition, body in _branches(node):
            status = self.run_each(condition) if condition else True
            if status is not False:
                possible.append(partial(self.run_each, body))
            if status:
                break
        else:
            possible.append(lambda: None)
        self.branches(self.line(node), possible)

    def run_case_statement(self, node: tree_sitter.Node) -> None:
        """`case`: each of its branches may be taken."""
        items = [one for one in node.named_children if one.type == "case_item"]
        bodies = [[one for one in item.named_children if _is_statement(one)] for item in items]
        self.branches(self.line(node), [*(partial(self.run_each, one) for one in bodies), lambda: None])

    def run_for_statement(self, node: tree_sitter.Node) -> None:
        """A loop: what it changes is not known, and neither is its variable."""
        why = f"it changes in the loop of line {self.line(node)}"
        variable = node.child_by_field_name("variable")
        if variable is not None:
            self.variables[self.source(variable)] = Word(f"${self.source(variable)}", why)
        start, found = dict(self.variables), list(self.found)
        self.branches(self.line(node), [lambda: self.loop(node), lambda: None], why)
        if self.variables != start:  # once more, because a variable may depend on one that changed
            self.found = found
            self.branches(self.line(node), [lambda: self.loop(node), lambda: None], why)

    run_while_statement = run_c_style_for_statement = run_for_statement

    def loop(self, node: tree_sitter.Node) -> None:
        """The statements of a loop, once."""
        self.run_each([x for x in node.named_children if _is_statement(x) or x.type == "do_group"])

    def branches(self, line: int, possible: list[Callable[[], object]], why: str = "") -> None:
        """Follow each of these; a variable that they leave at different values is unknown after them.

        One that ends the script, or the function, is not among what follows.
        """
        start, ends = self.variables, list[dict[str, Value]]()
        for run in possible:
            self.variables = dict(start)
            with suppress(Leaving):
                run()
                ends.append(self.variables)
        if not ends:
            raise Leaving
        self.variables = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            values = [end.get(name) for end in ends]
            if all(one == values[0] for one in values) and values[0] is not None:
                self.variables[name] = values[0]
            else:
                reason = why or f"it depends on the condition in line {line}"
                self.variables[name] = Word(f"${name}", reason, any(map(_is_many, values)))

    def run_function_definition(self, node: tree_sitter.Node) -> bool:
        """A function, which is followed where it is called."""
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[self.source(name)] = (body, self.place)
        return True

    def run_variable_assignment(self, node: tree_sitter.Node) -> bool:
        """`name=value`, `name=(value value)`, `name+=value`."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return True
        name = self.source(target)
        if target.type == "subscript":
            name = name.partition("[")[0]
            self.variables[name] = Word(f"${name}", f"line {self.line(node)} sets one element of the array")
            return True
        new: Value = EMPTY
        if value is not None and value.type == "array":
            parts = [one for one in value.named_children if one.type != "comment"]
            new = tuple(word for one in parts for word in self.words(one))
        elif value is not None:
            new = self.joined(value)
        if any(one.type == "+=" for one in node.children):
            new = _appended(self.variables.get(name, () if isinstance(new, tuple) else EMPTY), new)
        self.variables[name] = new
        return True

    def run_declaration_command(self, node: tree_sitter.Node) -> bool:
        """`export`, `declare`, `local`, `readonly`."""
        is_export = self.source(node).startswith("export")
        is_reference = re.match(r"(local|declare|typeset)\s+-\w*n", self.source(node)) is not None
        for one in node.named_children:
            if one.type == "variable_assignment":
                self.run(one)
            name = one.child_by_field_name("name") if one.type == "variable_assignment" else one
            if is_export and name is not None:
                self.exported.add(self.source(name))
            if is_reference and one.type == "variable_assignment":  # what it names may change from here on
                self.lose(f"line {self.line(node)} sets a variable by its name")
        return True

    def lose(self, why: str) -> None:
        """No variable of the script is known from here on."""
        self.variables = {name: Word(f"${name}", why) for name in self.variables}
        self.lost = why

    def run_unset_command(self, node: tree_sitter.Node) -> bool:
        """`unset name`."""
        for one in node.named_children:
            self.variables.pop(self.source(one), None)
        return True

    def run_test_command(self, node: tree_sitter.Node) -> bool | None:
        """`[ ... ]` and `[[ ... ]]`."""
        return self.holds(node.named_children[0]) if node.named_children else None

    def run_compound_statement(self, node: tree_sitter.Node) -> bool | None:
        """`{ ...; }`; the variables of an arithmetic `(( ... ))` are not followed."""
        if not node.children or node.children[0].type != "((":
            return self.run_each(node.named_children)
        why = f"the arithmetic of line {self.line(node)} may change it"
        for one in nodes(node):
            if one.type == "variable_name":
                self.variables[self.source(one)] = Word(f"${self.source(one)}", why)
        return None

    def run_command(self, node: tree_sitter.Node) -> bool | None:
        """A command: one of the shell's own, a function, or a program."""
        self.followed += 1
        if self.followed > MOST:
            raise TooLong
        given = [one for one in node.named_children if one.type == "variable_assignment"]
        parts = [one for one in node.named_children if one not in given and "redirect" not in one.type]
        words = tuple(word for one in parts for word in self.words(one))
        if not words:
            return None
        name, arguments = words[0].text, words[1:]
        line = self.line(node)
        if name in ("exit", "return"):
            raise Leaving
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions and self.depth < DEEPEST:
            self.call(name, arguments)
            return None
        if name == "set" and "--" in (texts := [one.text for one in arguments]):
            self.arguments = arguments[texts.index("--") + 1 :]
        elif name == "shift" and self.arguments is not None:
            self.arguments = self.arguments[1:]
        elif name in READERS or (name == "printf" and arguments[:1] == (Word("-v"),)):
            for named in (one.text for one in arguments if one.text.isidentifier()):
                self.variables[named] = Word(f"${named}", f"{name} sets it in line {line}")
        elif name == "let":
            for changed in re.findall(r"[A-Za-z_]\w*", " ".join(one.text for one in arguments)):
                self.variables[changed] = Word(f"${changed}", f"let may change it in line {line}")
        elif (text := self.handed_over(name, arguments)) is not None:
            self.hand_over(text, line, stays=name in STAYING)
        elif name in ("source", ".") and arguments and not HARMLESS.search(arguments[0].text):
            self.lose(f"line {line} reads {arguments[0].text}, which is not found here")
        else:
            before = dict(self.variables)
            for one in given:
                self.run(one)
            names = self.exported | {self.source(one.named_children[0]) for one in given}
            values = [(one, self.variables[one]) for one in sorted(names) if one in self.variables]
            self.variables = before
            known = ((one, x.text) for one, x in values if isinstance(x, Word) and not x.unknown)
            self.found.append(Command(words, line, tuple(known)))
        return None

    def call(self, name: str, arguments: tuple[Word, ...]) -> None:
        """Follow a function of the script."""
        body, place = self.functions[name]
        before = self.arguments, self.place
        self.arguments, self.place = arguments, place
        local = {
            self.source(inner)
            for one in nodes(body)
            if one.type == "declaration_command" and self.source(one).startswith(("local", "declare"))
            for inner in [x.child_by_field_name("name") or x for x in one.named_children]
            if inner.type == "variable_name"
        }
        outer = {one: self.variables[one] for one in local if one in self.variables}
        self.depth += 1
        with suppress(Leaving):
            self.run(body)
        self.depth -= 1
        self.arguments, self.place = before
        rest = {one: value for one, value in self.variables.items() if one not in local}
        self.variables = {**rest, **outer}

    def handed_over(self, name: str, arguments: tuple[Word, ...]) -> Word | None:
        """The text that `eval`, `bash -c` or `source` is given."""
        if name == "eval":
            return joined(arguments)
        options = [one.text for one in arguments]
        if name in STAYING:
            text = self.sourced(options[0]) if options and not arguments[0].unknown else None
            return None if text is None else Word(text.encode(errors="replace").decode("latin-1"))
        is_shell = name.rpartition("/")[2] in ("bash", "sh")
        given = (i + 1 for i, one in enumerate(options[:-1]) if is_shell and re.fullmatch(r"-\w*c", one))
        return next((arguments[i] for i in given), None)

    def hand_over(self, text: Word, line: int, stays: bool) -> None:
        """Follow a text. What it sets stays, unless it is given to a shell of its own."""
        if self.depth >= DEEPEST:
            return
        variables = dict(self.variables)
        self.depth += 1
        self.read(text.text.encode("latin-1"), line, is_handed_over=True)
        self.depth -= 1
        if not stays:
            self.variables = variables

    # Conditions.

    def holds(self, node: tree_sitter.Node) -> bool | None:
        """Whether a condition holds; None if that is not known, or not followed."""
        parts = [one for one in node.children if one.type not in ("(", ")")]
        if node.type == "parenthesized_expression":
            return self.holds(parts[0])
        if node.type == "unary_expression" and len(parts) == 2:
            if parts[0].type == "!":
                return _negated(self.holds(parts[1]))
            value = self.joined(parts[1])
            if value.unknown or self.source(parts[0]) not in ("-z", "-n"):
                return None
            return (value.text == "") == (self.source(parts[0]) == "-z")
        if node.type != "binary_expression" or len(parts) != 3:
            return None
        sign = self.source(parts[1])
        if sign in ("&&", "||"):
            found = {self.holds(parts[0]), self.holds(parts[2])}
            decided = sign == "||"
            return decided if decided in found else None if None in found else not decided
        left, right = self.joined(parts[0]), self.joined(parts[2])
        if left.unknown or right.unknown or parts[2].type not in ("string", "raw_string", "number", "word"):
            return None
        if sign in ("=", "==", "!="):
            return (left.text == right.text) == (sign != "!=")
        with suppress(KeyError, ValueError):
            return ORDERS[sign](int(left.text), int(right.text))
        return None


def _is_many(value: Value | None) -> bool:
    """Whether a value may be several words of a command, or an option."""
    if not isinstance(value, Word):
        return value is not None
    return value.is_many or value.text[:1] in ("-", "+") or bool(re.search(r"\s|=", value.text))


def _negated(status: bool | None) -> bool | None:
    return None if status is None else not status


def _appended(old: Value, new: Value) -> Value:
    """`old+=new`. A text that is added to an array is added to its first element."""
    if isinstance(new, tuple):
        return (old if isinstance(old, tuple) else (old,)) + new
    if isinstance(old, tuple):
        return ((old[0] if old else EMPTY).then(new), *old[1:])
    return old.then(new)


def _is_statement(node: tree_sitter.Node) -> bool:
    return node.type.endswith(("command", "statement", "assignment", "list", "pipeline", "subshell"))


def _branches(node: tree_sitter.Node) -> Iterator[tuple[list[tree_sitter.Node], list[tree_sitter.Node]]]:
    """The condition and the statements of each branch of an `if`; `else` has no condition."""
    condition, body, is_body = list[tree_sitter.Node](), list[tree_sitter.Node](), node.type == "else_clause"
    more = list[tree_sitter.Node]()
    for one in node.children:
        if one.type == "then":
            is_body = True
        elif one.type in ("elif_clause", "else_clause"):
            more.append(one)
        elif one.is_named:
            (body if is_body else condition).append(one)
    yield condition, body
    for one in more:
        yield from _branches(one)
