"""Build the wheel and the sdist, and try the wheel where nothing else is: without extras, and with each extra alone.

python tools/dist.py [--torch "torch --index-url URL"] [--output out/dist]

Needs build, from the extra "dev". Environments are made in a temporary folder: one with the wheel alone, and on top of
it one for each extra. Prints what each package takes on the disk, and whether rolling out an array loads it.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARRAY = """
import numpy as np, attnflow
attention = np.random.default_rng(0).dirichlet(np.ones(5), size=(3, 2, 5))
assert np.allclose(attnflow.rollout(attention).scores.sum(-1), 1)
"""
LOADED = "import sys\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
FLOW = f"""{ARRAY}
found = attnflow.flow(attention, query=0)
found.save("flow.html"), found.save("flow.png"), found.save("flow.json")
assert attnflow.Relevance.load("flow.json").scores.shape == (1, 5)
np.savez("attention.npz", attention=attention)
"""
ENCODER = """
import torch, attnflow
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2).eval()
assert attnflow.rollout(attnflow.capture(model, torch.randn(1, 5, 16))).scores.shape == (5, 5)
"""
EXTRAS = {
    "hf": """
import torch, transformers, attnflow
model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2)).eval()
trace = attnflow.capture(model, {"input_ids": torch.tensor([[101, 2054, 2003, 102]])})
assert attnflow.rollout(trace).scores.shape == (4, 4)
""",
    "timm": """
import timm, torch, attnflow
trace = attnflow.capture(timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(1, 3, 224, 224))
assert trace.grid == (14, 14)
""",
    "captum": """
import torch, attnflow
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2).eval()
found = attnflow.explain(model, torch.randn(1, 5, 16), "integrated-gradients", target=0)
assert found.scores.shape == (1, 5)
""",
    "studies": """
import numpy, torch
from attnflow.studies.probe import cross_validated
grades = numpy.repeat([0, 1], 10)
found = cross_validated(torch.from_numpy(grades[:, None] + 0.0), grades, seed=0)
assert (found.grade == grades).all()
""",
    "demo": """
import attnflow
model, tokenizer = attnflow.load_model()
trace = attnflow.capture(model, "The keys are on the table.", tokenizer=tokenizer)
assert attnflow.rollout(trace, query="keys").scores.shape == (1, 9)
assert attnflow.load_model(task="image").multiple == 14
""",
}


class Environment:
    """A virtual environment; on top of another, it sees the packages of that one as well."""

    def __init__(self, folder: Path, below: "Environment | None" = None) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.packages = next(folder.glob("lib/python*/site-packages"))
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n")

    def install(self, *what: str) -> None:
        pip = (self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", *what], check=True)

    def python(self, code: str, folder: Path) -> str:
        """What the code prints, run in a folder of its own; its error ends the program."""
        return subprocess.run(
            [self.bin / "python", "-c", code], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def attnflow(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [self.bin / "python", "-m", "attnflow", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def sizes(environment: Environment) -> dict[str, float]:
    """MB of every top-level package."""
    folders = (path for path in environment.packages.iterdir() if path.is_dir() and path.suffix != ".dist-info")
    return {
        folder.name: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        for folder in folders
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", help="what pip is given to install torch")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "dist")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "build", "--outdir", arguments.output, ROOT], check=True)
    wheel = max(arguments.output.glob("*.whl"), key=lambda path: path.stat().st_mtime).resolve()
    os.environ.pop("PYTHONPATH", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = Environment(folder / "alone")
        alone.install(*shlex.split(arguments.torch))
        alone.install(str(wheel))
        loaded = alone.python(ARRAY + LOADED, folder).split()
        taken = sizes(alone)
        print(f"without extras: {sum(taken.values()):,.0f} MB; loaded for a rollout of arrays: *")
        for package, megabytes in sorted(taken.items(), key=lambda item: -item[1]):
            if megabytes >= 1:
                print(f"{megabytes:8,.0f} MB  {package}{' *' if package in loaded else ''}")
        alone.python(FLOW, folder)
        alone.python(ENCODER, folder)
        assert alone.attnflow("array", "attention.npz", "--json", folder=folder).returncode == 0
        refused = alone.attnflow("text", "Hello.", folder=folder)
        assert refused.returncode == 2, refused
        assert "attnflow[hf]" in refused.stderr, refused.stderr
        print("without extras: works")
        for extra, code in EXTRAS.items():
            environment = Environment(folder / extra, below=alone)
            environment.install(f"{wheel}[{extra}]")
            environment.python(code, folder)
            print(f"[{extra}] alone: works")
        user = Environment(folder / "user", below=alone)
        user.install("pyright")
        typed = (folder / "typed.py", folder / "pyrightconfig.json")
        typed[0].write_text((ROOT / "examples" / "typed.py").read_text())
        typed[1].write_text('{"typeCheckingMode": "strict", "include": ["typed.py"]}')
        subprocess.run([user.bin / "pyright", "--pythonpath", user.bin / "python"], cwd=folder, check=True)
        print("examples/typed.py: types are right for a user")


if __name__ == "__main__":
    main()
