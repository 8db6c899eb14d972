"""Does relevance lie on the object? 30 photographs of horses with masks, seen by DINOv2-small.

The map of a method is compared with the mask, as Chefer et al. 2021 compare it. The model has no classes: where a
method or baseline wants a gradient, it is that of the norm of the last [CLS] embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnflow.capturing import demo, vision
from attnflow.faithfulness.metrics import METRICS, correlation
from attnflow.faithfulness.results import Row, Summary
from attnflow.graph import LayerChoice
from attnflow.studies.contest import (
    STUDIED,
    Floats,
    Progress,
    baselines,
    means,
    methods,
    patches,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.record import Record, Standing, checksums, required, standings
from attnflow.trace import Trace

PUBLISHED = "https://github.com/shenshutao/image_segmentation (30 of the Weizmann horses, Borenstein & Ullman 2002)"
CLS, MEAN = "from [CLS]", "mean over all queries"
MASKED = tuple(name for name, row in METRICS.items() if row.needs == "mask")
SMALL = 2  # photographs, at 112 x 112 pixels


def cls_norm(output: Any) -> Any:
    """The Euclidean norm of the last [CLS] embedding (example,)."""
    return output.last_hidden_state[:, 0].norm(dim=-1)


def study(data: Path, *, small: bool = False, seed: int = 0, progress: Progress | None = None) -> Record:
    """Measure every method against the masks: from [CLS] at every layer, and the mean over all queries at the top.

    Of the mean over queries only the top layer is measured, since flows of all pairs of a low layer take minutes.

    Raises FileNotFoundError without the photographs, ModuleNotFoundError without the packaged model.
    """
    (folder,) = required(data, "weizmann_horses", published=PUBLISHED)
    photographs = sorted(folder.glob("*_rgb.jpg"))[: SMALL if small else None]
    masks = [path.with_name(path.name.replace("_rgb.jpg", "_mask.png")) for path in photographs]
    required(folder, *(path.name for path in (*photographs, *masks)), published=PUBLISHED)
    loaded = vision.load()
    rows: dict[str, list[Row]] = {CLS: [], MEAN: []}
    saturated: list[list[float]] = []
    likeness: list[list[float]] = []
    failed: dict[str, str] = {}
    for number, (photograph, mask_path) in enumerate(zip(photographs, masks, strict=True)):
        pixels = loaded.prepare(vision.open_image(photograph), (112, 112) if small else None)
        mask = np.asarray(vision.open_image(mask_path).convert("L")) > 127
        trace = traced(loaded.model, pixels, cls_norm)
        known = baselines(trace, loaded.model, pixels, target=cls_norm, seed=seed)
        asked: tuple[tuple[str, int | None, LayerChoice], ...] = ((CLS, 0, "all"), (MEAN, None, -1))
        for readout, query, layer in asked:
            for name, scores in known.items():
                rows[readout] += _rows(number, name, None, trace, scores, mask)
            for name, relevance in methods(trace, query=query, layer=layer, failed=failed):
                by_layer = relevance.every_layer.mean(axis=1)
                for level, scores in zip(relevance.layers, by_layer, strict=True):
                    rows[readout] += _rows(number, name, level, trace, scores, mask)
                if name == "flow" and readout == CLS:
                    saturated.append([one["saturated"] for one in relevance.recipe["checks"]["layers"]])
                    inside = patches(trace)
                    likeness.append([correlation(one[inside], known["first-layer"][inside]) for one in by_layer])
        if progress:
            progress(number + 1, len(photographs))
    measured = {readout: summaries(found, seed) for readout, found in rows.items()}
    flow = {
        "saturated": np.round(np.mean(saturated, axis=0), 4).tolist(),
        "correlation with first-layer": np.round(np.mean(likeness, axis=0), 4).tolist(),
    }
    return Record(
        study="segmentation",
        settings={
            "model": demo.IMAGE,
            "photographs": len(photographs),
            "size": "112 x 112 pixels" if small else "aspect ratio kept over about 224 x 224 pixels",
            "target": "norm of the last [CLS] embedding",
            "seed": seed,
        },
        data=checksums([*photographs, *masks]),
        tables={**{name: table(entries) for name, entries in measured.items()}, "flow from [CLS] by layer": flow}
        | ({"failed": failed} if failed else {}),
        standings=_standings(measured),
        words=_words(measured, flow),
    )


def _rows(
    number: int, method: str, layer: int | None, trace: Trace, scores: Floats, mask: NDArray[np.bool_]
) -> list[Row]:
    assert trace.grid
    grid = scores[patches(trace)].reshape(trace.grid)
    return [Row(number, method, layer, metric, METRICS[metric].function(grid, mask)) for metric in MASKED]


def _standings(measured: dict[str, list[Summary]]) -> list[Standing]:
    from_cls = [one for metric in MASKED for one in standings(f"{metric}, {CLS}", topmost(measured[CLS], metric))]
    return from_cls + standings(f"pixel-auc, {MEAN}", topmost(measured[MEAN], "pixel-auc"))


def _words(measured: dict[str, list[Summary]], flow: dict[str, list[float]]) -> list[str]:
    """The findings, each from the numbers."""
    top = topmost(measured[CLS], "pixel-auc")
    auc = means(top)
    layers = {
        name: {one.layer: one.mean for one in measured[CLS] if (one.method, one.metric) == (name, "pixel-auc")}
        for name in ("rollout", "flow")
    }
    known = {name: auc[name] for name in STUDIED if name in auc}
    free = max(layer for layer, share in enumerate(flow["saturated"]) if layer == 0 or share < 0.5)
    return [
        f"Pixel AUC {CLS}, top layer: {ranked(top)}.",
        f"Pixel AUC, {MEAN}, top layer: {ranked(topmost(measured[MEAN], 'pixel-auc'))}.",
        f"At the top layer {flow['saturated'][-1]:.0%} of the flows {CLS} are saturated: their map is that of the "
        f"first layer's column sums (rank correlation {flow['correlation with first-layer'][-1]:.3f}; pixel AUC "
        f"{auc['flow']:.3f} and {auc['first-layer']:.3f}), so it says nothing of the layers between.",
        f"Layer {free} is the highest at which fewer than half of the flows are saturated "
        f"({flow['saturated'][free]:.0%}); there pixel AUC is {layers['flow'][free]:.3f} for flow and "
        f"{layers['rollout'][free]:.3f} for rollout, at the top {auc['flow']:.3f} and {auc['rollout']:.3f}.",
        f"Raw attention of the last layer less rollout is {auc['raw'] - auc['rollout']:+.3f}; rollout less mere "
        f"nearness to the centre is {auc['rollout'] - auc['centre']:+.3f}, flow less it "
        f"{auc['flow'] - auc['centre']:+.3f}.",
        f"For what a ViT sees in a photograph, {max(known, key=lambda name: known[name])} from [CLS] at the top layer "
        "is the default of these methods.",
    ]
