"""A bounded sandbox for Jinja templates that come with model files.

A template comes from whoever made the file, so it is run like a stranger's program (CVE-2024-34359): in
Jinja's sandbox, with the filters, tests and methods that are listed here and no others, and with bounds that
the sandbox lacks:

- Values. A value that the template makes, a text or a nested list, has at most `MAX_SIZE` characters and
  elements. This is checked wherever values are made (literals, operators, filters, calls), and beforehand
  where they multiply (`*`, `join`, `replace`, `indent`, `format`).
- Work. Values made, texts written and turns of loops count against `MAX_WORK`; all together have `MAX_TIME_S`
  of the processor.
"""

from __future__ import annotations

import functools
import json
import re
import time
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import ext, filters, nodes, runtime, sandbox, utils
from jinja2.visitor import NodeTransformer

MAX_SIZE: Final = 1 << 22
"""Largest value, and longest text of a conversation [characters]."""

ELEMENT: Final = 16
"""The size of an element of a list or mapping, beside its own text [characters]."""

MAX_WORK: Final = 1 << 24
"""Most that is done in all: `STEP` for a step, 2 for an element of a list, 1 for 8 characters."""

STEP: Final = 32

MAX_TIME_S: Final = 5.0
"""Processor time of one rendering [s]."""

MAX_DEPTH: Final = 64
"""Deepest nesting of lists and mappings."""

MAX_BITS: Final = 3000
"""Longest whole number [bits]."""


class BoundsError(Exception):
    """The template asked for more than it may have."""


class Refusal(Exception):
    """The template called `raise_exception`."""


class Program:
    """A template, ready to run.

    Raises:
        Exception: It is no template; of many kinds, as those of `run`.
    """

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)

    def run(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template makes.

        Raises:
            Refusal: The template refuses the variables.
            Exception: It fails; of any kind.
        """
        budget = _Budget()
        token = _budget.set(budget)
        try:
            budget.make(list(variables.values()))
            pieces, length = [], 0
            for piece in self._template.generate(dict(variables)):
                length += len(piece)
                _check_size(length)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _budget.reset(token)


# -- bounds ----------------------------------------------------------------------------------------


class _Budget:
    """Counts what one rendering has used."""

    def __init__(self) -> None:
        self._left = MAX_WORK
        self._end = time.thread_time() + MAX_TIME_S

    def spend(self, n_elements: int = 0, n_characters: int = 0) -> None:
        """Count one step.

        Raises:
            BoundsError: There were too many, or they took too long.
        """
        self._left -= STEP + 2 * n_elements + n_characters // 8
        if self._left < 0 or time.thread_time() > self._end:
            raise BoundsError(f"it takes more than {MAX_WORK:,} steps or {MAX_TIME_S:g} s")

    def make(self, value: Any, has_new_text: bool = True) -> Any:
        """Return a value that the template has made, once it is found small enough.

        Args:
            value: The value.
            has_new_text: Whether the texts in a list were made with it.
        """
        if isinstance(value, str):
            _check_size(len(value))
            self.spend(0, len(value))
        else:
            size, n_elements = _measure(value)
            self.spend(n_elements, size if has_new_text else 0)
        return value

    def make_list(self, values: Iterable[Any]) -> list[Any]:
        """Return a list of values that come one by one."""
        found: list[Any] = []
        total = 0
        for value in values:
            size, n_elements = _measure(value)
            self.spend(n_elements)
            total += size
            _check_size(total)
            found.append(value)
        return found


_budget: ContextVar[_Budget] = ContextVar("_budget")


def _check_size(size: int) -> None:
    """Raise a BoundsError for a value of this size if it is too large."""
    if size > MAX_SIZE:
        raise BoundsError(f"a value or the text has more than {MAX_SIZE:,} characters")


def _measure(value: Any) -> tuple[int, int]:
    """Return the size of a value, and its elements, each counted as often as it is met.

    Raises:
        BoundsError: It is too large or too deep.
    """
    size = n_elements = 0
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        n_elements += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            todo += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int):
            # Digits are not asked for: those of a large number take long.
            if value.bit_length() > MAX_BITS:
                raise BoundsError(f"a number has more than {MAX_BITS:,} bits")
            size += value.bit_length() // 3
        elif isinstance(value, utils.Namespace):
            todo.append((_attributes(value), depth + 1))
        _check_size(size + ELEMENT * (n_elements + len(todo)))
        if depth > MAX_DEPTH:
            raise BoundsError(f"a value is nested more than {MAX_DEPTH} deep")
    return size + ELEMENT * n_elements, n_elements


def _size(value: Any) -> int:
    return _measure(value)[0]


def _attributes(namespace: Any) -> dict[str, Any]:
    """Return the values of a namespace; it may hold itself, which is found by the depth."""
    attributes: dict[str, Any] = namespace._Namespace__attrs
    return attributes


# -- filters, methods and functions ----------------------------------------------------------------


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as Hugging Face writes it: nothing is escaped for HTML."""
    size, n_elements = _measure(value)
    width = len(indent) if isinstance(indent, str) else min(indent or 0, MAX_SIZE)
    _check_size(size + n_elements * (MAX_DEPTH * width + sum(map(len, separators or ()))))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _from_json(text: Any) -> Any:
    return json.loads(str(text))


def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    budget = _budget.get()
    items = value
    if attribute is not None:
        items = map(filters.make_attrgetter(environment, attribute), value)
    texts = [str(budget.make(item)) for item in budget.make_list(items)]
    separator = str(d)
    _check_size(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + len(new) * text.count(old))
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text, by = str(text), width if isinstance(width, str) else " " * min(int(width), MAX_SIZE)
    _check_size(len(text) + len(by) * (text.count("\n") + 1))
    return filters.do_indent(text, by, first, blank)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 20:
        raise BoundsError(f"round to {precision} digits; at most 20 are allowed")
    return filters.do_round(value, precision, method)


def _sum(
    environment: jinja2.Environment, values: Iterable[Any], attribute: Any = None, start: float = 0
) -> Any:
    if not isinstance(start, int | float):
        raise BoundsError("a sum of anything but numbers")
    return filters.sync_do_sum(environment, values, attribute, start)


def _raise_exception(message: Any) -> str:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100:
        raise BoundsError("a format of a date has more than 100 characters")
    return datetime.now().strftime(form)


def _format(form: str, *args: Any, **kwargs: Any) -> str:
    """Return what `str.format` does, for fields that are names or numbers alone."""
    if re.search(r"\{\w*[^\w{}]", form):
        raise BoundsError("format of a field that is more than a name")
    size = sum(map(_size, (*args, *kwargs.values())))
    _check_size(len(form) + form.count("{") * size)
    return form.format(*args, **kwargs)


def _bounded(function: Callable[..., Any], has_new_text: bool = True) -> Callable[..., Any]:
    """Return a function with its arguments and result checked; what it yields one by one becomes a list.

    The arguments are checked anew because a namespace in them may have grown.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        for value in (*args, *kwargs.values()):
            budget.spend(_measure(value)[1])
        result = function(*args, **kwargs)
        if isinstance(result, Iterator | KeysView | ValuesView | ItemsView):
            return budget.make_list(result)
        return budget.make(result, has_new_text)

    return checked


_KEPT_FILTERS: Final = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
"""Jinja's filters that a template may use."""

_OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "from_json": _from_json,
    "indent": _indent,
    "join": jinja2.pass_environment(_join),
    "replace": _replace,
    "round": _round,
    "safe": str,
    "sum": jinja2.pass_environment(_sum),
    "tojson": _tojson,
}
"""Filters in place of Jinja's, and beside them."""

_REFUSED_TESTS: Final = ("callable", "filter", "test")

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "dict": dict,
    "namespace": utils.Namespace,
    "raise_exception": _raise_exception,
    "range": sandbox.safe_range,
    "strftime_now": _strftime_now,
}
"""Functions that a template may call."""

_METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset((
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    )),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
}  # fmt: skip
"""Methods that a template may call, by the type that has them."""

_CALLED: Final = (jinja2.Undefined, runtime.LoopContext, runtime.Macro, runtime.BlockReference)
"""Objects of the template itself that it may call."""


# -- checks put into a template --------------------------------------------------------------------


class _Generation(ext.Extension):
    """The tag `generation`, which marks the assistant's text for training and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node:
        """Return the statements between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Checks(NodeTransformer):
    """Sends the values that a template makes through filters that check them."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Check and count what is written, the template's own text too."""
        self.generic_visit(node)
        node.nodes = [_filtered(child, "_written") for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count the turns."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        """Check the parts before they are put together."""
        self.generic_visit(node)
        return _filtered(_placed(nodes.List(node.nodes), node), "join")

    def visit_List(self, node: nodes.List) -> Any:
        """Check the list."""
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> Any:
        """Check the mapping."""
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> Any:
        """Check the tuple, unless it is the target of a loop or a `set`."""
        self.generic_visit(node)
        return _filtered(node, "_made") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> Any:
    return _placed(nodes.Filter(node, name, [], [], None, None), node)


def _placed(node: Any, like: nodes.Node) -> Any:
    """Give a new node the line of another."""
    return node.set_lineno(like.lineno).set_environment(like.environment)


# The filters of `_Checks`. Those that take the context are not computed ahead, by the compiler.


@jinja2.pass_context
def _made(_: runtime.Context, value: Any) -> Any:
    return _budget.get().make(value, has_new_text=False)


@jinja2.pass_context
def _written(_: runtime.Context, value: Any) -> str:
    return str(_budget.get().make(value))


@jinja2.pass_context
def _turns(_: runtime.Context, values: Any) -> Any:
    """Return the values of a loop, so that each turn is counted; a sequence, as `loop.length` wants one."""
    found = list(values)
    _budget.get().spend(len(found))
    return _Counted(found)


class _Counted(Sequence[Any]):
    """A list of which each step through it is counted."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for value in self._values:
            budget.spend()
            yield value


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(sandbox.SandboxedEnvironment.default_binop_table)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checks().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, if its result cannot be too large."""
        size = _size(left) + _size(right)
        if operator == "%" and isinstance(left, str):
            raise BoundsError("the operator % on text")
        if operator == "*":
            factor, other = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(factor, int) and not isinstance(other, int | float):
                _check_size(size * max(factor, 1))
        elif operator == "**":
            if not all(isinstance(value, int | float) and abs(value) <= 256 for value in (left, right)):
                raise BoundsError("a power of numbers above 256")
        elif operator == "+":
            _check_size(size)
        return _budget.get().make(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded `str.format` in place of Python's."""
        if not (isinstance(value, types.BuiltinMethodType) and value.__name__ == "format"):
            return None
        return functools.partial(_format, value.__self__) if isinstance(value.__self__, str) else None

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, or one of the functions and methods that a template may call."""
        budget = _budget.get()
        budget.spend()
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(__obj, _CALLED) or isinstance(owner, runtime.LoopContext):
            return budget.make(__context.call(__obj, *args, **kwargs))
        # The compiler adds these for objects of its own.
        kwargs.pop("_block_vars", None)
        kwargs.pop("_loop_vars", None)
        if isinstance(__obj, types.BuiltinMethodType) and name in _METHODS.get(type(owner), ()):
            if isinstance(owner, str) and name == "replace":
                return _bounded(_replace)(owner, *args, **kwargs)
            if isinstance(owner, str) and name == "join":
                return _bounded(_join)(__self, args[0], owner)
            return _bounded(__obj)(*args, **kwargs)
        is_format = isinstance(__obj, functools.partial) and __obj.func is _format
        if is_format or any(__obj is function for function in _FUNCTIONS.values()):
            return _bounded(__obj)(*args, **kwargs)
        told = f"{type(owner).__name__}.{name}" if owner is not None else name or type(__obj).__name__
        raise BoundsError(f"a call of {told}, which templates may not use")


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        cache_size=0,
        extensions=[ext.loopcontrols, _Generation],
    )
    kept = {name: environment.filters[name] for name in _KEPT_FILTERS}
    environment.filters = {name: _bounded(function, has_new_text=False) for name, function in kept.items()}
    environment.filters |= {name: _bounded(function) for name, function in _OWN_FILTERS.items()}
    environment.filters |= {"_made": _made, "_turns": _turns, "_written": _written}
    for name in _REFUSED_TESTS:
        del environment.tests[name]
    environment.globals = dict(_FUNCTIONS)
    return environment
