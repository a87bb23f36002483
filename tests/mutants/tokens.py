"""The tokens of Cython sources, and the statements that they form.

The scanner knows as much of the language as mutants need: strings, comments and brackets, so that it never takes a part
of a text for code, and where a statement ends.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SCANNER = re.compile(
    r"""
      (?P<space>[ \t]+|\\\n)
    | (?P<comment>\#[^\n]*)
    | (?P<newline>\n)
    | (?P<string>[bBuUrRfFcC]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"
        |'(?:\\.|[^\\'\n])*'|"(?:\\.|[^\\"\n])*"))
    | (?P<number>0[xX][0-9a-fA-F_]+[uUlL]*|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?[uUlLjJ]*)
    | (?P<name>\w+)
    | (?P<operator>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|==|!=|<=|>=|<<|>>|//|\*\*|[-+*/%&|^@]=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
KEYWORDS = frozenset(keyword.kwlist) - {"True", "False", "None"} | {"cdef", "cpdef", "ctypedef", "cimport"}


@dataclass(frozen=True)
class Token:
    """One, from `start` to `end` of the source."""

    kind: str
    text: str
    start: int
    end: int
    depth: int  # brackets around it; those of a bracket itself are those around the pair

    @property
    def is_operand(self) -> bool:
        """Whether a value may end with it, so that `<` behind it compares, and begins no cast."""
        if self.kind in ("number", "string"):
            return True
        return self.text in (")", "]", "}") or (self.kind == "name" and self.text not in KEYWORDS)


@dataclass
class Statement:
    """A simple statement, or the first line of a compound one."""

    tokens: list[Token]
    line: int
    indent: int
    function: str = ""  # that it stands in; empty: none
    is_last: bool = field(default=False)  # of that function

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def end(self) -> int:
        return self.tokens[-1].end

    @property
    def first(self) -> str:
        return self.tokens[0].text

    @property
    def is_header(self) -> bool:
        """Whether statements belong to it."""
        return self.tokens[-1].text == ":" and self.tokens[-1].depth == 0

    @property
    def called(self) -> str:
        """The name before its first bracket."""
        for before, token in itertools.pairwise(self.tokens):
            if token.text == "(":
                return before.text
        return ""

    @property
    def is_function(self) -> bool:
        words = [token.text for token in self.tokens[:3]]
        if not self.is_header or words[0] not in ("def", "cdef", "cpdef", "async"):
            return False
        return not {"class", "struct", "union", "enum", "extern", "packed"} & set(words[1:]) and bool(self.called)


def tokens_of(text: str) -> Iterator[Token]:
    """All but spaces and comments; newlines inside brackets are spaces."""
    depth = 0
    for found in SCANNER.finditer(text):
        kind, token = found.lastgroup or "", found[0]
        if kind in ("space", "comment") or (kind == "newline" and depth):
            continue
        if kind == "operator" and token in ")]}":
            depth -= 1
        yield Token(kind, token, found.start(), found.end(), depth)
        if kind == "operator" and token in "([{":
            depth += 1


def statements_of(text: str) -> list[Statement]:
    """The statements in their order, each with the function that it stands in."""
    statements: list[Statement] = []
    tokens: list[Token] = []
    for token in [*tokens_of(text), Token("newline", "\n", len(text), len(text), 0)]:
        if token.kind != "newline":
            tokens.append(token)
        elif tokens:
            begin = tokens[0].start
            line = text.count("\n", 0, begin) + 1
            statements.append(Statement(tokens, line, begin - (text.rfind("\n", 0, begin) + 1)))
            tokens = []
    around: list[Statement] = []
    last: dict[int, Statement] = {}
    for statement in statements:
        while around and statement.indent <= around[-1].indent:
            around.pop()
        if around:
            statement.function = around[-1].called
            last[id(around[-1])] = statement
        if statement.is_function:
            around.append(statement)
    for statement in last.values():
        statement.is_last = True
    return statements
