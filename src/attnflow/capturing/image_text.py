"""Image and text together: loading models that read both, their inputs, and what part of a photograph they see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attnflow.capturing import checkpoints, huggingface
from attnflow.capturing.checkpoints import first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

# How far from black and white a ramp is read: padding is one colour, and resampling bends a ramp at its ends.
_INSIDE = (0.03, 0.97)


class ImageTextModel(NamedTuple):
    """A model that reads an image and a text, with the processor that makes its inputs."""

    model: torch.nn.Module
    processor: Any

    def prepare(self, image: Image.Image, text: str) -> dict[str, Any]:
        """One photograph and one text as the model takes them, on its device.

        Chat models get the text as the user's turn, in their template; others the image before the text. Photographs
        are given whole, also to models that may be given tiles of them beside the whole.

        Raises ValueError for an empty text, and where the processor cannot take the two.
        """
        if not text.strip():
            raise ValueError("the text is empty; give one in quotes")
        processor = self.processor
        settings: dict[str, Any] = {"return_tensors": "pt"}
        if getattr(processor.image_processor, "do_image_splitting", False):
            settings["do_image_splitting"] = False
        if processor.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": text}]
            turns = [{"role": "user", "content": content}]
            prompt = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        else:
            prompt = f"{getattr(processor, 'image_token', '')}{text}"
        begins = processor.tokenizer.bos_token
        if begins and prompt.startswith(begins):  # else the tokenizer would add it once more
            settings["add_special_tokens"] = False
        try:
            inputs = processor(images=image, text=prompt, **settings)
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"the model's processor takes no photograph with a text: {first_line(error)}") from error
        huggingface.check_known(inputs["input_ids"], processor.tokenizer)
        parameter = next(self.model.parameters())
        on_device = inputs.to(parameter.device, parameter.dtype)  # of which pixels alone take the precision
        return {name: value for name, value in on_device.items() if name != "labels"}  # which are for training

    def seen(self, image: Image.Image) -> Image.Image:
        """What the model sees of a photograph: cropped or padded with black as its processor does it.

        The processor is asked: it gets ramps from black to white in the place of the photograph.

        Raises ValueError where it makes no single picture of a photograph.
        """
        black, white, along, down = (self._pixels(ramp) for ramp in _ramps(image.size))
        contrast, width, height = white - black, *image.size
        left, right = _ends(_mean(along - black, contrast, (0, 1)))
        top, bottom = _ends(_mean(down - black, contrast, (0, 2)))
        box = (left * width, top * height, right * width, bottom * height)
        return image.crop(tuple(map(round, box)))  # pyright: ignore[reportArgumentType]

    def _pixels(self, image: Image.Image) -> NDArray[np.float64]:
        """The only picture (channel, row, column) that the processor makes of a photograph."""
        processor = self.processor.image_processor
        whole = {"do_image_splitting": False} if getattr(processor, "do_image_splitting", False) else {}
        made: Mapping[str, Any] = processor(images=image, return_tensors="pt", **whole)
        found = [x for x in made.values() if isinstance(x, torch.Tensor) and x.ndim > 3 and x.shape[-3] == 3]
        if not found:
            raise ValueError(
                "the model's processor turns a photograph into no picture, but into single patches, whose places are "
                "not known; take a model whose processor resizes photographs"
            )
        *outer, _, height, width = found[0].shape
        if any(size != 1 for size in outer):
            raise ValueError(
                f"the model's processor cuts the photograph into {' x '.join(map(str, outer))} pieces; take a model "
                "that sees it whole, or let its processor make one picture"
            )
        return found[0].reshape(3, height, width).double().numpy()


def load(name: str, device: str = "cpu") -> ImageTextModel:
    """A model that reads an image and a text, in evaluation mode, with its processor: a local folder or a hub name.

    Raises ModuleNotFoundError if transformers is missing, ValueError if there is no such model, if it takes no images,
    if it is not whole, or if it was not trained to write.
    """
    huggingface.need_transformers("Hugging Face models")
    import transformers

    advice = (
        "give a folder of a Hugging Face image-text model with its processor, or a hub name (which needs a connection)"
    )
    with checkpoints.opening(name, "a model of image and text", advice) as options:
        processor: Any = transformers.AutoProcessor.from_pretrained(name, **options)
        if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
            raise ValueError("it does not take both an image and a text")
        model = checkpoints.pretrained("AutoModelForImageTextToText", name, options, head="write")
    return ImageTextModel(model.to(device), processor)


def _ramps(size: tuple[int, int]) -> list[Image.Image]:
    """Black, white, and ramps from black to white along each axis, in the size of a photograph."""
    from PIL import Image

    width, height = size
    along = np.broadcast_to((np.arange(width) + 0.5) / width, (height, width))
    down = np.broadcast_to(((np.arange(height) + 0.5) / height)[:, None], (height, width))
    shares = [np.zeros((height, width)), np.ones((height, width)), along, down]
    return [Image.fromarray(np.rint(255 * share).astype(np.uint8)).convert("RGB") for share in shares]


def _mean(values: NDArray[np.float64], contrast: NDArray[np.float64], axes: tuple[int, int]) -> NDArray[np.float64]:
    """The mean share of the contrast between black and white, where there is any: padding is alike in both, and 0."""
    there = np.abs(contrast) > 1e-6
    shares = np.where(there, values / np.where(there, contrast, 1), 0)
    return shares.sum(axes) / np.maximum(there.sum(axes), 1)


def _ends(ramp: NDArray[np.float64]) -> tuple[float, float]:
    """Where a picture begins and ends along an axis of the photograph (0 to 1), by what became of a ramp along it."""
    inside = np.flatnonzero((ramp > _INSIDE[0]) & (ramp < _INSIDE[1]))
    if len(inside) < 2:
        raise ValueError("the model's processor leaves less of the photograph than can be placed; give a larger one")
    slope, start = np.polyfit(inside + 0.5, ramp[inside], 1)
    return float(start), float(start + slope * len(ramp))
