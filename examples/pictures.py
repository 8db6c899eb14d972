"""Draw the pictures of the README and of docs/: a similarity, figures 1 to 3 of the paper, and a photograph.

python examples/pictures.py [--folder docs/pictures]
"""

import argparse
from pathlib import Path

from matplotlib.cbook import get_sample_data

import attnflow
from attnflow.capturing import huggingface, vision
from attnflow.show.graph import attention_graph
from attnflow.show.overlay import overlay
from attnflow.show.plots import layer_maps, picture, save_figure
from attnflow.show.wording import doubts

SENTENCE = "The keys to the cabinet are on the table."
OTHER = "Where did I leave my keys?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    model, tokenizer = huggingface.load()
    target = attnflow.similar_to(model, OTHER, tokenizer=tokenizer, pooling="mean")
    ruled = attnflow.explain(model, SENTENCE, "lrp", tokenizer=tokenizer, target=target)
    trace = attnflow.capture(model, SENTENCE, tokenizer=tokenizer)
    beside = [method(trace, query=None) for method in (attnflow.raw, attnflow.rollout, attnflow.flow)]
    save_figure(picture([ruled, *beside]), folder / "similarity.png")
    methods = (attnflow.raw, attnflow.rollout, attnflow.flow)
    every = {method.__name__: method(trace, layer="all") for method in methods}
    panels = {name: relevance.scores for name, relevance in every.items()}
    notes = [f"{name}: {doubt}" for name, relevance in every.items() for doubt in doubts(relevance)]
    save_figure(attention_graph(panels, trace.tokens, query=0, notes=notes), folder / "graph.png")
    maps = [method(trace, layer="all", query="[CLS]") for method in methods]
    save_figure(layer_maps(maps), folder / "layers.png")

    photo = vision.open_image(get_sample_data("grace_hopper.jpg", asfileobj=False))
    dinov2 = vision.load()
    trace = attnflow.capture(dinov2.model, dinov2.prepare(photo))
    save_figure(overlay(attnflow.rollout(trace, query="[CLS]"), photo), folder / "photograph.png")


if __name__ == "__main__":
    main()
