"use strict";
// Numbers without a page: what the data block holds, the row that is shown, its scale, and what is said of it.
// The scales and the sentences are those of attnflow's show/colour.py and show/wording.py; a test holds them to these.

/** The float32 numbers that were packed as base64. */
function unpack(text) {
  const bytes = atob(text);
  const buffer = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) buffer[i] = bytes.charCodeAt(i);
  return new Float32Array(buffer.buffer);
}

/** The data block with its numbers unpacked. An answer has what its file holds, and labels that show every character. */
function readData(text) {
  const data = JSON.parse(text);
  data.answers = data.answers.map((answer) => {
    const { roles, queries, layers, words, rows, grid, recipe } = answer.file;
    return { ...answer, roles, queries, layers, words, rows, grid, recipe, scores: unpack(answer.scores) };
  });
  if (data.graph) {
    for (const layer of data.graph.layers) {
      layer.weights = unpack(layer.weights);
      if (layer.keys) layer.keys = unpack(layer.keys);
    }
  }
  if (data.heads) data.heads.scores = data.heads.scores.map(unpack);
  return data;
}

// ---------------------------------------------------------------- what is shown

/** A function of an answer and one more thing that is worked out once for each of both. */
function remembered(compute) {
  const known = new WeakMap();
  return (answer, more) => {
    if (!known.has(answer)) known.set(answer, new Map());
    const found = known.get(answer);
    if (!found.has(more)) found.set(more, compute(answer, more));
    return found.get(more);
  };
}

/** The units of an answer, tokens or words: each with its label, its positions, and the role and place of its first. */
const unitsOf = remembered((answer, words) => {
  if (!words || !answer.words) {
    return answer.tokens.map((label, at) => ({ label, at, positions: [at], role: answer.roles[at] }));
  }
  const units = [];
  answer.words.forEach((word, at) => {
    if (at === 0 || word !== answer.words[at - 1]) {
      units.push({ label: answer.word_labels[units.length], at, positions: [], role: answer.roles[at] });
    }
    units[units.length - 1].positions.push(at);
  });
  return units;
});

/** The queries that can be chosen: each with its label, its place, and the rows of scores that it is the mean of. */
const queriesOf = remembered((answer, words) => {
  const rows = answer.queries.map((at, row) => ({ label: answer.query_tokens[row], at, rows: [row] }));
  if (!words || !answer.words || answer.rows === "target" || answer.rows === "group") return rows;
  const units = unitsOf(answer, true);
  const found = new Map();
  rows.forEach(({ at, rows: [row] }) => {
    const word = answer.words[at];
    if (!found.has(word)) {
      const unit = units.find((one) => one.positions.includes(at));
      found.set(word, { label: unit.label, at: unit.at, rows: [] });
    }
    found.get(word).rows.push(row);
  });
  return [...found.values()];
});

/** The scores of every position at a layer, the mean over some rows. */
function scoresOf(answer, layer, rows) {
  const [, queries, count] = answer.shape;
  const total = new Float64Array(count);
  for (const row of rows) {
    const start = (layer * queries + row) * count;
    for (let i = 0; i < count; i++) total[i] += answer.scores[start + i];
  }
  if (rows.length > 1) for (let i = 0; i < count; i++) total[i] /= rows.length;
  return total;
}

/** The rows behind a chosen query; -1 is the mean over all. */
function rowsOf(answer, queries, query) {
  return query < 0 ? answer.queries.map((_, row) => row) : queries[query].rows;
}

const SINK = 0.3; // of a row: Trace.sinks says so of a layer's attention

/** The positions of text that hold at least 0.3 of what all queries draw on at a layer. */
const sinksOf = remembered((answer, layer) => {
  if (answer.signed || answer.queries.length < 2) return [];
  const mean = scoresOf(answer, layer, rowsOf(answer, [], -1));
  const total = sum(mean);
  return [...mean.keys()].filter((at) => mean[at] >= SINK * total && answer.roles[at] === "text");
});

/**
 * One row as it is shown: units with score, share, rank; those left out are apart.
 * state: {layer, query, words, drop}, of which drop is a list of "special", "prefix" and "sink".
 */
function rowOf(answer, state) {
  const queries = queriesOf(answer, state.words);
  const scores = scoresOf(answer, state.layer, rowsOf(answer, queries, state.query));
  const sinks = state.drop.includes("sink") ? sinksOf(answer, state.layer) : [];
  const units = unitsOf(answer, state.words).map((unit) => {
    const score = unit.positions.reduce((total, at) => total + scores[at], 0);
    const dropped = state.drop.includes(unit.role) || unit.positions.some((at) => sinks.includes(at));
    return { ...unit, score, dropped };
  });
  const whole = sum(units.map((unit) => Math.abs(unit.score)));
  const ranked = [...units.keys()].sort((a, b) => Math.abs(units[b].score) - Math.abs(units[a].score) || a - b);
  ranked.forEach((unit, rank) => { units[unit].rank = rank + 1; });
  for (const unit of units) unit.share = whole ? Math.abs(unit.score) / whole : 0;
  const all = sum(units.map((unit) => unit.score));
  const left = all ? 1 - sum(units.filter((unit) => !unit.dropped).map((unit) => unit.score)) / all : 0;
  return { units, shown: units.filter((unit) => !unit.dropped), left, queries };
}

const FUSIONS = { mean: "mean over heads", max: "highest of the heads" };

/** The raw attention of one head, or of all fused, in the shape of an answer of the same input; null where there is none. */
function headAnswer(heads, answer, which) {
  if (!heads || !heads.scores.length || answer.rows !== "query" || String(answer.tokens) !== String(heads.tokens)) return null;
  const { scores: each, layers, queries, query_tokens, shape, zero } = heads;
  const fused = { mean: (at) => sum(each.map((one) => one[at])) / each.length, max: (at) => largestOf(each.map((one) => one[at])) }[which];
  const scores = fused ? each[0].map((_, at) => fused(at)) : each[which];
  if (!scores) return null;
  const method = `raw attention, ${FUSIONS[which] ?? `head ${which}`}`;
  return { ...answer, method, layers, queries, query_tokens, shape, zero, scores, signed: false, of_layers: true, saturation: layers.map(() => null), recipe: { parts: answer.recipe.parts }, mixers: null };
}

/** Where parts of an answer begin among some units, such as the decoder and what a model wrote: {place, names} of each. */
function beginningsOf(answer, units) {
  const parts = Object.entries(answer.recipe.parts ?? {});
  return units.map((unit, place) => ({
    place, names: parts.filter(([, start]) => unit.at >= start && (place === 0 || units[place - 1].at < start)).map(([name]) => name),
  })).filter(({ names }) => names.length);
}

function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

// ---------------------------------------------------------------- scales

const EVEN = 0.02, DOMINANT = 4, ROUNDING = 1e-9, NAMED = 4;

function found(scores) {
  return Array.from(scores).filter((score) => Number.isFinite(score) && score !== 0);
}

function largestOf(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

/** From 0 to the highest score, by its square root; evenly to both sides of 0 where signed; flat where hardly apart. */
function scale(scores, signed) {
  const values = found(scores);
  const largest = largestOf(values);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity), least = values.reduce((a, b) => Math.min(a, b), Infinity);
  const spread = values.length > 1 ? (most - least) / largest : Infinity;
  if (spread <= EVEN) {
    const middle = Math.abs(sum(values) / values.length);
    return { low: signed ? -2 * middle : 0, high: 2 * middle, power: 1, highest: null, signed, even: spread };
  }
  return signed
    ? { low: -largest, high: largest, power: 1, highest: null, signed, even: null }
    : { low: 0, high: largest, power: 0.5, highest: null, signed, even: null };
}

/** The scale of a row of tokens: up to the largest score that is not dominant; signed scores are drawn whole. */
function textScale(scores, signed) {
  const values = found(scores), ends = scale(scores, signed);
  const ranked = values.map(Math.abs).sort((a, b) => b - a);
  const few = Math.min(Math.max(2, Math.floor(ranked.length / 10)), Math.floor(ranked.length / 4));
  let far = -1;
  for (let i = 0; ends.even === null && !ends.signed && i < few; i++) if (ranked[i] > DOMINANT * ranked[i + 1]) far = i;
  if (far < 0) return ends;
  const high = ranked[far + 1];
  const highest = values.find((value) => Math.abs(value) === ranked[0]);
  return { ...ends, high, highest };
}

/** From the lowest patch to the highest, or of a hundred or more to the 99th percentile. */
function patchScale(scores, signed) {
  const values = found(scores), ends = { ...scale(scores, signed), power: 1 };
  if (values.length < 2 || ends.even !== null) return ends;
  const distance = ends.signed ? values.map(Math.abs) : values;
  const sorted = Float64Array.from(distance).sort();
  const low = sorted[0], highest = sorted[sorted.length - 1];
  const high = sorted.length >= 100 ? percentile(sorted, 0.99) : highest;
  const beyond = low < high && high < highest ? values[distance.indexOf(highest)] : null;
  const top = beyond === null ? highest : high;
  return { ...ends, low: ends.signed ? -top : low, high: top, highest: beyond };
}

/** The scale with its upper end moved down to a share of the way from the lower one, or from 0 where it is signed. */
function narrowed(ends, share) {
  if (share >= 1) return ends;
  const high = ends.signed ? share * ends.high : ends.low + share * (ends.high - ends.low);
  return { ...ends, low: ends.signed ? -high : ends.low, high, highest: ends.highest ?? ends.high };
}

function percentile(sorted, share) {
  const place = share * (sorted.length - 1), below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - below);
}

/** How far along the ramp a score lies, from 0 to 1. */
function shareOf(ends, score) {
  if (!Number.isFinite(score) || ends.high <= ends.low) return 0;
  return Math.min(1, Math.max(0, (score - ends.low) / (ends.high - ends.low))) ** ends.power;
}

/** The colour of a score, of the ramps in the data block (256 colours each). */
function colourOf(ramps, ends, unsigned, score) {
  return ramps[ends.signed ? "signed" : unsigned][Math.round(255 * shareOf(ends, score))];
}

/** Black or white, whichever stands out more from a colour such as #1f4e79. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

// ---------------------------------------------------------------- words

/** How many decimals a score has: three, or as many as give the largest of many small scores three digits. */
function decimalsOf(scores) {
  const largest = largestOf(Array.from(scores).filter(Number.isFinite));
  if (largest === 0 || largest >= 0.1) return 3;
  return Math.min(12, 2 - Math.floor(Math.log10(largest)));
}

function numberOf(score, digits, signed) {
  if (score === 0) return "0";
  return (signed && score > 0 ? "+" : "") + score.toFixed(digits);
}

/** Three digits, as Python's :.3g writes them. */
function brief(value, digits = 3, plus = false) {
  const sign = plus && value >= 0 ? "+" : "";
  if (value === 0) return `${sign}0`;
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  if (power < -4 || power >= digits) {
    return `${sign}${String(Number(mantissa))}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }
  return sign + String(Number(Number(value).toPrecision(digits)));
}

function percent(share) {
  const value = 100 * share;
  return value === 0 ? "0 %" : Math.abs(value) < 0.1 ? `${brief(value, 1)} %` : `${value.toFixed(1)} %`;
}

function shortened(label, most = 24) {
  const characters = Array.from(label);
  return characters.length <= most ? label : characters.slice(0, most - 1).join("") + "…";
}

/** The query that is shown, in words. */
function queryWords(answer, queries, query) {
  if (answer.rows === "target") return answer.asked;
  if (answer.rows === "group") return query < 0 ? `mean over ${queries.length} groups` : `from ${shortened(queries[query].label)}`;
  if (queries.length === 1) query = 0;
  if (query < 0) return `mean over ${queries.length} ${answer.rows === "generated" ? "tokens written" : "queries"}`;
  const kind = answer.rows === "generated" ? "written" : "query";
  return `${kind} ${shortened(queries[query].label)} at ${queries[query].at}`;
}

/** What each answer is called: its method, with the query where several answers are by it, and its place where they still agree. */
function namesOf(answers) {
  const unlike = (names) => names.map((name, at) => names.every((other, place) => place === at || other !== name));
  const methods = answers.map((one) => one.method), titles = answers.map((one) => one.title);
  const alone = unlike(methods), told = unlike(titles);
  return answers.map((one, at) => (alone[at] ? one.method : told[at] ? one.title : `${at + 1}. ${one.title}`));
}

/** The title of what is shown: the method, the query, and the layer if scores are of any. */
function titleOf(answer, state, queries) {
  const scaling = answer.recipe.scaling ? `, ${answer.recipe.scaling}` : "";
  const mixers = answer.mixers ? ` (${answer.mixers} mixes positions unseen)` : "";
  const layer = answer.of_layers ? `, layer ${answer.layers[state.layer]}` : "";
  return `${answer.method}, ${queryWords(answer, queries, state.query)}${mixers}${scaling}${layer}`;
}

/**
 * What must be known to read scores as drawn, a clause each: the sentences of show/wording.py.
 * scores: of all that is drawn; labels and places: of the units of each row, or null for patches.
 */
function notesOf(answer, layer, scores, ends, units, total) {
  const where = answer.layers.length > 1 ? ` at layer ${answer.layers[layer]}` : "";
  const notes = [answer.saturation[layer]];
  if (ends.even !== null) {
    const differ = ends.even >= 1e-6 ? brief(100 * ends.even, 1) : "0";
    notes.push(`the scores are even to within ${differ} %, and drawn flat`);
  }
  if (answer.signed) {
    notes.push(`positive (blue) speaks for, negative (orange) against; the scores${where} sum to ${brief(total, 3, true)}`);
  }
  if (ends.highest !== null && units) {
    const far = [...scores.keys()].sort((a, b) => Math.abs(scores[b]) - Math.abs(scores[a]) || a - b)
      .filter((at) => Math.abs(scores[at]) > ends.high);
    const named = far.slice(0, NAMED).map((at) => {
      const unit = units[at % units.length];
      return `${shortened(unit.label)} at ${unit.at} (${brief(scores[at])})`;
    });
    const more = far.length > NAMED ? ` and ${far.length - NAMED} more` : "";
    notes.push(`the colours end at ${brief(ends.high)}; beyond it: ${named.join(", ")}${more}`);
  }
  if (Array.from(scores).some((score) => score === 0)) notes.push(`hatched: exactly 0, ${answer.zero}`);
  return notes.filter((note) => note);
}

// ---------------------------------------------------------------- the graph

/** The edge weights of one layer as rows, but for those of 0: calls visit(query, key, weight). */
function eachEdge(layer, visit) {
  const [queries, keys] = layer.shape;
  const kept = layer.keys ? layer.weights.length / queries : keys;
  for (let query = 0; query < queries; query++) {
    for (let place = 0; place < kept; place++) {
      const weight = layer.weights[query * kept + place];
      if (weight !== 0) visit(query, layer.keys ? layer.keys[query * kept + place] : place, weight);
    }
  }
}

/** Whether the page holds all edges of a graph. */
function holdsAll(graph) {
  return graph.layers.every((layer) => !layer.keys);
}

/**
 * What each edge carries of what reaches the queries, as a product of edges: a list of {layer, query, key, carries} for
 * each layer. queries: positions in the top layer, of which each counts alike. token: an input position, or -1 for any.
 */
function carriedBy(graph, queries, token) {
  const top = graph.layers.length - 1;
  const down = graph.layers.map(() => null);
  let mass = new Float64Array(graph.layers[top].shape[0]);
  for (const query of queries) mass[query] += 1 / queries.length;
  for (let at = top; at >= 0; at--) {
    down[at] = mass;
    const below = new Float64Array(graph.layers[at].shape[1]);
    eachEdge(graph.layers[at], (from, to, weight) => { below[to] += mass[from] * weight; });
    mass = below;
  }
  let reach = new Float64Array(graph.layers[0].shape[1]).fill(token < 0 ? 1 : 0);
  if (token >= 0) reach[token] = 1;
  return graph.layers.map((layer, at) => {
    const edges = [], above = new Float64Array(layer.shape[0]);
    eachEdge(layer, (from, to, weight) => {
      const carries = down[at][from] * weight * (token < 0 ? 1 : reach[to]);
      above[from] += weight * reach[to];
      if (carries > 0) edges.push({ layer: at, query: from, key: to, carries });
    });
    reach = above;
    return edges;
  });
}

/**
 * What each edge of a graph of conserved relevance carried, signed, as carriedBy says it. token: an input position whose
 * routes alone count, of those that the page holds, or -1 for everything.
 */
function carriedTo(graph, token) {
  return graph.layers.map((layer, at) => {
    const edges = [];
    if (token < 0) eachEdge(layer, (query, key, carries) => edges.push({ layer: at, query, key, carries }));
    else {
      const [, keys] = layer.shape, total = new Map();
      for (const route of routesTo(graph, token)) {
        const down = route.level - 1 - at;
        if (down < 0) continue;
        const place = route.steps[down] * keys + route.steps[down + 1];
        total.set(place, (total.get(place) ?? 0) + route.amount);
      }
      for (const [place, carries] of total) edges.push({ layer: at, query: Math.floor(place / keys), key: place % keys, carries });
    }
    return edges;
  });
}

/**
 * The routes that a page holds of conserved relevance that end at a token, or with -1 all, the largest first. Below the
 * topmost layer they are the parts of these that run there; parts through the same nodes, of one sign, are one.
 */
function routesTo(graph, token) {
  const top = graph.layers.length, parts = new Map();
  for (const route of graph.carried.routes) {
    if (token >= 0 && (route.end !== "token" || route.steps[route.steps.length - 1] !== token)) continue;
    const cut = Math.max(0, route.level - top), steps = route.steps.slice(cut);
    if (!steps.length) continue;
    const key = `${route.level - cut} ${steps} ${route.end} ${Math.sign(route.amount)}`;
    parts.set(key, { ...route, level: route.level - cut, steps, amount: route.amount + (parts.get(key)?.amount ?? 0) });
  }
  return [...parts.values()].sort((a, b) => Math.abs(b.amount) - Math.abs(a.amount));
}

const MOST_EDGES = 5000; // more are a blot, and slow

/** The strongest edges of each layer that together carry a share of what the layer does, signs apart; the least share that one does. */
function strongest(layers, share) {
  const edges = [], shares = [];
  for (const layer of layers) {
    const whole = sum(layer.map((edge) => Math.abs(edge.carries)));
    let carried = 0, drawn = 0;
    for (const edge of [...layer].sort((a, b) => Math.abs(b.carries) - Math.abs(a.carries))) {
      if (carried >= share * whole * (1 - 1e-9) || drawn >= MOST_EDGES / layers.length) break;
      edges.push(edge);
      carried += Math.abs(edge.carries);
      drawn++;
    }
    shares.push(whole ? carried / whole : 1);
  }
  return { edges, share: Math.min(...shares) };
}

// ---------------------------------------------------------------- files

/** The scores of an answer as CSV: layer (empty where scores are of none), query, position, token, role, score. */
function csvOf(answer) {
  const field = (text) => {
    // A spreadsheet runs what begins with one of these.
    const safe = typeof text === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : String(text);
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const [layers, queries, count] = answer.shape;
  const lines = ["layer,query,query_token,position,token,role,score"];
  for (let layer = 0; layer < layers; layer++) {
    for (let query = 0; query < queries; query++) {
      for (let at = 0; at < count; at++) {
        const score = answer.scores[(layer * queries + query) * count + at];
        lines.push([answer.of_layers ? answer.layers[layer] : "", answer.queries[query], answer.query_tokens[query], at, answer.tokens[at],
          answer.roles[at], score].map(field).join(","));
      }
    }
  }
  return lines.join("\r\n") + "\r\n";
}

/** The scores of an answer as the JSON that attnflow loads. */
function jsonOf(answer) {
  const [layers, queries, count] = answer.shape;
  const row = (start) => Array.from(answer.scores.subarray(start, start + count));
  const cube = [...Array(layers).keys()].map((layer) =>
    [...Array(queries).keys()].map((query) => row((layer * queries + query) * count)));
  return JSON.stringify({ ...answer.file, scores: answer.three ? cube : cube[0] });
}
