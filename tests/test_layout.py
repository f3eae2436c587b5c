"""The house rules that a machine can check: packages, import arrows, no torch where none belongs. Not style, which ruff and mypy check."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
TOP = {name: folder for name, folder in FOLDERS.items() if name.count(".") <= 1}

# Who may import whom (besides itself): DESIGN's arrows, interface <- invariants <- engine <- {reference, kernels <- fast} <- the rest.
ARROWS: dict[str, set[str]] = {
    "twinfer": set(),
    "invariants": {"twinfer"},
    "engine": {"twinfer", "invariants"},
    "reference": {"twinfer", "invariants", "engine"},
    "kernels": {"twinfer", "invariants"},
    "fast": {"twinfer", "invariants", "engine", "kernels"},
    "golden": {"twinfer", "invariants", "engine", "reference", "fast"},
    "bench": {"twinfer", "invariants", "engine", "reference", "kernels", "fast", "golden"},
    "serve": {"twinfer", "invariants", "engine", "reference", "fast", "golden", "bench"},
}
SUBPACKAGES = set(ARROWS) - {"twinfer"}
# Leaves: checks of whole engines, which only tests, benchmarks and the command line import.
LEAVES: dict[str, set[str]] = {
    "invariants/gates": {"twinfer", "invariants", "engine", "reference", "fast", "golden"},
    "invariants/faults": {"twinfer", "invariants"},  # what they patch, they name
}
LEAF_USERS = {"golden", "bench", "serve"}


def code_files(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts]


def imported(file: Path) -> set[str]:
    """Names of twinfer modules that a file imports, anywhere but under `if TYPE_CHECKING`."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A probe is copied to a bare machine and runs there without the package.
            assert node.level == 0 or "probes" in file.parts, f"{file}: relative import"
            module = node.module or ""
            names.add(module)
            if module == "twinfer":
                names.update(f"twinfer.{a.name}" for a in node.names if a.name in SUBPACKAGES)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return names


def package_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return part if part in SUBPACKAGES else "twinfer"


def violations(package: str, file: Path) -> list[str]:
    bad = []
    place = file.relative_to(ROOT)
    leaf = next((leaf for leaf in LEAVES if place.is_relative_to(leaf)), None)
    allowed = ARROWS[package] if leaf is None else LEAVES[leaf]
    leaves = tuple("twinfer." + leaf.replace("/", ".") for leaf in LEAVES)
    for module in imported(file):
        if module.split(".")[0] == "twinfer":
            target = package_of(module)
            into_leaf = module.startswith(leaves) and leaf is None and package not in LEAF_USERS
            if (target != package and target not in allowed) or into_leaf:
                bad.append(f"{place} imports {module}")
    return bad


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = {str(Path(FOLDERS[name])) for name in SETUPTOOLS["packages"]}
    on_disk = {str(p.parent.relative_to(ROOT)) for folder in TOP.values() for p in code_files(folder)}
    assert on_disk == listed


@pytest.mark.parametrize("name", SETUPTOOLS["packages"])
def test_every_package_has_an_init(name: str) -> None:
    assert (ROOT / FOLDERS[name] / "__init__.py").is_file()


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_imports_go_one_way(package: str) -> None:
    folder = FOLDERS["twinfer" if package == "twinfer" else f"twinfer.{package}"]
    lazy = {"interface/__init__.py"}  # loads the engine when LLM is first used, never at import
    bad = [v for file in code_files(folder) if str(file.relative_to(ROOT)) not in lazy for v in violations(package, file)]
    assert not bad, bad


def test_the_arrow_check_can_fail(tmp_path: Path) -> None:
    file = ROOT / "tests" / "test_layout.py"
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from twinfer.fast import buffers\n")
    assert imported(wrong) == {"twinfer.fast"}
    assert package_of("twinfer.fast") not in ARROWS["reference"]
    assert imported(file)  # the walker finds something in a real file


def test_kernels_is_not_a_top_level_name() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_no_scripts_or_conftest_in_the_root() -> None:
    assert [p.name for p in ROOT.glob("*.py")] == []


def test_reference_never_names_triton() -> None:
    for file in code_files("reference"):
        assert not any(m.split(".")[0] == "triton" for m in imported(file)), file


TORCHLESS = ("twinfer", "twinfer.invariants.auditor", "twinfer.invariants.memory", "twinfer.engine.scheduler", "twinfer.engine.checkpoint")


@pytest.mark.parametrize("module", TORCHLESS)
def test_imports_without_torch(module: str) -> None:
    code = f"import {module}, sys; bad = {{'torch', 'transformers', 'triton', 'z3'}} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_every_file_says_what_it_is() -> None:
    silent = []
    for folder in [*TOP.values(), "tests", "tools"]:
        for file in code_files(folder):
            text = file.read_text(encoding="utf-8")
            if text.strip() and ast.get_docstring(ast.parse(text)) is None:
                silent.append(str(file.relative_to(ROOT)))
    assert not silent, silent


def test_nothing_persistent_is_allocated_outside_the_ledger() -> None:
    """In engine, reference and fast, arrays that live as long as the object are made only through the ledger (numpy and torch factories on `self`)."""
    factories = {"empty", "zeros", "ones", "full"}
    # The ghost's memory of histories is a test instrument, not a buffer of an engine.
    # An arena is one block for many bounds: its size is their sum, and each part is handed out by the ledger.
    ghost = {("engine/ghost.py", name) for name in ("slot_token", "slot_hash", "state_hash", "snapshot_hash")}
    allowed = ghost | {("fast/arena.py", "_device")}
    bad = []
    for folder in ("engine", "reference", "fast"):
        for file in code_files(folder):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
                    continue
                call = node.value.func
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                owned = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
                if owned and isinstance(call, ast.Attribute) and call.attr in factories:
                    name = target.attr  # type: ignore[union-attr]
                    place = str(file.relative_to(ROOT))
                    if (place, name) not in allowed:
                        bad.append(f"{place}: self.{name}")
    assert not bad, bad
