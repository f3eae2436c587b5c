"""KNOWN: public faults of serving engines, and what of ours stands against each kind. Facts and links; it switches nothing on and runs no test.

The records are in known.jsonl, one a line. A record is right only as long as what it names exists: `problems` says what does not.

python -m twinfer.invariants.faults.known FILE            writes FILE, docs/known_faults.md
python -m twinfer.invariants.faults.known --check FILE    exit status 1 when FILE is not what would be written
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.faults.catalogue import CATALOGUE
from twinfer.invariants.laws import LAWS
from twinfer.invariants.state import STATE_LAWS

RECORDS = Path(__file__).with_name("known.jsonl")
STATUSES = ("covered", "later", "not applicable")
KINDS = {
    "size": "A size taken from the wrong quantity",
    "edge": "One off at an end: of a page, a chunk, a context",
    "range": "Numbers beyond their range",
    "padding": "What padding holds and touches",
    "count": "Pages, slots and references that do not add up",
    "release": "Not given back, or given back twice",
    "reset": "A past that was not wiped",
    "sharing": "One thing with two owners",
    "order": "Done before what it depends on, or with what was true before",
    "paths": "Two ways to one result that differ",
    "progress": "Nothing moves any more",
    "containment": "One failure that reaches others, or that nobody is told of",
    "input": "Accepted though it can't work",
    "silence": "Dropped or assumed without a word",
    "meaning": "Right in shape, wrong in meaning",
}
SUBJECTS = ("hybrid models in the engine", "the HTTP server", "speculation", "quantised weights", "images in the prompt")
"""What a record may wait for."""
_TABLES = {
    "law": {law.name for law in LAWS} | {law.name for _, laws in STATE_LAWS for law in laws},
    "bound": {bound.name for bound in BOUNDS},
    "fault": {fault.name for fault in CATALOGUE},
}


@dataclass(frozen=True, slots=True)
class Known:
    """A public fault.

    id         of the record, unique
    link       issue or pull request where it is told
    engine     whose it was
    kind       of KINDS
    fault      one sentence: what was wrong
    status     of STATUSES: "covered" (by tests, laws or bounds, for the kind and not for this one case), "later" (what it speaks of does not exist
               here yet), "not applicable"
    by         "tests/a/test_b.py::test_c", "law:name", "bound:name", or "fault:name" of one in the catalogue, whose gates turn red; only where covered
    waits_for  of SUBJECTS; only where later
    why        one or two sentences: how it is covered, or why not
    """

    id: str
    link: str
    engine: str
    kind: str
    fault: str
    status: str
    by: tuple[str, ...]
    waits_for: str
    why: str


def read(file: Path = RECORDS) -> tuple[Known, ...]:
    """The records of a file, in its order. Raises ValueError with file and line for what is no record."""
    names = {field.name for field in fields(Known)}
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{number}: no JSON ({error})") from None
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{file}:{number}: a record has the fields {', '.join(sorted(names))}")
        found.append(Known(**{**values, "by": tuple(values["by"])}))
    return tuple(found)


def problems(records: Iterable[Known], checkout: Path | None = None) -> list[str]:
    """What is wrong with the records, one line each: a name that does not exist, a field that does not fit its status, a record twice.

    Tests are looked up in `checkout`, by reading their files and running none; without one, as in an installed package, they are not looked at.
    """
    records = tuple(records)
    named = {name for record in records for name in record.by}
    tests = None if checkout is None else _tests_in(checkout, {name.partition("::")[0] for name in named})
    missing = {name: what for name in named if (what := _missing(name, tests))}
    wrong = [f"{name} {value} is in {times} records" for name in ("id", "link") for value, times in _repeated([getattr(r, name) for r in records])]
    for record in records:
        faults = _misfits(record) + [f"{name}: {missing[name]}" for name in record.by if name in missing]
        wrong += [f"{record.id}: {fault}" for fault in faults]
    return wrong


def _repeated(values: Sequence[str]) -> list[tuple[str, int]]:
    return [(value, times) for value, times in Counter(values).items() if times > 1]


def _misfits(record: Known) -> list[str]:
    """Fields that contradict each other."""
    found = []
    if record.kind not in KINDS:
        found.append(f"kind {record.kind!r} is none of {', '.join(KINDS)}")
    if record.status not in STATUSES:
        found.append(f"status {record.status!r} is none of {', '.join(STATUSES)}")
    if bool(record.by) != (record.status == "covered"):
        found.append(f"{record.status}, by {list(record.by)}: what covers it is named where it is covered, and only there")
    if (record.waits_for in SUBJECTS) != (record.status == "later") or (record.waits_for and record.waits_for not in SUBJECTS):
        found.append(f"{record.status}, waits for {record.waits_for!r}: only what comes later waits, for one of {', '.join(SUBJECTS)}")
    if not record.link.startswith("https://"):
        found.append(f"link {record.link!r} is none")
    found += [f"{name} is empty" for name in ("id", "engine", "fault", "why") if not getattr(record, name)]
    return found


def _missing(name: str, tests: Mapping[str, frozenset[str]] | None) -> str:
    """Why what `by` names does not exist; "" if it does."""
    table, _, entry = name.partition(":")
    if table in _TABLES:
        return "" if entry in _TABLES[table] else f"there is no such {table}"
    path, _, test = name.partition("::")
    if not path.startswith("tests/") or not test.startswith("test_"):
        return "names no test, law, bound or fault"
    if tests is None:
        return ""
    if path not in tests:
        return "there is no such file"
    return "" if test in tests[path] else "there is no such test in the file"


def _tests_in(checkout: Path, paths: Iterable[str]) -> dict[str, frozenset[str]]:
    """Names of the test functions at the top level of each of the files that are there."""
    found = {}
    for path in paths:
        if path.endswith(".py") and (checkout / path).is_file():
            tree = ast.parse((checkout / path).read_text(encoding="utf-8"))
            found[path] = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return found


_HEAD = """<!-- Generated by: python -m twinfer.invariants.faults.known docs/known_faults.md; a test checks that it is current. -->

# Known faults of serving engines

Faults that public engines had, each with a link to where it is told, and what keeps its *kind* out of twinfer: tests that fail if it comes in, laws
that every plan is checked against, bounds that buffers are made from ([bounds.md](bounds.md)), and faults of the same kind that are put in on purpose
and must turn a gate red ([faults.md](faults.md)). A test checks that all of them exist. *Later* is what speaks of something that is not here yet.
"""


def page(records: Sequence[Known]) -> str:
    """docs/known_faults.md."""
    count = Counter(record.status for record in records)
    waiting = Counter(record.waits_for for record in records if record.waits_for)
    lines = [
        _HEAD,
        f"{len(records)} faults: " + ", ".join(f"{count[status]} {status}" for status in STATUSES) + ".",
        "",
        "| kind | faults | " + " | ".join(STATUSES) + " |",
        "|---|---|---|---|---|",
        *(_summary(kind, [record for record in records if record.kind == kind]) for kind in KINDS),
        "",
        "Later comes with: " + ", ".join(f"{subject} ({waiting[subject]})" for subject in SUBJECTS if waiting[subject]) + ".",
    ]
    for kind, title in KINDS.items():
        own = [record for record in records if record.kind == kind]
        lines += ["", f"## {title}", "", "| fault | whose | here | how |", "|---|---|---|---|", *map(_row, own)]
    return "\n".join(lines) + "\n"


def _summary(kind: str, own: Sequence[Known]) -> str:
    count = Counter(record.status for record in own)
    anchor = "".join(character for character in KINDS[kind].lower() if character.isalnum() or character == " ").replace(" ", "-")
    return f"| [{KINDS[kind]}](#{anchor}) | {len(own)} | " + " | ".join(str(count[status]) for status in STATUSES) + " |"


def _row(record: Known) -> str:
    state = f"later: {record.waits_for}" if record.waits_for else record.status
    names = ", ".join(f"{table} `{entry}`" if table in _TABLES else f"`{name}`" for name in record.by for table, _, entry in [name.partition(":")])
    how = record.why + (f"<br>{names}" if names else "")
    return f"| {record.fault} | [{record.engine}]({record.link}) | {state} | {how} |"


def main(arguments: list[str]) -> int:
    """Exit status: 0 written or current, 1 stale, 2 not understood."""
    text = page(read())
    match arguments:
        case ["--check", name]:
            file = Path(name)
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                print(f"{file} is not current; run: python -m twinfer.invariants.faults.known {file}", file=sys.stderr)
                return 1
        case [name] if not name.startswith("-"):
            Path(name).write_text(text, encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
