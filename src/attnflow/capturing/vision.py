"""Images: loading vision models, fitting a photograph to one, and naming patches."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from attnflow.capturing import checkpoints, demo
from attnflow.capturing.checkpoints import first_line
from attnflow.capturing.huggingface import need_transformers
from attnflow.memory import check_pixels
from attnflow.trace import Grid, Role

if TYPE_CHECKING:
    from PIL import Image

ImageTask: TypeAlias = Literal["image", "image-classification"]

_ADVICE = "give a folder of a Hugging Face or timm model, or a hub name (which needs a connection)"
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Parameters whose presence says which prefix tokens a model puts before its patches, in this order.
_PREFIX = (
    ("[CLS]", re.compile(r"(^|\.)(cls_token|class_token|class_embedding)$")),
    ("[DIST]", re.compile(r"(^|\.)(dist_token|distillation_token)$")),
)


@dataclass(frozen=True)
class VisionModel:
    """A vision model with what its input must look like: size (height, width), channel mean and deviation.

    multiple: where set, any size that it divides is fine and the photograph keeps its aspect ratio.
    """

    model: torch.nn.Module
    size: tuple[int, int]
    mean: tuple[float, ...] = _IMAGENET[0]
    std: tuple[float, ...] = _IMAGENET[1]
    multiple: int | None = None

    def prepare(self, image: Image.Image, size: tuple[int, int] | None = None) -> torch.Tensor:
        """The whole photograph, nothing cropped, as pixel values (1, 3, height, width) as the model takes them."""
        from PIL import Image

        height, width = size or self._fit(image)
        if self.multiple and (height % self.multiple or width % self.multiple or not height or not width):
            raise ValueError(f"the image size {height}x{width} must be a multiple of the patch size {self.multiple}")
        check_pixels(height, width)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        pixels = (np.asarray(resized, dtype=np.float32) / 255 - self.mean) / self.std
        parameter = next(self.model.parameters())
        return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None].to(parameter.device, parameter.dtype)

    def _fit(self, image: Image.Image) -> tuple[int, int]:
        """The model's own size; with a free size, the aspect ratio of the photograph over about as many pixels."""
        if self.multiple is None:
            return self.size
        scale = (self.size[0] * self.size[1] / (image.height * image.width)) ** 0.5
        height, width = (max(1, round(s * scale / self.multiple)) * self.multiple for s in (image.height, image.width))
        return height, width


def open_image(path: str | Path) -> Image.Image:
    """A photograph, upright as its EXIF orientation says, in RGB.

    Raises FileNotFoundError if there is none, ValueError if it cannot be read as an image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"its pixels are of mode {image.mode} (16 bits or more), whose range is not known; convert it to 8 "
                    "bits per channel first"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image {str(path)!r}") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as an image: {first_line(error)}") from error


def labels(model: torch.nn.Module, grid: Grid, count: int) -> tuple[list[str], list[Role]]:
    """Labels and roles of a vision model's positions: prefix tokens first, then patches by their places.

    Prefix tokens are named after the model's parameters: [CLS], [DIST], and the rest registers [REG1], [REG2], ...
    """
    prefix = count - math.prod(grid)
    if prefix < 0:
        raise ValueError(
            f"{type(model).__name__} attends over {count} positions, fewer than the {' x '.join(map(str, grid))} "
            "patches that it was given: it attends over channels, pools patches or leaves some out"
        )
    patches = [place_label(place) for place in itertools.product(*map(range, grid))]
    roles: list[Role] = ["prefix" if position < prefix else "patch" for position in range(count)]
    return [*prefix_labels(model, prefix), *patches], roles


def prefix_labels(model: torch.nn.Module, count: int) -> list[str]:
    """Labels of a vision model's first `count` positions, which are no patches."""
    parameters = [name for name, _ in model.named_parameters()]
    names = [label for label, pattern in _PREFIX if any(pattern.search(name) for name in parameters)]
    return [*names, *(f"[REG{number}]" for number in range(1, count + 1))][:count]


def place_label(place: Sequence[int]) -> str:
    """The label of a patch: "row,column", or "frame,row,column"."""
    return ",".join(map(str, place))


def load(name: str = demo.IMAGE, device: str = "cpu", *, classifies: bool = False) -> VisionModel:
    """A vision model in evaluation mode: the packaged demo, a local folder or hub name of Hugging Face or timm.

    A folder whose config.json has an "architecture" is timm's, any other is Hugging Face's; hub names of timm start
    with "timm/". classifies: load it with the head that classifies.

    Raises ModuleNotFoundError for a missing package, ValueError if no vision model can be loaded from `name`, if it is
    not whole, or if it was not trained to classify.
    """
    what = "an image classifier" if classifies else "a vision model"
    if name == demo.IMAGE and not classifies:
        loaded = VisionModel(demo.dinov2().eval(), (224, 224), multiple=14)
    else:
        with checkpoints.opening(name, what, _ADVICE) as options:
            if name == demo.IMAGE:
                raise ValueError("it was not trained to classify: it has no classes")
            timm = name.startswith("timm/") or _is_timm_folder(Path(name))
            loaded = (_load_timm if timm else _load_huggingface)(name, classifies, options)
    loaded.model.to(device)
    return loaded


def is_classifier(name: str) -> bool:
    """Whether a checkpoint was saved with a head that classifies, as its configuration says."""
    if name == demo.IMAGE:
        return False
    if name.startswith("timm/") or _is_timm_folder(Path(name)):
        return True  # timm's have one, or `load` says that they have none
    need_transformers("Hugging Face models")
    import transformers

    with checkpoints.opening(name, "a vision model", _ADVICE) as options:
        config = transformers.AutoConfig.from_pretrained(name, **options)
    return (config.architectures or [""])[0].endswith("ForImageClassification")


def _is_timm_folder(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and "architecture" in json.loads(config.read_text(encoding="utf-8"))


def _load_timm(name: str, classifies: bool, options: dict[str, Any]) -> VisionModel:
    try:
        import timm
        from timm.data import resolve_data_config  # pyright: ignore[reportPrivateImportUsage]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("timm models need timm: pip install 'attnflow[timm]'") from error
    folder = name
    if options["local_files_only"] and not Path(name).is_dir():
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, local_files_only=True)
    source = f"local-dir:{folder}" if Path(folder).is_dir() else f"hf_hub:{name}"
    model: Any = timm.create_model(source, pretrained=True).eval()
    # With another number of classes than the weights were trained on, timm leaves what is missing as it was drawn.
    trained = model.pretrained_cfg["num_classes"]
    if classifies and not 0 < model.num_classes == trained:
        raise ValueError(f"it was not trained to classify: it has {model.num_classes} classes")
    if model.num_classes != trained:
        raise ValueError(
            f"config.json gives it {model.num_classes} classes and says that its weights have {trained}, and then timm "
            "does not check whether they are whole; give both the same number"
        )
    data = resolve_data_config({}, model=model)
    _, height, width = data["input_size"]
    return VisionModel(model, (height, width), tuple(data["mean"]), tuple(data["std"]))


def _load_huggingface(name: str, classifies: bool, options: dict[str, Any]) -> VisionModel:
    need_transformers("Hugging Face models")
    import transformers

    model: Any
    if classifies:
        model = checkpoints.pretrained("AutoModelForImageClassification", name, options, head="classify")
    else:
        model = checkpoints.pretrained("AutoModel", name, options)
        model = getattr(model, "vision_model", model)
    if model.main_input_name == "input_ids" and hasattr(model.config, "text_config"):
        raise ValueError(f"{type(model).__name__} reads a text beside the image; say which with --text")
    config = getattr(model.config, "vision_config", model.config)
    if not hasattr(config, "image_size"):
        raise ValueError(f"{type(model).__name__} takes no images")
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    mean, std = _IMAGENET
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, **options)
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    except (OSError, ValueError, AttributeError):
        checkpoints.add_note(model, "no image processor says how the model wants its pixels: they are as for ImageNet")
    return VisionModel(model, (height, width), mean, std, _free_multiple(config))


def _free_multiple(config: Any) -> int | None:
    """The patch size of families that take any size without being told to (they interpolate their positions)."""
    return config.patch_size if config.model_type in ("dinov2", "dinov2_with_registers", "dinov3_vit") else None
