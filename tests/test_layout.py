"""The layout holds: imports run one way, and importing attnflow stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import attnflow

PACKAGE = Path(attnflow.__file__).parent

# What each part of the package may import of the others, wherever in a file (docs/design.md, "Imports run one way").
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
    "relevance_flow": {"layers", "trace", "conserved", "graph", "methods", "propagate"},
    "routes": {"trace", "answer", "conserved", "edges", "graph", "methods", "propagate", "relevance_flow"},
    "baselines": {"trace", "answer", "capturing"},
    "intervening": {"layers", "capturing"},
    "explaining": {"layers", "trace", "answer", "capturing", "graph", "methods", "baselines"},
    "run_page": {"answer", "files", "capturing", "running", "show"},
    "reporting": {
        "trace",
        "answer",
        "conserved",
        "edges",
        "graph",
        "methods",
        "relevance_flow",
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

# What a file may reach beside that, inside a function alone, so that it is imported at the moment of the call.
AT_THE_CALL = {
    "answer.py": {"show"},  # Relevance.show, .save and the notebook view: the one road back
    "faithfulness/results.py": {"reporting"},  # Evaluation.save writes a page
}


def imports(source: str) -> tuple[set[str], set[str]]:
    """The parts of attnflow that code imports when it is loaded or checked for types, and inside functions."""
    every = set(ast.walk(ast.parse(source)))
    functions = [node for node in every if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    return parts(every - inside), parts(inside)


def parts(nodes: Iterable[ast.AST]) -> set[str]:
    """The parts of attnflow that statements import; they must name the module that they mean."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: import by the full name, not from ."
            module = str(node.module)
            names = [f"{module}.{name.name}" for name in node.names] if module == "attnflow" else [module]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
            assert "attnflow" not in names, f"line {node.lineno}: import a part, not all of attnflow"
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.split(".")[0] == "attnflow"}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    relative = path.relative_to(PACKAGE)
    if str(relative) == "__init__.py":
        return
    own = relative.parts[0].removesuffix(".py")
    assert own in ALLOWED, f"{relative} is a new part: give it a place in ALLOWED and in docs/design.md"
    back = AT_THE_CALL.get(str(relative), set())
    loaded, called = imports(path.read_text())
    assert loaded <= ALLOWED[own] | {own}
    assert called <= ALLOWED[own] | {own} | back
    assert back <= called, "AT_THE_CALL holds an exception that nothing needs"


def test_every_import_is_seen():
    source = """
import attnflow.files
if TYPE_CHECKING:
    from attnflow.trace import Trace
class Answer:
    def show(self):
        def now():
            import attnflow.show.terminal
        from attnflow import edges
"""
    assert imports(source) == ({"files", "trace"}, {"show", "edges"})
    for hidden in ("def f():\n    import attnflow", "from .show import terminal"):
        with pytest.raises(AssertionError, match="line [12]: import"):
            imports(hidden)


def test_kernels_use_no_other_file_of_ours():
    """numba's cache on disk compiles a kernel again when its own file changes, and when no other does."""
    path = PACKAGE / "propagate" / "_maxflow.py"
    assert imports(path.read_text()) == (set(), set())


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
