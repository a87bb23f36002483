"""Write the tables of docs/ that are made from the code, between their begin and end marks.

python tools/generate_docs.py [--check]        --check: write nothing, fail if a table is out of date
"""

import ast
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inferd._native.refusal import refusal_table  # noqa: E402
from inferd.server.engine.config.parameters import PARAMETERS  # noqa: E402
from inferd.server.engine.config.refused import CARRIED, ON_DEVICES, REFUSED  # noqa: E402
from inferd.server.errors import Status  # noqa: E402
from inferd.server.settings import sections, written  # noqa: E402

PAGES = [ROOT / "docs" / name for name in ("configuration.md", "operations.md")]
MARKED = re.compile(r"(<!-- begin (\w+):[^\n]*-->\n).*?(<!-- end \2 -->)", re.DOTALL)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def refused() -> str:
    return table(("field", "why", "instead"), [(f"`{f.path}`", f.why, f.instead) for f in REFUSED])


def carried() -> str:
    fields = (*CARRIED, *(field for each in ON_DEVICES.values() for field in each))
    return table(("field", "why it has no effect"), [(f"`{field.path}`", field.why) for field in fields])


def parameters() -> str:
    written = {True: "true", False: "false"}
    rows = [
        (f"`{p.name}`", f"`{written[p.default] if isinstance(p.default, bool) else p.default}`", p.meaning)
        for p in PARAMETERS
    ]
    return table(("parameter", "default", "meaning"), rows)


def options() -> str:
    """The fields of Options in their parts, with their defaults and texts: where a field has none, that below it."""
    tree = ast.parse((ROOT / "server" / "settings" / "options.py").read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    meanings = {
        ast.unparse(field.target): str(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    parts = []
    for heading, fields in sections():
        rows = []
        for field in fields:
            default = written(field.default)
            meaning = " ".join(field.metadata.get("help", meanings.get(field.name)).split())
            rows.append((f"`--{field.name.replace('_', '-')}`", f"`{default}`" if default else "", meaning))
        parts.append(f"**{heading}**\n\n{table(('option', 'default', 'meaning'), rows)}")
    return "\n" + "\n".join(parts) + "\n"


def reasons() -> str:
    """The table of refusals."""
    rows = [(f"`{name}`", Status(code).name, "yes" if retry else "", why) for name, code, retry, why in refusal_table()]
    return table(("reason", "status", "`RetryInfo`", "meaning, and what helps"), rows)


TABLES = {"reasons": reasons, "refused": refused, "carried": carried, "options": options, "parameters": parameters}


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        written = MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)
        if "--check" not in sys.argv:
            page.write_text(written)
        elif written != text:
            raise SystemExit(f"{page} is out of date: run python tools/generate_docs.py")


if __name__ == "__main__":
    main()
