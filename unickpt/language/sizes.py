"""Sizes of axes, from what is known of a model: ``heads / groups``. Whole numbers, and nothing that could run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from unickpt.errors import LanguageError

_LONGEST = 200
_LARGEST = 1 << 62


def evaluate(text: str | int, known: Mapping[str, int]) -> int:
    """The value of a formula of names, whole numbers, ``+ - * /`` and parentheses. Division has to come out even.

    Args:
        text: the formula.
        known: values of names.

    Raises:
        LanguageError: it is none, a name is not known, or the result is no size.
    """
    if isinstance(text, int):
        return text
    if len(text) > _LONGEST:
        raise LanguageError(f"a formula of {len(text)} characters; {_LONGEST} are enough for any")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value = _value(tree, known, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise LanguageError(f"{text!r} is no formula of names, whole numbers and + - * / ( )") from err
    if not 0 <= value < _LARGEST:
        raise LanguageError(f"{text!r} is {value}, which is no size")
    return value


def names_in(text: str | int) -> set[str]:
    """Names that a formula asks for."""
    if isinstance(text, int):
        return set()
    try:
        return {node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise LanguageError(f"{text!r} is no formula of names, whole numbers and + - * / ( )") from err


def _value(node: ast.expr, known: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise LanguageError(f"{text!r}: {node.id!r} is not known; known are {', '.join(sorted(known)) or 'none'}")
        return known[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, known, text), _value(node.right, known, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            if right == 0 or left % right:
                raise LanguageError(f"{text!r}: {left} / {right} is no whole number")
            return left // right
    raise LanguageError(f"{text!r} is no formula of names, whole numbers and + - * / ( )")
