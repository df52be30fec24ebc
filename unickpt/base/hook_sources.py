"""Source text of the functions that hooks wrap, read from the files of a framework: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ReadText = Callable[[str], str | None]  # path below the folder that holds the framework's package -> its text


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function as its file has it.

    Attributes:
        text: with its decorators, as ``inspect.getsource`` returns it.
        parameters: names of its parameters.
    """

    text: str
    parameters: tuple[str, ...]


class SourceTree:
    """The modules of one version of a framework. Each is parsed once."""

    def __init__(self, read: ReadText) -> None:
        self._read = read
        self._modules: dict[str, tuple[str, ast.Module, bool] | None] = {}

    def function(self, module: str, attribute: str) -> FunctionSource | None:
        """Return ``function`` or ``Class.method`` of a module; None if it is not there, or not a function.

        Raises:
            SyntaxError, ValueError: the module cannot be parsed, or is not in UTF-8.
        """
        found = self._module(module)
        if found is None:
            return None
        text, tree, is_package = found
        scope: ast.AST = tree
        for name in attribute.split("."):
            named = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
            if not named:
                return self._imported(tree, module if is_package else module.rpartition(".")[0], attribute)
            scope = named[-1]
        if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
        lines = text.splitlines(keepends=True)[first - 1 : scope.end_lineno]
        return FunctionSource("".join(lines), _parameters(scope.args))

    def has(self, module: str) -> bool:
        """Return whether there is such a module."""
        return self._module(module) is not None

    def constants(self, module: str) -> dict[str, object]:
        """Return the names to which a module assigns literals, such as a version. Empty if there is no such module.

        Raises:
            SyntaxError, ValueError: as for ``function``.
        """
        found = self._module(module)
        statements = [] if found is None else [node for node in found[1].body if isinstance(node, ast.Assign)]
        return {
            target.id: node.value.value
            for node in statements
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
        }

    def _module(self, module: str) -> tuple[str, ast.Module, bool] | None:
        """Return text and tree of a module, and whether it is a package."""
        if module not in self._modules:
            path = module.replace(".", "/")
            texts = ((self._read(name), name) for name in (f"{path}.py", f"{path}/__init__.py"))
            found = next(((text, name) for text, name in texts if text is not None), None)
            self._modules[module] = found and (found[0], ast.parse(found[0]), found[1].endswith("__init__.py"))
        return self._modules[module]

    def _imported(self, tree: ast.Module, package: str, attribute: str) -> FunctionSource | None:
        """Return a function that a module imports by name from another one of its package."""
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and any(alias.name == attribute for alias in node.names):
                return self.function(f"{package}.{node.module}", attribute)
        return None


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    named = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return tuple(each.arg for each in named if each is not None)


def from_folders(folders: Sequence[Path]) -> ReadText:
    """Return the reader of a framework whose package lies in the first of some folders that has the file."""

    def read(path: str) -> str | None:
        file = next((folder / path for folder in folders if (folder / path).is_file()), None)
        return None if file is None else file.read_text(encoding="utf-8")

    return read
