"""The keys of PRIME-RL's configs, read from the classes in a checkout without an import of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = "prime_rl/configs/rl.py"
FOLDERS = ("src", "packages/prime-rl-configs/src")


def keys(checkout: Path) -> set[str]:
    """Every dotted key of an rl.toml; the keys of a list's tables have no number."""
    folders = [checkout / one for one in FOLDERS]
    root = next(one / ROOT for one in folders if (one / ROOT).is_file())
    return {*Reader(folders).fields(root, "RLConfig")}


class Reader:
    """The modules of a checkout, parsed once each."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.parsed = folders, dict[Path, dict[str, ast.AST]]()

    def names(self, file: Path) -> dict[str, ast.AST]:
        """What the names of a module stand for: a class, an import or the value of an alias."""
        if file not in self.parsed:
            found = self.parsed[file] = dict[str, ast.AST]()
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name] = node
                elif isinstance(node, ast.ImportFrom):
                    found |= {one.asname or one.name: node for one in node.names}
                elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                    found |= {ast.unparse(target): node.value}
        return self.parsed[file]

    def classes(self, file: Path, node: ast.AST | None) -> Iterator[tuple[Path, ast.ClassDef]]:
        """Yield the classes that an annotation names, with their files; those of a dict are left out."""
        if isinstance(node, ast.ClassDef):
            yield file, node
        elif isinstance(node, ast.ImportFrom):
            return
        elif isinstance(node, ast.Name):
            found = self.names(file).get(node.id)
            if isinstance(found, ast.ImportFrom):
                named = next(one.name for one in found.names if node.id in (one.asname, one.name))
                path = f"{(found.module or '').replace('.', '/')}.py"
                files = [one / path for one in self.folders if (one / path).is_file()]
                yield from (one for other in files for one in self.classes(other, ast.Name(named)))
            else:
                yield from self.classes(file, found)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("dict", "Literal", "ClassVar"):
            return
        elif node is not None:
            for child in ast.iter_child_nodes(node):
                yield from self.classes(file, child)

    def fields(self, file: Path, name: str, above: str = "") -> Iterator[str]:
        """Yield the keys of a class, of its bases and of its fields' classes, each below `above`."""
        for where, node in self.classes(file, ast.Name(name)):
            for base in node.bases:
                for inherited, one in self.classes(where, base):
                    yield from self.fields(inherited, one.name, above)
            for one in node.body:
                if not isinstance(one, ast.AnnAssign) or "ClassVar" in ast.unparse(one.annotation):
                    continue
                text = ast.unparse(one)
                given = [
                    x for x in ast.walk(one) if isinstance(x, ast.keyword) and x.arg == "validation_alias"
                ]
                aliases = [x.value for key in given for x in ast.walk(key) if isinstance(x, ast.Constant)]
                for key in aliases or [text.partition(":")[0]]:
                    inner = [*self.classes(where, one.annotation)]
                    yield f"{above}{key}"
                    for other, found in inner:
                        if found is not node:
                            yield from self.fields(other, found.name, f"{above}{key}.")
