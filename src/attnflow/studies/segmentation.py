"""Does relevance lie on the object? 30 photographs of horses with masks, seen by DINOv2-small.

The map of a method is compared with the mask, as Chefer et al. 2021 compare it. The model has no classes: where a
method or baseline wants a gradient, it is that of the norm of the last [CLS] embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnflow.capturing import demo, vision
from attnflow.faithfulness.metrics import METRICS, correlation
from attnflow.faithfulness.results import Row, Summary
from attnflow.graph import LayerChoice
from attnflow.studies import Options, Progress
from attnflow.studies.comparison import (
    Failures,
    Floats,
    baselines,
    best,
    means,
    methods,
    number,
    patches,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.record import Record, Score, checksums, required, scored
from attnflow.trace import Trace

PUBLISHED = "https://github.com/shenshutao/image_segmentation (30 of the Weizmann horses, Borenstein & Ullman 2002)"
CLS, MEAN = "from [CLS]", "mean over all queries"
MASKED = tuple(name for name, row in METRICS.items() if row.needs == "mask")
SMALL = 2  # photographs, at 112 x 112 pixels


def cls_norm(output: Any) -> Any:
    """The Euclidean norm of the last [CLS] embedding (example,)."""
    return output.last_hidden_state[:, 0].norm(dim=-1)


class Loaded(NamedTuple):
    """The model, and the photographs with a mask for each."""

    options: Options
    vision: vision.VisionModel
    photographs: list[Path]
    masks: list[Path]

    @property
    def size(self) -> tuple[int, int] | None:
        """The size to which photographs are brought (height, width); None for about the model's own."""
        return (112, 112) if self.options.small else None


def load(data: Path, options: Options, progress: Progress) -> Loaded:
    """The photographs of weizmann_horses and the packaged model.

    Raises FileNotFoundError without the photographs, ModuleNotFoundError without the packaged model.
    """
    (folder,) = required(data, "weizmann_horses", published=PUBLISHED)
    photographs = sorted(folder.glob("*_rgb.jpg"))[: SMALL if options.small else None]
    masks = [path.with_name(path.name.replace("_rgb.jpg", "_mask.png")) for path in photographs]
    required(folder, *(path.name for path in (*photographs, *masks)), published=PUBLISHED)
    return Loaded(options, vision.load(), photographs, masks)


def measure(loaded: Loaded, progress: Progress) -> Record:
    """Measure every method against the masks: from [CLS] at every layer, and the mean over all queries at the top.

    Of the mean over queries only the top layer is measured, since flows of all pairs of a low layer take minutes.
    """
    model, seed = loaded.vision.model, loaded.options.seed
    rows: dict[str, list[Row]] = {CLS: [], MEAN: []}
    saturated: list[list[float]] = []
    likeness: list[list[float]] = []
    failures = Failures()
    for place, (photograph, mask_path) in enumerate(zip(loaded.photographs, loaded.masks, strict=True)):
        pixels = loaded.vision.prepare(vision.open_image(photograph), loaded.size)
        mask = np.asarray(vision.open_image(mask_path).convert("L")) > 127
        trace = traced(model, pixels, cls_norm)
        known = baselines(trace, model, pixels, target=cls_norm, seed=seed)
        asked: tuple[tuple[str, int | None, LayerChoice], ...] = ((CLS, 0, "all"), (MEAN, None, -1))
        for readout, query, layer in asked:
            for name, scores in known.items():
                rows[readout] += _rows(place, name, None, trace, scores, mask)
            for name, relevance in methods(trace, query=query, layer=layer, failures=failures):
                by_layer = relevance.every_layer.mean(axis=1)
                for level, scores in zip(relevance.layers, by_layer, strict=True):
                    rows[readout] += _rows(place, name, level, trace, scores, mask)
                if name == "flow" and readout == CLS:
                    saturated.append([one["saturated"] for one in relevance.recipe["checks"]["layers"]])
                    inside = patches(trace)
                    likeness.append([correlation(one[inside], known["first-layer"][inside]) for one in by_layer])
        progress("photographs", place + 1, len(loaded.photographs))
    measured = {readout: summaries(found, seed) for readout, found in rows.items()}
    found = {"saturated": saturated, "correlation with first-layer": likeness}
    flow = {name: np.round(np.mean(values, axis=0), 4).tolist() for name, values in found.items() if values}
    return Record(
        study="segmentation",
        settings={
            "model": demo.IMAGE,
            "photographs": len(loaded.photographs),
            "size": "112 x 112 pixels" if loaded.size else "aspect ratio kept over about 224 x 224 pixels",
            "target": "norm of the last [CLS] embedding",
            "seed": seed,
        },
        data=checksums([*loaded.photographs, *loaded.masks]),
        tables={
            **{name: table(entries) for name, entries in measured.items()},
            "flow from [CLS] by layer": flow,
            **failures.table,
        },
        scores=_scores(measured),
    )


def sentences(record: Record) -> list[str]:
    """What the numbers say, one sentence each."""
    top = record.of(f"pixel-auc, {CLS}")
    auc = means(top)
    words = [
        f"Pixel AUC {CLS}, top layer: {ranked(top)}.",
        f"Pixel AUC, {MEAN}, top layer: {ranked(record.of(f'pixel-auc, {MEAN}'))}.",
    ]
    if flow := record.tables["flow from [CLS] by layer"]:
        words += _on_saturation(record.tables[CLS]["pixel-auc"], flow, auc)
    return [
        *words,
        f"Raw attention of the last layer less rollout is {number(auc['raw'] - auc['rollout'], '+.3f')}; rollout less "
        f"mere nearness to the centre is {number(auc['rollout'] - auc['centre'], '+.3f')}, flow less it "
        f"{number(auc['flow'] - auc['centre'], '+.3f')}.",
        f"For what a ViT sees in a photograph, {best(auc)} from [CLS] at the top layer is the default of these "
        "methods.",
    ]


def _on_saturation(layers: Mapping[str, Any], flow: Mapping[str, list[float]], auc: Mapping[str, float]) -> list[str]:
    """How far saturation explains the maps of flow. layers: pixel AUC by method and layer."""
    free = max(layer for layer, share in enumerate(flow["saturated"]) if layer == 0 or share < 0.5)
    there = {name: layers.get(name, {}).get(str(free), {}).get("mean") for name in ("flow", "rollout")}
    return [
        f"At the top layer {flow['saturated'][-1]:.0%} of the flows {CLS} are saturated: their map is that of the "
        f"first layer's column sums (rank correlation {flow['correlation with first-layer'][-1]:.3f}; pixel AUC "
        f"{number(auc['flow'])} and {number(auc['first-layer'])}), so it says nothing of the layers between.",
        f"Layer {free} is the highest at which fewer than half of the flows are saturated "
        f"({flow['saturated'][free]:.0%}); there pixel AUC is {number(there['flow'])} for flow and "
        f"{number(there['rollout'])} for rollout, at the top {number(auc['flow'])} and {number(auc['rollout'])}.",
    ]


def _rows(
    example: int, method: str, layer: int | None, trace: Trace, scores: Floats, mask: NDArray[np.bool_]
) -> list[Row]:
    assert trace.grid
    grid = scores[patches(trace)].reshape(trace.grid)
    return [Row(example, method, layer, metric, METRICS[metric].function(grid, mask)) for metric in MASKED]


def _scores(measured: dict[str, list[Summary]]) -> list[Score]:
    from_cls = [one for metric in MASKED for one in scored(f"{metric}, {CLS}", topmost(measured[CLS], metric))]
    return from_cls + scored(f"pixel-auc, {MEAN}", topmost(measured[MEAN], "pixel-auc"))
