// Pictures without a page: each view as one SVG, which is what the page shows and what it exports.

const FONT = "ui-sans-serif, system-ui, 'Segoe UI', sans-serif";
const LIGHT = { ground: "#ffffff", ink: "#17202b", soft: "#566273", line: "#d4dae1", hatch: "#b0b6be", accent: "#0b5cad", ramp: "paper", edge: "#1f4e79", route: "#d55e00" };
const DARK = { ground: "#11161d", ink: "#e6ebf1", soft: "#a3afbd", line: "#364150", hatch: "#4d5a6b", accent: "#7db8f5", ramp: "ground", edge: "#7db8f5", route: "#ff9a4d" };

function escaped(text) {
  // XML has no way to write other control characters; labels show them as escapes, so none is lost.
  return String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd")
    .replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

function tag(name, attributes, ...inside) {
  const written = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`).join("");
  return `<${name}${written}>${inside.join("")}</${name}>`;
}

function label(text, attributes) {
  return tag("text", { "font-family": FONT, ...attributes }, escaped(text));
}

/** What is exactly 0. */
function hatch(theme) {
  return tag("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    tag("rect", { width: 5, height: 5, fill: theme.ground }), tag("rect", { width: 1.2, height: 5, fill: theme.hatch }));
}

function svg(width, height, name, theme, ...inside) {
  return tag("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": name },
    tag("title", {}, escaped(name)), tag("defs", {}, hatch(theme)), tag("rect", { width, height, fill: theme.ground }), ...inside);
}

let measuring = null;

/** How wide a text is in pixels; without a page, about. */
function widthOf(text, size) {
  if (typeof document === "undefined") return 0.6 * size * Array.from(text).length;
  measuring ??= document.createElement("canvas").getContext("2d");
  measuring.font = `${size}px ${FONT}`;
  return measuring.measureText(text).width;
}

/** A text in lines of at most so many pixels. */
function wrapped(text, width, size) {
  const lines = [];
  for (const word of text.split(" ")) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && widthOf(longer, size) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** Title above and notes below a drawing; returns the whole SVG. */
function framed(title, notes, width, height, theme, drawing) {
  const wide = Math.max(width, 420), margin = 14;
  const above = wrapped(title, wide, 14), below = notes.flatMap((note) => wrapped(note, wide, 11));
  const top = margin + 20 * above.length + 4;
  const foot = top + height + 18;
  return svg(wide + 2 * margin, foot + 15 * below.length + margin, title, theme,
    ...above.map((line, at) => label(line, { x: margin, y: margin + 14 + 20 * at, "font-size": 14, fill: theme.ink })),
    tag("g", { transform: `translate(${margin} ${top})` }, drawing),
    ...below.map((line, at) => label(line, { x: margin, y: foot + 10 + 15 * at, "font-size": 11, fill: theme.soft })));
}

/** The scale as a bar of the ramp with the numbers at its ends. */
function scaleBar(ramps, ends, unsigned, theme, y) {
  const digits = decimalsOf([ends.low, ends.high]);
  const steps = [...Array(24).keys()].map((at) => tag("rect", {
    x: 70 + 6 * at, y, width: 6.5, height: 8, fill: ramps[ends.signed ? "signed" : unsigned][Math.round(255 * (at / 23) ** ends.power)],
  }));
  const beyond = ends.highest === null ? "" : ends.signed ? " and beyond" : " and above";
  return label(numberOf(ends.low, digits, ends.signed), { x: 62, y: y + 8, "font-size": 10, "text-anchor": "end", fill: theme.soft })
    + steps.join("") + label(numberOf(ends.high, digits, ends.signed) + beyond, { x: 222, y: y + 8, "font-size": 10, fill: theme.soft });
}

/** The tokens in lines that wrap, each on its colour. */
function tokensSvg(ramps, title, units, ends, notes, theme) {
  const width = 800, size = 14, drawn = [];
  let left = 0, line = 0;
  const place = (text, unit) => {
    const wide = widthOf(text, size) + 8;
    if (left && left + wide > width) { left = 0; line++; }
    const colour = unit.score === 0 ? null : colourOf(ramps, ends, theme.ramp, unit.score);
    drawn.push(tag("g", {},
      tag("title", {}, escaped(`${unit.label} at ${unit.at}: ${brief(unit.score)}`)),
      tag("rect", { x: left, y: 28 * line, width: wide, height: 23, rx: 3, fill: colour ?? "url(#hatch)" }),
      label(text, { x: left + 4, y: 28 * line + 16, "font-size": size, fill: colour ? inkOn(colour) : theme.ink, "xml:space": "preserve" })));
    left += wide + 2;
  };
  for (const unit of units) {
    let rest = Array.from(unit.label);
    while (widthOf(rest.join(""), size) + 8 > width) {  // a token wider than a line is cut into pieces
      let most = rest.length;
      while (most > 1 && widthOf(rest.slice(0, most).join(""), size) + 8 > width) most = Math.floor(0.8 * most);
      place(rest.slice(0, most).join(""), unit);
      rest = rest.slice(most);
    }
    place(rest.join(""), unit);
  }
  const height = 28 * (line + 1);
  return framed(title, notes, width, height + 20, theme, drawn.join("") + scaleBar(ramps, ends, theme.ramp, theme, height + 6));
}

const MOST_CELLS = 12000;

/** Where the cells of a map lie. */
function mapPlaces(rows, columns, labels) {
  const cell = Math.max(4, Math.min(30, Math.floor(1000 / columns)));
  const high = Math.max(8, Math.min(24, Math.floor(700 / rows)));
  const left = 12 + Math.max(30, ...labels.map((text) => widthOf(shortened(text), 11)));
  return { cell, high, left, width: left + cell * columns, height: high * rows };
}

/**
 * Rows by tokens as coloured cells. rows: [{label, scores, chosen}], the first at the top.
 * begin: places among the units where a line is drawn, as where a decoder begins. image: of more cells than SVG bears, draws them as one picture: (places, colour of each) -> address.
 */
function mapSvg(ramps, title, rows, units, ends, notes, theme, image, begin = []) {
  const places = mapPlaces(rows.length, units.length, rows.map((row) => row.label));
  const { cell, high, left } = places;
  const colour = (score) => (score === 0 ? null : colourOf(ramps, ends, theme.ramp, score));
  const gap = cell > 8 ? 1 : 0, drawn = [];
  if (image && rows.length * units.length > MOST_CELLS) {
    const href = image(units.length, rows.length, rows.flatMap((row) => Array.from(row.scores, colour)));
    drawn.push(tag("rect", { x: left, width: places.width - left, height: places.height, fill: "url(#hatch)" }));
    drawn.push(tag("image", { href, x: left, width: places.width - left, height: places.height, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  } else {
    rows.forEach((row, y) => row.scores.forEach((score, x) => {
      const fill = colour(score) ?? "url(#hatch)";
      drawn.push(tag("rect", { x: left + cell * x, y: high * y, width: cell - gap, height: high - gap, fill }));
    }));
  }
  rows.forEach((row, y) => {
    const every = Math.ceil(12 / high);
    if (y % every === 0 || row.chosen) drawn.push(label(shortened(row.label), { x: left - 6, y: high * (y + 0.5) + 4, "font-size": 11, "text-anchor": "end", fill: row.chosen ? theme.accent : theme.soft, "font-weight": row.chosen ? 700 : 400 }));
    if (row.chosen) drawn.push(tag("rect", { x: left - 1, y: high * y - 1, width: places.width - left + 1, height: high + 1, fill: "none", stroke: theme.accent, "stroke-width": 2 }));
  });
  for (const x of begin) drawn.push(tag("rect", { x: left + cell * x - 1 - gap / 2, y: -3, width: 2, height: places.height + 6, fill: theme.ink }));
  const every = Math.ceil(13 / cell);
  const named = units.map((unit, x) => [unit, x]).filter(([, x]) => x % every === 0);
  const below = 14 + Math.max(...named.map(([unit]) => widthOf(shortened(unit.label), 11)));
  for (const [unit, x] of named) {
    const at = left + cell * (x + 0.5) + 4;
    drawn.push(label(shortened(unit.label), { x: at, y: places.height + 8, "font-size": 11, "text-anchor": "end", fill: theme.soft, transform: `rotate(-90 ${at} ${places.height + 8})` }));
  }
  const foot = places.height + below;
  return framed(title, notes, places.width, foot + 24, theme, drawn.join("") + scaleBar(ramps, ends, theme.ramp, theme, foot + 8));
}

/** Where the patches of a frame lie, in pixels. */
function patchPlaces(answer, frame, photograph) {
  const [rows, columns] = answer.grid.slice(-2);
  const longer = photograph ? Math.max(photograph.width, photograph.height) : Math.max(rows, columns);
  const width = (640 * (photograph ? photograph.width : columns)) / longer;
  const height = (640 * (photograph ? photograph.height : rows)) / longer;
  return { rows, columns, width, height, cell: width / columns, high: height / rows, first: frame * rows * columns };
}

/**
 * The patches of one frame, over the photograph where there is one. scores: of the patches of all frames.
 * settings: {opacity, grid, chosen}, of which chosen is a patch whose own frame is drawn, or -1.
 */
function patchesSvg(ramps, title, answer, frame, scores, ends, photograph, settings, theme) {
  const { rows, columns, width, height, cell, high, first } = patchPlaces(answer, frame, photograph);
  const drawn = [photograph
    ? tag("image", { href: photograph.href, width, height, preserveAspectRatio: "none" })
    : tag("rect", { width, height, fill: "url(#hatch)" })];
  const cells = [];
  for (let at = 0; at < rows * columns; at++) {
    const x = cell * (at % columns), y = high * Math.floor(at / columns), score = scores[first + at];
    const fill = score === 0 ? "url(#hatch)" : colourOf(ramps, ends, "ground", score);
    const line = settings.grid ? { stroke: "#ffffff", "stroke-width": 0.6, "stroke-opacity": 0.7 } : {};
    cells.push(tag("rect", { x: x.toFixed(2), y: y.toFixed(2), width: cell.toFixed(2), height: high.toFixed(2), fill, ...line }));
  }
  drawn.push(tag("g", { opacity: photograph ? settings.opacity : 1, "shape-rendering": "crispEdges" }, ...cells));
  const chosen = settings.chosen - first;
  if (chosen >= 0 && chosen < rows * columns) {
    const place = { x: cell * (chosen % columns), y: high * Math.floor(chosen / columns), width: cell, height: high, fill: "none" };
    drawn.push(tag("rect", { ...place, stroke: "#000000", "stroke-width": 5 }), tag("rect", { ...place, stroke: "#ffffff", "stroke-width": 2.5 }));
  }
  return svg(width, height, title, theme, ...drawn);
}

/** SVGs beside one another, in rows of at most so many, each with its name above; and the scale and notes below. */
function sheetSvg(ramps, title, parts, ends, notes, theme) {
  const each = 320, beside = Math.min(3, parts.length);
  const scaled = parts.map((part) => ({ ...part, height: (each * part.height) / part.width }));
  const high = Math.max(...scaled.map((part) => part.height)) + 24;
  const drawn = scaled.map((part, at) => {
    const x = (each + 12) * (at % beside), y = high * Math.floor(at / beside);
    const size = `width="${each}" height="${part.height}"`;
    return label(part.name, { x, y: y + 12, "font-size": 12, fill: theme.soft })
      + tag("g", { transform: `translate(${x} ${y + 18})` }, part.svg.replace(/ width="[^"]*" height="[^"]*"/, ` ${size}`));
  });
  const height = high * Math.ceil(parts.length / beside);
  return framed(title, notes, (each + 12) * beside, height + 24, theme, drawn.join("") + (ends ? scaleBar(ramps, ends, "ground", theme, height + 4) : ""));
}

/** Where the nodes of a graph lie in some width: column 0 is the input, column l + 1 the output of the graph's layer l. */
function graphPlaces(graph, wide) {
  const counts = [graph.layers[0].shape[1], ...graph.layers.map((layer) => layer.shape[0])];
  const high = Math.max(14, Math.min(26, Math.floor(2600 / Math.max(...counts))));
  const side = Math.min(170, 0.24 * wide, 16 + Math.max(...graph.tokens.map((text) => widthOf(shortened(text), 12))));
  const step = Math.max(34, Math.min(170, (wide - 2 * side) / graph.layers.length));
  const width = 2 * side + step * graph.layers.length, height = 30 + high * Math.max(...counts);
  return { counts, high, side, step, width, height, x: (column) => side + step * column, y: (row) => 24 + high * (row + 0.5) };
}

/**
 * The graph: tokens down, layers across from the input at the left, edges as wide and as dark as what they carry.
 * Of what was carried, what speaks against the score is in the second colour. chosen: {queries, token, edges, route, cut}: a
 * route is the steps of one path from the top or from `level`, the column that it begins at; a cut the edges of a minimum cut.
 */
function graphSvg(graph, title, chosen, theme, notes = null, wide = 1100) {
  const places = graphPlaces(graph, wide), { counts, high, x, y } = places;
  const largest = largestOf(chosen.edges.map((edge) => edge.carries)) || 1;
  const widest = Math.max(1.2, Math.min(7, 0.3 * high));
  const line = (layer, query, key, more) => {
    const right = x(layer + 1), left = x(layer), middle = (left + right) / 2;
    return tag("path", { d: `M${left} ${y(key)}C${middle} ${y(key)} ${middle} ${y(query)} ${right} ${y(query)}`, fill: "none", ...more });
  };
  const drawn = [...chosen.edges].sort((a, b) => Math.abs(a.carries) - Math.abs(b.carries)).map((edge) => {
    const share = Math.sqrt(Math.abs(edge.carries) / largest);
    return line(edge.layer, edge.query, edge.key, { stroke: edge.carries < 0 ? theme.route : theme.edge, "stroke-width": (0.4 + widest * share).toFixed(2), "stroke-opacity": (0.08 + 0.8 * share).toFixed(3), "stroke-linecap": "round" });
  });
  for (const edge of chosen.cut) {
    drawn.push(line(edge.layer, edge.query, edge.key, { stroke: theme.ground, "stroke-width": 6 }),
      line(edge.layer, edge.query, edge.key, { stroke: theme.ink, "stroke-width": 2.5, "stroke-dasharray": "6 4" }));
  }
  chosen.route.slice(1).forEach((key, at) => {
    const layer = (chosen.level ?? graph.layers.length) - 1 - at;
    drawn.push(line(layer, chosen.route[at], key, { stroke: graph.carried ? theme.ink : theme.route, "stroke-width": 3.5, "stroke-linecap": "round" }));
  });
  const reached = new Set(chosen.edges.flatMap((edge) => [`${edge.layer + 1} ${edge.query}`, `${edge.layer} ${edge.key}`]));
  counts.forEach((count, column) => {
    drawn.push(label(column ? String(graph.numbers[column - 1]) : "input", { x: x(column), y: 12, "font-size": 11, "text-anchor": "middle", fill: theme.soft }));
    for (let row = 0; row < count; row++) {
      drawn.push(tag("circle", { cx: x(column), cy: y(row), r: Math.min(4, high / 3), fill: reached.has(`${column} ${row}`) ? theme.ink : theme.line }));
    }
  });
  const size = 12, most = Math.max(4, Math.floor((places.side - 12) / (0.55 * size)));
  const names = (count) => (count === graph.tokens.length ? graph.tokens : [...Array(count).keys()].map(String));
  const column = (labels, at, where, ...picked) => labels.forEach((text, row) => drawn.push(label(shortened(text, Math.min(24, most)), {
    x: where, y: y(row) + 0.36 * size, "font-size": size, "text-anchor": at ? "start" : "end",
    fill: picked.includes(row) ? theme.accent : theme.ink, "font-weight": picked.includes(row) ? 700 : 400,
  })));
  column(names(counts[0]), 0, x(0) - 8, chosen.token);
  column(names(counts[counts.length - 1]), 1, x(counts.length - 1) + 8, ...(chosen.queries.length < names(counts[counts.length - 1]).length ? chosen.queries : []));
  return notes === null
    ? svg(places.width, places.height, title, theme, ...drawn)
    : framed(title, notes, places.width, places.height, theme, drawn.join(""));
}

/** The intervals of a chart, the best mean first, and those without a mean last. */
function bestFirst(chart) {
  const sign = chart.direction === "up" ? -1 : 1;
  return [...chart.intervals].sort((a, b) => (a.mean === null) - (b.mean === null) || sign * (a.mean - b.mean));
}

/** Methods on one metric: a dot for the mean, a line for its interval; marked ones are hollow, with a line through all. */
function chartSvg(chart, theme, wide) {
  const rows = bestFirst(chart), high = 24, foot = high * rows.length;
  const side = Math.min(0.4 * wide, 16 + Math.max(...rows.map((one) => widthOf(one.label, 13)))), width = Math.max(320, Math.min(wide, 860));
  const most = Math.max(6, Math.floor(side / 6)), right = width - 70;
  const ends = rows.flatMap((one) => [one.mean, one.low, one.high]).filter((value) => value !== null);
  const low = Math.min(0, ...ends), top = Math.max(0, ...ends), x = (value) => side + ((value - low) / (top - low || 1)) * (right - side);
  const digits = decimalsOf(ends), line = (x1, y1, x2, y2, more) => tag("path", { d: `M${x1} ${y1}L${x2} ${y2}`, fill: "none", ...more });
  const drawn = [line(x(0), 0, x(0), foot, { stroke: theme.line, "stroke-width": 1.5 })];
  rows.forEach((one, at) => {
    const y = high * (at + 0.5), marked = chart.marks.includes(one.label);
    drawn.push(label(shortened(one.label, Math.min(most, 40)), { x: side - 10, y: y + 4.5, "font-size": 13, "text-anchor": "end", fill: marked ? theme.soft : theme.ink }));
    if (one.mean === null) { drawn.push(label("undefined", { x: x(0) + 6, y: y + 4, "font-size": 11, fill: theme.soft })); return; }
    if (marked) drawn.push(line(x(one.mean), 0, x(one.mean), foot, { stroke: theme.soft, "stroke-dasharray": "2 4" }));
    if (one.low !== null) drawn.push(line(x(one.low), y, x(one.high), y, { stroke: marked ? theme.soft : theme.edge, "stroke-width": 3, "stroke-opacity": 0.55, "stroke-linecap": "round" }));
    drawn.push(tag("circle", { cx: x(one.mean), cy: y, r: 5, fill: marked ? theme.ground : theme.edge, stroke: marked ? theme.soft : theme.edge, "stroke-width": 2 }),
      label(numberOf(one.mean, digits, false), { x: width - 4, y: y + 4, "font-size": 12, "text-anchor": "end", fill: theme.ink }));
  });
  const marks = [...new Set([low, 0, top])].filter((value) => value !== 0 || Math.min(Math.abs(x(low) - x(0)), Math.abs(x(top) - x(0))) > 40 || low === 0 || top === 0);
  for (const value of marks) drawn.push(label(numberOf(value, digits, false), { x: x(value), y: foot + 14, "font-size": 11, "text-anchor": "middle", fill: theme.soft }));
  return svg(width, foot + 20, `${chart.name}: means and intervals, best first`, theme, ...drawn);
}

/** The curves of a chart that have a panel each, best area first: of all methods but those set apart, if there are others. */
function panelsOf(chart) {
  const order = bestFirst(chart).map((one) => chart.lines.find((line) => line.label === one.label)).filter(Boolean);
  const own = order.filter((line) => !chart.marks.includes(line.label));
  return own.length ? own : order.slice(0, 1);
}

/** One method's mean curve with its interval, and the curves set apart beside it; every panel of a chart has one scale. */
function curveSvg(chart, line, theme) {
  const width = 270, left = 46, right = 262, top = 44, foot = 164;
  const values = chart.lines.flatMap((each) => [...each.mean, ...each.low, ...each.high]).filter((value) => value !== null);
  const low = values.reduce((a, b) => Math.min(a, b), 0), high = values.reduce((a, b) => Math.max(a, b), 0) || 1, digits = Math.min(3, decimalsOf([low, high]));
  const x = (share) => left + share * (right - left), y = (value) => foot - ((value - low) / (high - low)) * (foot - top);
  const path = (each, name) => each.shares.map((share, at) => `${at ? "L" : "M"}${x(share).toFixed(2)} ${y(each[name][at]).toFixed(2)}`).join("");
  const area = (each) => chart.intervals.find((one) => one.label === each.label).mean;
  const drawn = [low, high].map((value) => tag("path", { d: `M${left} ${y(value)}L${right} ${y(value)}`, stroke: theme.line })
    + label(numberOf(value, digits, false), { x: left - 5, y: y(value) + 4, "font-size": 11, "text-anchor": "end", fill: theme.soft }));
  const bounds = [...line.shares.keys()], band = [...bounds.map((at) => [at, "high"]), ...bounds.reverse().map((at) => [at, "low"])];
  if (line.low[0] !== null) drawn.push(tag("path", { d: `M${band.map(([at, name]) => `${x(line.shares[at]).toFixed(2)} ${y(line[name][at]).toFixed(2)}`).join("L")}Z`, fill: theme.edge, "fill-opacity": 0.18 }));
  const beside = chart.lines.filter((each) => chart.marks.includes(each.label) && each !== line);
  const dashes = (each) => ["2 4", "7 4"][chart.marks.indexOf(each.label) % 2];
  for (const each of beside) drawn.push(tag("path", { d: path(each, "mean"), fill: "none", stroke: theme.soft, "stroke-width": 1.5, "stroke-dasharray": dashes(each) }));
  drawn.push(tag("path", { d: path(line, "mean"), fill: "none", stroke: theme.edge, "stroke-width": 2.2, class: "mean" }));
  const said = (each) => `${shortened(each.label, 30)}: ${numberOf(area(each), 3, false)}`;
  drawn.push(label(said(line), { x: left, y: 16, "font-size": 12.5, "font-weight": 700, fill: theme.ink }), label(`area under the mean`, { x: left, y: 31, "font-size": 11, fill: theme.soft }));
  [0, 0.5, 1].forEach((share, at) => drawn.push(label(["0", "0.5", "1"][at], { x: x(share), y: foot + 15, "font-size": 11, "text-anchor": "middle", fill: theme.soft })));
  wrapped(`share of ${chart.across}`, right - left + 40, 11).forEach((text, at) => drawn.push(label(text, { x: 8, y: foot + 32 + 14 * at, "font-size": 11, fill: theme.soft })));
  const start = foot + 32 + 14 * wrapped(`share of ${chart.across}`, right - left + 40, 11).length + 6;
  beside.forEach((each, at) => drawn.push(tag("path", { d: `M8 ${start + 15 * at - 4}L34 ${start + 15 * at - 4}`, stroke: theme.soft, "stroke-width": 1.5, "stroke-dasharray": dashes(each) }),
    label(said(each), { x: 40, y: start + 15 * at, "font-size": 11, fill: theme.soft })));
  return svg(width, start + 15 * beside.length + 4, `${chart.name} by ${line.label}: the mean curve, its area ${numberOf(area(line), 3, false)}`, theme, ...drawn);
}
