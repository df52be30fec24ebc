"""Sizes of axes, from what is known of a model: ``heads / groups``. Whole numbers, and nothing that could run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

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
    value = _value(_parsed(text), known, text)
    if not 0 <= value < _LARGEST:
        raise LanguageError(f"{text!r} is {value}, which is no size")
    return value


def names_in(text: str | int) -> set[str]:
    """Names that a formula asks for.

    Raises:
        LanguageError: it is none.
    """
    return set() if isinstance(text, int) else set(_names(_parsed(text), text))


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise LanguageError(f"a formula of {len(text)} characters; {_LONGEST} are enough for any")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise _none(text) from err


def _none(text: str) -> LanguageError:
    return LanguageError(f"{text!r} is no formula of names, whole numbers and + - * / ( )")


def _names(node: ast.expr, text: str) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        yield from _names(node.left, text)
        yield from _names(node.right, text)
    elif not (isinstance(node, ast.Constant) and type(node.value) is int):
        raise _none(text)


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
    raise _none(text)
