"""The layout holds: imports run one way, and importing attnflow stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attnflow

PACKAGE = Path(attnflow.__file__).parent

# What each part of the package may import of the others at module level (docs/design.md, "Imports run one way").
# `Relevance.show` and `Relevance.save` reach `show` when they are called; that is the one road back.
ALLOWED = {
    "block": set(),
    "layers": {"block"},
    "files": set(),
    "memory": set(),
    "trace": {"layers"},
    "answer": {"files", "memory"},
    "capturing": {"block", "layers", "trace", "memory"},
    "contributions": {"block", "layers"},
    "conserved": {"layers"},
    "edges": {"layers", "contributions", "conserved"},
    "mixing": {"layers", "edges", "contributions"},
    "propagate": {"memory"},
    "show": {"files", "memory", "answer"},
    "graph": {"layers", "trace", "edges", "mixing", "memory"},
    "methods": {"trace", "answer", "conserved", "edges", "graph", "propagate"},
    "routes": {"trace", "answer", "graph", "methods", "propagate"},
    "baselines": {"trace", "answer", "capturing"},
    "intervening": {"layers", "capturing"},
    "explaining": {"trace", "answer", "capturing", "graph", "methods", "baselines"},
    "run_page": {"answer", "files", "capturing", "running", "show"},
    "reporting": {
        "trace",
        "answer",
        "edges",
        "graph",
        "methods",
        "routes",
        "faithfulness",
        "running",
        "run_page",
        "show",
    },
    "faithfulness": {
        "files",
        "memory",
        "trace",
        "answer",
        "capturing",
        "graph",
        "methods",
        "propagate",
        "baselines",
        "intervening",
    },
    "running": {
        "files",
        "memory",
        "trace",
        "answer",
        "capturing",
        "graph",
        "methods",
        "baselines",
        "explaining",
        "faithfulness",
    },
    "studies": {"files", "trace", "answer", "capturing", "graph", "methods", "baselines", "faithfulness", "show"},
    "cli": {
        "files",
        "memory",
        "trace",
        "answer",
        "capturing",
        "baselines",
        "explaining",
        "methods",
        "reporting",
        "show",
        "faithfulness",
        "running",
        "studies",
    },
    "__main__": {"cli"},
}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def ours(path: Path) -> set[str]:
    """The parts of attnflow that a file imports at module level, type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.col_offset in (0, 4):
            names = (
                [f"{node.module}.{name.name}" for name in node.names] if node.module == "attnflow" else [node.module]
            )
        elif isinstance(node, ast.Import) and node.col_offset == 0:
            names = [name.name for name in node.names]
        else:
            continue
        found |= {part(name) for name in names if name.split(".")[0] == "attnflow"}
    return found - {""}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    relative = path.relative_to(PACKAGE)
    if str(relative) == "__init__.py":
        return
    own = relative.parts[0].removesuffix(".py")
    assert own in ALLOWED, f"{relative} is a new part: give it a place in ALLOWED and in docs/design.md"
    assert ours(path) <= ALLOWED[own] | {own}


def test_kernels_use_no_other_file_of_ours():
    """numba's cache on disk compiles a kernel again when its own file changes, and when no other does."""
    path = PACKAGE / "propagate" / "_maxflow.py"
    assert not ours(path)


def loaded_after(statement: str) -> set[str]:
    """The top-level packages in sys.modules after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


HEAVY = {"torch", "numba", "numpy", "scipy", "matplotlib", "transformers", "timm"}


def test_importing_attnflow_is_light():
    assert not loaded_after("import attnflow") & HEAVY


def test_importing_the_command_line_is_light():
    assert not loaded_after("import attnflow.cli") & HEAVY


def test_the_light_import_test_sees_what_is_loaded():
    assert loaded_after("import attnflow; attnflow.Relevance") & HEAVY == {"numpy"}


def test_public_names_load_and_are_documented():
    for name in attnflow.__all__:
        value = getattr(attnflow, name)
        assert name.isupper() or value.__doc__, name
    assert set(attnflow.__all__) <= set(dir(attnflow))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        attnflow.nonsense  # noqa: B018
