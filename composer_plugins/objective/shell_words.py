"""The words of a shell script: quotes, variables, arrays and arithmetic, as bash expands them.

The text has a character for each byte (latin-1), because the positions of the grammar are in bytes.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import tree_sitter

PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(:?[-=+?])?")
CHANGE = re.compile(r"(%%?|##?|//?)")  # ${NAME%suffix}, ${NAME#prefix}, ${NAME/old/new}
PATTERN = re.compile(r"[^][\\'\"()]*")  # with * and ? alone
# $(dirname "$0"), $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd): the folder of the script.
_DIRNAME = r"\$\(\s*dirname\s+(--\s+)?\"?\$(0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(\[0\])?\})\"?\s*\)"
OWN_FOLDER = re.compile(
    rf"{_DIRNAME}|\$\(\s*cd\s+(--\s+)?\"?{_DIRNAME}\"?\s*(&?>\s*/dev/null\s*(2>&1\s*)?)?(&&|;)\s*pwd(\s+-P)?\s*\)"
)
SIMPLE = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])")
PLAIN = re.compile(r"[^'\"\\$`<>]+")
QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
BRACES = re.compile(r"(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
ESCAPED = ("$", '"', "\\", "`", "\n")  # in double quotes; a backslash before another sign stays
SUBSTITUTIONS = ("expansion", "command_substitution", "arithmetic_expansion", "process_substitution")


@dataclass(frozen=True)
class Word:
    """One word of a command. Where it is unknown, its text is, as far as it has to be, that of the script."""

    text: str
    unknown: str = ""  # why: "NAME is not set in the script"
    is_many: bool = field(default=False, compare=False)  # whether an unknown one may be several words

    def then(self, other: "Word") -> "Word":
        """This text and another behind it."""
        is_many = (self.is_many or other.is_many) and not (self.text and other.text)
        return Word(self.text + other.text, self.unknown or other.unknown, is_many)


Value = Word | tuple[Word, ...]  # of a variable, of an array
EMPTY = Word("")


class Place(NamedTuple):
    """A text, its first line in the script, and by their first byte the kind and end of its substitutions.

    All of a text that a command hands over is at the line of this command.
    """

    text: str
    first_line: int = 1
    is_handed_over: bool = False
    substitutions: Mapping[int, tuple[str, int]] = MappingProxyType({})


def nodes(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    """A node and all below it."""
    yield node
    for child in node.children:
        yield from nodes(child)


class Fields:
    """The words that one word of the script becomes: an array gives several, an empty one none."""

    def __init__(self, splits: bool) -> None:
        self.words: list[Word] = []
        self.open: Word | None = None
        self.splits, self.quoted = splits, False  # whether blanks in the value of a variable split it
        self.is_void = False  # whether the word has an empty array in it, and is no word if that is all

    def add(self, word: Word) -> None:
        """Append to the word that is being read."""
        self.open = (self.open or EMPTY).then(word)

    def close(self) -> None:
        """End the word that is being read, if there is one."""
        if self.open is not None and not (self.is_void and self.open == EMPTY):
            self.words.append(self.open)
        self.open, self.is_void = None, False

    def put(self, value: Value, is_all: bool = False) -> None:
        """Append the value of a variable; of an array the first element, or all, each a word of its own."""
        values = (value,) if isinstance(value, Word) else value if is_all else value[:1]
        self.is_void |= is_all and not values
        for number, one in enumerate(values):
            if number:
                self.close()
            if one.unknown or self.quoted or not self.splits:
                self.add(one)
                continue
            for part in re.findall(r"\s+|\S+", one.text):
                if part.isspace():
                    self.close()
                else:
                    self.add(Word(part))


class Words:
    """Expands words. It holds the variables and arguments that a script has at a place of its text."""

    def __init__(self, folder: str) -> None:
        self.place = Place("")
        self.folder = folder  # of the script
        self.lost = ""  # why any variable may be set by now that the script itself does not set
        self.variables: dict[str, Value] = {}
        self.arguments: tuple[Word, ...] | None = None  # of the script itself: not known

    def source(self, node: tree_sitter.Node) -> str:
        """The text of a node. A blank before the sign $ belongs to its node in this grammar."""
        return self.place.text[node.start_byte : node.end_byte].lstrip()

    def joined(self, node: tree_sitter.Node) -> Word:
        """The word as an assignment takes it: it is not split."""
        return joined(self.words(node, splits=False))

    def words(self, node: tree_sitter.Node, splits: bool = True) -> list[Word]:
        """The words that a word of the script becomes."""
        if splits and BRACES.search(QUOTED.sub("", self.source(node))):
            return [Word(self.source(node), "the shell makes several words of {...}: put it into quotes")]
        fields = Fields(splits)
        self.scan(node.start_byte, node.end_byte, fields)
        fields.close()
        return fields.words

    def scan(self, at: int, end: int, fields: Fields) -> None:
        """Read the text between two places, its quotes, and what it substitutes."""
        text = self.place.text
        while at < end:
            stop = at + 1
            if at in self.place.substitutions:
                kind, stop = self.place.substitutions[at]
                self.substitute(kind, at, stop, fields)
            elif text[at] == "'" and not fields.quoted:
                stop = text.index("'", stop) + 1
                fields.add(Word(text[at + 1 : stop - 1]))
            elif text[at] == '"':
                fields.quoted = not fields.quoted
                fields.add(EMPTY)
            elif text[at] == "\\" and (not fields.quoted or text[stop : stop + 1] in ESCAPED):
                stop += 1
                fields.add(Word(text[at + 1 : stop].replace("\n", "")))
            elif text.startswith("$'", at) and not fields.quoted:
                stop = text.index("'", at + 2) + 1
                literal = text[at + 2 : stop - 1]
                fields.add(Word(literal, "a $'...' has an escape in it" if "\\" in literal else ""))
            elif found := SIMPLE.match(text, at, end):
                stop = found.end()
                value = self.value(found[1])
                fields.put(self.unset(found[1]) if value is None else value, found[1] == "@")
            else:
                found = PLAIN.match(text, at, end)
                stop = found.end() if found else stop
                fields.put(Word(text[at:stop]))  # a default value has blanks that split it
            at = stop

    def value(self, name: str) -> Value | None:
        """The value of a variable or of an argument; None if the script does not set it."""
        given = self.arguments
        if name in ("@", "*"):
            return given or ()
        if name == "#":
            return None if given is None else Word(str(len(given)))
        if name.isdecimal() and name != "0":
            return None if given is None else given[int(name) - 1] if int(name) <= len(given) else EMPTY
        return self.variables.get(name)

    def unset(self, name: str) -> Value:
        """What stands for a variable that the script does not set; an array may be empty."""
        if self.value(name) == ():
            return ()
        if self.lost and name.isidentifier():
            return Word(f"${name}", self.lost)
        is_name = name.isidentifier()
        why = f"{name} is not set in the script" if is_name else f"${name} is known at its run only"
        return Word(f"${name}", why)

    def substitute(self, kind: str, start: int, stop: int, fields: Fields) -> None:
        """Append what ${...}, $((...)) or $(...) stands for."""
        text = self.place.text[start:stop]
        if kind == "arithmetic_expansion":
            return fields.add(self.arithmetic(text))
        if OWN_FOLDER.fullmatch(text):
            return fields.add(Word(self.folder))
        found = PARAMETER.match(text, 2)
        if kind != "expansion" or found is None:
            return fields.add(Word(text, f"the output of {' '.join(text.split())} is known at its run only"))
        prefix, name, index, sign = found.groups()
        value, is_whole = self.value(name), found.end() == len(text) - 1
        if value is None and self.lost and sign:  # a default value may not be the value
            return fields.add(Word(text, self.lost))
        is_empty = value in (EMPTY, (), (EMPTY,))
        is_missing = value is None or (is_empty and (sign or "").startswith(":"))
        if index is not None and index.isdecimal() and isinstance(value, tuple) and not prefix and is_whole:
            element: tuple[Word, ...] = value[int(index) :][:1]
            return fields.put(element)
        if index is not None and isinstance(value, Word) and value.unknown:
            return fields.put(value)
        change = CHANGE.match(text, found.end())
        if change and not prefix and index is None and isinstance(value, Word):
            return fields.put(self.changed(value, change[1], start + change.end(), stop - 1, text))
        if index not in (None, "@", "*") or prefix == "!" or not (is_whole or sign):
            return fields.add(Word(text, f"the expansion {text} is not followed"))
        if prefix == "#":
            known = value is not None and not (isinstance(value, Word) and value.unknown)
            length = len(value.text if isinstance(value, Word) else value or ())
            return fields.add(Word(str(length)) if known else Word(text, f"{name} is not known"))
        if not sign or (sign[-1] != "+" and not is_missing) or sign[-1] == "?":
            value = self.unset(name) if value is None else value
            if (index or name) == "*" and not isinstance(value, Word):
                value = joined(tuple(value))
            return fields.put(value, (index or name) == "@")
        if (sign[-1] == "+") == is_missing:
            return None
        if sign[-1] == "=":
            default = Fields(splits=False)
            self.scan(start + found.end(), stop - 1, default)
            self.variables[name] = default.open or EMPTY
        return self.scan(start + found.end(), stop - 1, fields)

    def changed(self, value: Word, sign: str, at: int, end: int, text: str) -> Word:
        """The value without its shortest (%, #) or longest (%%, ##) end or beginning, or with a new text."""
        pattern, _, new = self.place.text[at:end].partition("/" if "/" in sign else "\0")
        old, by = self.part(pattern, at), self.part(new, at + len(pattern) + 1)
        unknown = value.unknown or old.unknown or by.unknown
        matches = re.compile(re.escape(old.text).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
        replaces_nothing = "/" in sign and (
            matches.fullmatch("") or pattern[:1] in ("#", "%") or "&" in by.text
        )
        if unknown or replaces_nothing or not PATTERN.fullmatch(pattern + old.text):
            return Word(text, unknown or f"the expansion {text} is not followed")
        if "/" in sign:
            return Word(matches.sub(lambda _: by.text, value.text, count=len(sign) == 1))
        cuts = range(len(value.text) + 1)
        if sign[0] == "%":
            order = cuts if sign == "%%" else cuts[::-1]
            return Word(value.text[: next((x for x in order if matches.fullmatch(value.text[x:])), None)])
        order = cuts[::-1] if sign == "##" else cuts
        return Word(value.text[next((x for x in order if matches.fullmatch(value.text[:x])), 0) :])

    def part(self, text: str, at: int) -> Word:
        """A part of an expansion, itself expanded, whose first byte is at this place."""
        fields = Fields(splits=False)
        self.scan(at, at + len(text), fields)
        return fields.open or EMPTY

    def arithmetic(self, text: str) -> Word:
        """The number that $((...)) stands for."""
        inner = re.sub(r"\$\{?(\w+)\}?", r"\1", text[3:-2]).strip()
        try:
            return Word(str(self.number(ast.parse(inner, mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return Word(text, f"{text} cannot be computed here")

    def number(self, node: ast.expr) -> int:
        """The integer that an expression has in bash, which divides towards zero."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            value = self.variables.get(node.id)
            if isinstance(value, Word) and not value.unknown and re.fullmatch(r"-?\d+", value.text):
                return int(value.text)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.number(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left), self.number(node.right)
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
                case ast.Div() | ast.Mod():
                    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
                    return quotient if isinstance(node.op, ast.Div) else left - right * quotient
        raise ValueError("not an integer")


def joined(words: Sequence[Word]) -> Word:
    """These words as one, with blanks between them."""
    return Word(" ".join(one.text for one in words), next(filter(None, (one.unknown for one in words)), ""))
