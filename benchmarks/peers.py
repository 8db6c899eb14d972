"""Our methods beside the same ones of inseq, Captum and pytorch-grad-cam: whether both agree, and what each costs.

python benchmarks/peers.py [--data FOLDER] [--rounds 7] [--output peers.json]

Needs inseq 0.7 and pytorch-grad-cam 1.5 (pip install inseq grad-cam), Captum, and transformers 4.53, beside which inseq
0.7 takes Llamas apart. FOLDER holds `stories260k`. Everything runs on the CPU, in one thread, in single precision.

Value zeroing on a Llama (stories260K): inseq compares what comes out of a whole layer, ours what comes out of the
addition behind attention, so both are compared as they are (rank correlation of rows) and with all MLPs at 0, where
the two are one. Its last layer, behind the last norm, is left out; it takes distances below 1e-5 for 0.
Gradients on MiniLM: gradient x input and the norm of the gradient, against Captum's of the embeddings' layer.
Grad-CAM on DINOv2-small: the map of patches of what enters the last layer, both divided by their largest value.
Integrated gradients are Captum's own in ours.

Costs: ours and the peer's in turn, from the inputs to the scores; the median of the ratios of processor time (peer to
ours), with the smallest and the largest.
"""

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rules import rounded
from scipy.stats import spearmanr

import attnflow

warnings.filterwarnings("ignore")
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog."
SENTENCE = "The keys to the cabinet are on the table."
SEED = 0

Scores = NDArray[Any]


def difference(ours: Scores, peer: Scores) -> float:
    """The largest difference as a share of the largest score."""
    return float(np.abs(ours - peer).max() / np.abs(peer).max())


def ratios(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> list[float]:
    """How many times our processor time the peer takes: median, smallest, largest."""

    def seconds(call: Callable[[], Any]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    seconds(ours), seconds(peer)
    found = [seconds(peer) / seconds(ours) for _ in range(rounds)]
    return [statistics.median(found), min(found), max(found)]


def value_zeroing(data: Path, rounds: int) -> dict[str, Any]:
    """Every row of every layer but the last, beside inseq."""
    import inseq

    from attnflow.studies import stories

    model, tokenizer = stories.load(data / "stories260k")
    peer_model: Any = inseq.load_model(model, "value_zeroing", tokenizer=tokenizer)
    layers = range(model.config.num_hidden_layers - 1)

    def peer() -> Scores:
        out = peer_model.attribute(
            STORY.split()[0], generated_texts=STORY, attr_pos_start=1, show_progress=False, attribute_target=False
        )
        # (key, token that is written, layer); the row of a token is that of the position before it.
        return np.nan_to_num(out.sequence_attributions[0].target_attributions.numpy())

    def ours() -> list[Scores]:
        trace = attnflow.capture(model, STORY, tokenizer=tokenizer, keep="block")
        return [attnflow.relevance(trace, edges="value-zeroing", carry="layer", layer=layer).scores for layer in layers]

    def both() -> list[tuple[Scores, Scores]]:
        of_peer = peer()
        return [(one[1:-1], of_peer[..., layer].T) for layer, one in zip(layers, ours(), strict=True)]

    rows = [
        spearmanr(own[row, : row + 2], other[row, : row + 2]).statistic  # what position row + 1 sees
        for own, other in both()
        for row in range(3, len(own))
    ]
    hooks = [
        module.register_forward_hook(lambda *args: torch.zeros_like(args[-1]))
        for path, module in model.named_modules()
        if path.endswith("mlp")
    ]
    silenced = max(difference(own, other) for own, other in both())
    for hook in hooks:
        hook.remove()
    return {
        "tokens": len(tokenizer(STORY).input_ids),
        "rank correlation of rows, mean": float(np.mean(rows)),
        "largest difference with MLPs at 0": silenced,
        "peer's time / ours": ratios(ours, peer, rounds),
    }


def gradients(rounds: int) -> dict[str, Any]:
    """Gradient x input and its norm, beside Captum, of one number of MiniLM's output at [CLS]."""
    from captum.attr import LayerActivation, LayerGradientXActivation

    from attnflow.capturing import huggingface

    model, tokenizer = huggingface.load()
    model.requires_grad_(False)
    direction = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(SEED))
    inputs = dict(tokenizer(SENTENCE, return_tensors="pt"))
    layer = model.get_input_embeddings()

    def score(output: Any) -> torch.Tensor:
        return output.last_hidden_state[:, 0] @ direction

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return score(model(ids))

    def peer() -> torch.Tensor:
        return LayerGradientXActivation(forward, layer).attribute(inputs["input_ids"])

    def ours() -> Scores:
        return attnflow.explain(model, inputs, "gradient-x-input", target=score, tokenizer=tokenizer).scores[0]

    product = peer().detach()[0]
    values = LayerActivation(forward, layer).attribute(inputs["input_ids"]).detach()[0]
    norm = attnflow.explain(model, inputs, "gradient-norm", target=score, tokenizer=tokenizer).scores[0]
    return {
        "tokens": inputs["input_ids"].shape[1],
        "gradient x input": difference(ours(), product.sum(-1).numpy()),
        "gradient norm": difference(norm, (product / values).norm(dim=-1).numpy()),
        "peer's time / ours": ratios(ours, peer, rounds),
    }


def grad_cam(rounds: int) -> dict[str, Any]:
    """The map of DINOv2-small's last layer, beside pytorch-grad-cam, of one number of its output at [CLS]."""
    from pytorch_grad_cam import GradCAM

    from attnflow.capturing import demo

    model = demo.dinov2().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    direction = torch.randn(384, generator=generator)
    pixels = torch.randn(1, 3, 224, 224, generator=generator)
    entering = torch.nn.Identity()  # the peer looks at what a module returns, and must find a tensor
    last = model.encoder.layer[-1]
    last.register_forward_pre_hook(lambda module, args: (entering(args[0]), *args[1:]))

    def score(output: Any) -> torch.Tensor:
        return output.last_hidden_state[:, 0] @ direction

    class Scored(torch.nn.Module):
        """The model with its score as output, as the peer wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return score(self.model(x))[:, None]

    cam = GradCAM(Scored(), [entering], reshape_transform=lambda x: x[:, 1:].mT.unflatten(-1, (16, 16)))

    def peer() -> Scores:
        own = pixels.clone().requires_grad_()
        cam.outputs = cam.activations_and_grads(own)
        cam.outputs.sum().backward()
        (activations,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
        found = cam.get_cam_image(
            own, entering, [], activations.detach().numpy(), gradients.numpy(), eigen_smooth=False
        )
        return np.maximum(found[0].ravel(), 0)

    def ours() -> Scores:
        return attnflow.explain(model, pixels, "grad-cam", target=score).scores[0]

    own, other = ours(), peer()
    return {
        "patches": len(other),
        "map": difference(own[-len(other) :] / own.max(), other / other.max()),
        "peer's time / ours": ratios(ours, peer, rounds),
    }


def main() -> None:
    """Print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ATTNFLOW_DATA", "data")))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    packages = ("attnflow", "torch", "transformers", "captum", "inseq", "grad-cam")
    result = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in packages},
        "inseq, value zeroing": value_zeroing(options.data, options.rounds),
        "Captum, gradients": gradients(options.rounds),
        "pytorch-grad-cam, Grad-CAM": grad_cam(options.rounds),
    }
    text = json.dumps(rounded(result), indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
