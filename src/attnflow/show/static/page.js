// The page: controls, views, keys and the address. All that it draws comes from numbers.js and draw.js.

function startPage() {
  const byId = (id) => document.getElementById(id);
  const data = readData(byId("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => (dark.matches ? DARK : LIGHT);
  const where = byId("where"), panel = byId("panel"), controls = byId("controls"), tabs = byId("tabs");
  const SHARE = data.graph && data.graph.tokens.length > 60 ? 0.6 : 0.8;  // of many tokens fewer edges are read
  const many = data.examples.length > 0;
  let cursor = null;  // the position that the keys are at

  const state = { method: 0, layer: 0, query: -1, words: false, drop: [], view: "", search: "", opacity: 0.65, top: 1, grid: false, own: null, token: -1, share: SHARE, route: -1, cut: false, numbers: 0, by: "", least: false, head: "" };

  const answer = () => data.answers[state.method];
  const queries = () => queriesOf(answer(), state.words);
  const current = () => rowOf(answer(), state);
  const isImage = () => Boolean(answer().grid);

  // -------------------------------------------------------------- state and address

  function views() {
    const one = answer(), several = one.layers.length > 1 || queries().length > 1;
    return [many ? "examples" : null, isImage() ? "image" : "tokens", several ? "map" : null, data.graph ? "graph" : null, "scores", "recipe"].filter(Boolean);
  }

  const NUMBERS = ["none", "score", "share", "rank"];  // that stand under the tokens
  const NAMES = { examples: "Examples", image: "Image", tokens: "Tokens", map: "Map", graph: "Flow graph", scores: "Scores", recipe: "Recipe" };

  /** Bring the state within what the chosen answer has. */
  function settle() {
    const within = (value, most) => Math.min(Math.max(Number.isFinite(value) ? Math.trunc(value) : 0, 0), most);
    state.method = within(state.method, data.answers.length - 1);
    const one = answer();
    state.layer = within(state.layer, one.layers.length - 1);
    state.words = state.words && Boolean(one.words);
    const count = queries().length;
    if (!(state.query >= 0 && state.query < count)) state.query = count === 1 ? 0 : -1;
    state.drop = state.drop.filter((name) => ["special", "prefix", "sink"].includes(name));
    if (state.drop.length && !current().shown.length) state.drop = [];
    if (!views().includes(state.view)) state.view = views()[0];
    if (data.graph && !(state.token < data.graph.layers[0].shape[1])) state.token = -1;
  }

  /** What is chosen by place: the query by the position it stands at, so that a choice outlives words and methods. */
  function address() {
    const one = answer(), chosen = queries()[state.query];
    const parts = { view: state.view, method: state.method, layer: one.layers[state.layer], query: chosen ? chosen.at : "mean" };
    if (state.words) parts.words = 1;
    if (state.drop.length) parts.drop = state.drop.join(",");
    if (state.search) parts.search = state.search;
    if (state.view === "examples") Object.assign(parts, { by: state.by }, state.least ? { least: 1 } : {});
    if (state.numbers) parts.numbers = NUMBERS[state.numbers];
    if (state.head !== "") parts.head = state.head;
    if (state.view === "image") Object.assign(parts, { opacity: state.opacity, top: state.top }, state.grid ? { grid: 1 } : {}, state.own === null ? {} : { own: Number(state.own) });
    if (state.view === "graph") Object.assign(parts, { token: state.token, share: state.share, route: state.route }, state.cut ? { cut: 1 } : {});
    return `#${new URLSearchParams(parts)}`;
  }

  function read(hash) {
    const parts = new URLSearchParams(hash.replace(/^#/, ""));
    const number = (name, least, most, otherwise) => {
      const value = parts.has(name) ? Number(parts.get(name)) : NaN;
      return Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : otherwise;
    };
    state.method = Math.trunc(number("method", 0, data.answers.length - 1, state.method));
    const one = answer();
    const layer = one.layers.indexOf(number("layer", -Infinity, Infinity, NaN));
    state.layer = layer < 0 ? one.layers.length - 1 : layer;
    state.words = parts.has("words") ? parts.get("words") === "1" : data.start.words && !hash;
    state.words = state.words && Boolean(one.words);
    state.drop = parts.has("drop") ? parts.get("drop").split(",") : hash ? [] : [...data.start.drop];
    const at = parts.has("query") ? Number(parts.get("query")) : hash ? NaN : data.start.query ?? NaN;
    state.query = placeOf(at);
    state.view = parts.get("view") ?? state.view;
    state.search = parts.get("search") ?? "";
    state.by = numbersOf(data.examples).includes(parts.get("by")) ? parts.get("by") : "";
    state.least = parts.get("least") === "1";
    state.numbers = Math.max(0, NUMBERS.indexOf(parts.get("numbers")));
    state.head = parts.get("head") ?? "";
    state.opacity = number("opacity", 0, 1, 0.65);
    state.top = number("top", 0.05, 1, 1);
    state.grid = parts.get("grid") === "1";
    state.own = parts.has("own") ? parts.get("own") === "1" : null;
    state.token = Math.trunc(number("token", -1, Infinity, -1));
    state.share = number("share", 0.05, 1, SHARE);
    state.route = Math.trunc(number("route", -1, Infinity, -1));
    state.cut = parts.get("cut") === "1";
    settle();
  }

  /** The number of the query that stands at a position, or of the word that it is a piece of; -1 for none. */
  function placeOf(at) {
    const one = answer(), word = state.words && one.words ? one.words[at] : null;
    return queries().findIndex((query) => query.at === at || (word !== null && word !== undefined && one.words[query.at] === word));
  }

  /** Change the state, keep the address, draw anew. */
  function set(changes) {
    const at = queries()[state.query]?.at, layer = answer().layers[state.layer];
    Object.assign(state, changes);
    if ("method" in changes) {
      const same = answer().layers.indexOf(layer);
      state.layer = same < 0 ? answer().layers.length - 1 : same;
    }
    if ("method" in changes || "words" in changes) state.query = at === undefined ? -1 : placeOf(at);
    if ("query" in changes || "token" in changes) state.route = -1;
    settle();
    history.replaceState(null, "", address());
    draw();
  }

  // -------------------------------------------------------------- controls

  function control(name, input, note = "") {
    return make("label", { className: "control" }, `${name} ${note}`.trim(), input);
  }

  function checkbox(name, key, checked, change) {
    return make("label", { className: "control check" }, make("input", { type: "checkbox", checked, dataset: { key }, onchange: (event) => change(event.target.checked) }), name);
  }

  function range(name, key, least, most, step, value, said, change) {
    const input = make("input", { type: "range", min: least, max: most, step, value: String(value), dataset: { key }, oninput: (event) => change(Number(event.target.value)) });
    input.setAttribute("aria-valuetext", said);
    return control(name, input, said);
  }

  function choice(name, key, options, value, change) {
    const select = make("select", { dataset: { key }, onchange: (event) => change(Number(event.target.value)) },
      ...options.map(([number, text]) => make("option", { value: String(number), selected: number === value }, text)));
    return control(name, select);
  }

  /** Put new elements in a place: the focus stays where it was, and a slider or a field in use is left as it is. */
  function fill(place, ...elements) {
    const next = elements.filter(Boolean), active = document.activeElement;
    const key = place.contains(active) ? active.dataset.key : undefined;
    if (key === undefined) { place.replaceChildren(...next); return; }
    const same = `[data-key="${CSS.escape(key)}"]`;
    const held = ["range", "search"].includes(active.type) && [...place.children].find((child) => child.contains(active));
    const instead = held && next.find((element) => element instanceof Element && element.querySelector(same));
    if (!instead) {
      place.replaceChildren(...next);
      place.querySelector(same)?.focus({ preventScroll: true });
      return;
    }
    if (held.localName === "label") {
      held.firstChild.data = instead.firstChild.data;
      active.setAttribute("aria-valuetext", instead.querySelector(same).getAttribute("aria-valuetext") ?? "");
    } else fill(held, ...instead.childNodes);
    for (const child of [...place.childNodes]) if (child !== held) child.remove();
    const at = next.indexOf(instead);
    held.before(...next.slice(0, at));
    held.after(...next.slice(at + 1));
  }

  function drawControls(row) {
    const one = answer(), all = queries();
    const alike = [...data.answers.keys()].filter((at) => data.answers[at].example === one.example), names = namesOf(alike.map((at) => data.answers[at]));
    const mean = one.rows === "group" ? "mean over all groups" : `mean over all ${all.length}`;
    const whole = sum(row.units.map((unit) => unit.score)), sinks = sinksOf(one, state.layer);
    const held = (name) => {
      const of = (unit) => (name === "sink" ? unit.positions.some((at) => sinks.includes(at)) : unit.role === name);
      return whole ? sum(row.units.filter(of).map((unit) => unit.score)) / whole : 0;
    };
    const toggles = ["special", "prefix"].filter((role) => one.roles.includes(role))
      .map((role) => [role, `${role} tokens (${percent(held(role))} of the row)`]);
    if (sinks.length) toggles.push(["sink", `sinks: ${sinks.slice(0, 3).map((at) => shortened(one.tokens[at])).join(", ")} (${percent(held("sink"))})`]);
    fill(controls,
      many && choice("Example", "example", data.examples.map((each) => [each.answer, shortened(each.name, 40)]), data.examples[one.example].answer, (method) => set({ method })),
      alike.length > 1 && choice("Method", "method", alike.map((at, place) => [at, names[place]]), state.method, (method) => set({ method })),
      all.length > 1 && choice(one.rows === "generated" ? "Written token" : one.rows === "group" ? "From" : "Query", "query",
        [[-1, mean], ...all.map((query, at) => [at, `${shortened(query.label)} at ${query.at}`])], state.query, (query) => set({ query })),
      one.layers.length > 1 && range("Layer", "layer", 0, one.layers.length - 1, 1, state.layer, `${one.layers[state.layer]} of ${one.layers[0]} to ${one.layers[one.layers.length - 1]}`, (layer) => set({ layer })),
      one.words && checkbox("words merged", "words", state.words, (words) => set({ words })),
      ...toggles.map(([name, said]) => checkbox(said, `drop-${name}`, !state.drop.includes(name),
        (kept) => set({ drop: kept ? state.drop.filter((each) => each !== name) : [...state.drop, name] }))),
      control("Search for a token", make("input", { type: "search", value: state.search, dataset: { key: "search" }, oninput: (event) => set({ search: event.target.value }) })));
  }

  function drawTabs() {
    fill(tabs, ...views().map((view) => make("button", {
      type: "button", role: "tab", id: `tab-${view}`, "aria-selected": String(view === state.view), "aria-controls": "panel",
      tabIndex: view === state.view ? 0 : -1, dataset: { key: view }, onclick: () => set({ view }),
    }, NAMES[view])));
    panel.setAttribute("aria-labelledby", `tab-${state.view}`);
  }

  tabs.addEventListener("keydown", (event) => {
    const all = views(), at = all.indexOf(state.view);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    set({ view: all[(to + all.length) % all.length] });
    byId(`tab-${state.view}`).focus();
  });

  // -------------------------------------------------------------- what is under the cursor

  function say(unit, digits) {
    if (!unit) return;
    const one = answer();
    where.textContent = `${one.roles[unit.at] === "patch" ? "" : `${unit.label} at `}${placeWords(unit.at)}: ${numberOf(unit.score, digits, one.signed)}, ${percent(unit.share)} of the row, rank ${unit.rank} of ${one.words && state.words ? unitsOf(one, true).length : one.tokens.length}`;
  }

  /** The place of a token, and of a patch its frame, row and column. */
  function placeWords(at) {
    const one = answer();
    if (!one.grid || one.roles[at] !== "patch") return String(at);
    const [rows, columns] = one.grid.slice(-2), patch = patchPositions(one).indexOf(at);
    const frame = one.grid.length === 3 ? `frame ${Math.floor(patch / (rows * columns))}, ` : "";
    return `${frame}row ${Math.floor(patch / columns) % rows}, column ${patch % columns}`;
  }

  function patchPositions(one) {
    return [...one.roles.keys()].filter((at) => one.roles[at] === "patch");
  }

  // -------------------------------------------------------------- tokens

  function isFound(unit) {
    return state.search !== "" && unit.label.toLowerCase().includes(state.search.toLowerCase());
  }

  /** A token's label on the colour of its score, with a number under it if one is asked for. */
  function paint(span, unit, ends, digits) {
    const number = [null, () => numberOf(unit.score, digits, ends.signed), () => percent(unit.share), () => String(unit.rank)][state.numbers];
    span.append(unit.label, ...(number ? [make("small", {}, number())] : []));
    if (unit.score === 0) { span.classList.add("zero"); return; }
    const colour = colourOf(data.ramps, ends, theme().ramp, unit.score);
    span.style.background = colour;
    span.style.color = inkOn(colour);
  }

  /** Tokens in lines that wrap; what a decoder was given and what a model wrote begin on lines of their own. */
  function laid(list, spans, units) {
    const begun = new Map(beginningsOf(answer(), units).map(({ place, names }) => [place, names]));
    spans.forEach((span, at) => {
      if (begun.has(at)) list.append(make("span", { className: "part" }, begun.get(at).map((name) => PARTS[name] ?? name).join(", ")));
      list.append(span, "\u200b");
    });
  }

  const PARTS = { decoder: "the decoder", written: "written by the model" };

  function tokenList(units, ends, name) {
    const chosen = queries()[state.query], digits = decimalsOf(units.map((unit) => unit.score));
    const list = make("div", { className: `tokens${state.search ? " searching" : ""}`, role: "listbox", "aria-label": name });
    const start = units.some((unit) => unit.at === cursor) ? cursor : chosen && units.some((unit) => unit.at === chosen.at) ? chosen.at : units[0]?.at;
    const spans = units.map((unit) => {
      const span = make("span", { className: "token", role: "option", tabIndex: unit.at === start ? 0 : -1, dataset: { at: String(unit.at), key: `token-${unit.at}` } });
      paint(span, unit, ends, digits);
      span.setAttribute("aria-selected", String(Boolean(chosen && chosen.at === unit.at)));
      span.setAttribute("aria-label", `${unit.label}, ${numberOf(unit.score, digits, answer().signed)}`);
      span.classList.toggle("query", Boolean(chosen && chosen.at === unit.at));
      span.classList.toggle("can", placeOf(unit.at) >= 0);
      span.classList.toggle("found", isFound(unit));
      return span;
    });
    laid(list, spans, units);
    const unitOf = (event) => units.find((unit) => String(unit.at) === event.target.closest?.(".token")?.dataset.at);
    list.addEventListener("pointerover", (event) => say(unitOf(event), digits));
    list.addEventListener("focusin", (event) => { const unit = unitOf(event); if (unit) { cursor = unit.at; say(unit, digits); } });
    list.addEventListener("click", (event) => { const unit = unitOf(event); if (unit) choose(unit.at); });
    list.addEventListener("keydown", (event) => {
      const at = spans.indexOf(event.target);
      if (at < 0) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(units[at].at); return; }
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1, ArrowDown: beside(spans, at, 1), ArrowUp: beside(spans, at, -1) }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = Math.min(spans.length - 1, Math.max(0, to));
      cursor = units[next].at;
      spans[next].focus();
      if (!event.shiftKey) choose(cursor);
    });
    return list;
  }

  /** The token nearest above or below, in the next line that way. */
  function beside(spans, at, way) {
    const from = spans[at].getBoundingClientRect(), middle = (from.left + from.right) / 2;
    let best = at, least = Infinity;
    for (let other = at + way; other >= 0 && other < spans.length; other += way) {
      const box = spans[other].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (best !== at && Math.abs(box.top - spans[best].getBoundingClientRect().top) > 4) break;
      const distance = Math.abs((box.left + box.right) / 2 - middle);
      if (distance < least) { least = distance; best = other; }
    }
    return best;
  }

  /** Take the token at a position for the query, if it is one whose scores the page has. */
  function choose(at) {
    const query = placeOf(at);
    if (query < 0) {
      if (queries().length > 1) where.textContent += " (no query whose scores this page holds)";
      return;
    }
    cursor = at;
    set({ query });
  }

  function scaleLine(ends, unsigned) {
    const canvas = make("canvas", { width: 256, height: 1 }), context = canvas.getContext("2d");
    canvas.setAttribute("aria-hidden", "true");
    for (let x = 0; x < 256; x++) {
      context.fillStyle = data.ramps[ends.signed ? "signed" : unsigned][Math.round(255 * (x / 255) ** ends.power)];
      context.fillRect(x, 0, 1, 1);
    }
    const digits = decimalsOf([ends.low, ends.high]), number = (score) => numberOf(score, digits, ends.signed);
    const beyond = ends.highest === null ? "" : ends.signed ? " and beyond" : " and above";
    return make("div", { className: "scale" }, number(ends.low), canvas, number(ends.high) + beyond);
  }

  const headChosen = remembered((one, which) => headAnswer(data.heads, one, which));

  /** The choice of a head, where the page holds any for this answer. */
  function headChoice(one) {
    if (!headChosen(one, "mean")) return null;
    const options = ["", "mean", "max", ...data.heads.scores.keys()].map(String);
    const names = { "": one.method, mean: "raw, mean over heads", max: "raw, highest of the heads" };
    return choice("Shown", "head", options.map((which, at) => [at, names[which] ?? `raw, head ${which}`]), Math.max(0, options.indexOf(state.head)), (at) => set({ head: options[at] }));
  }

  /** What is drawn: the answer, or a head's raw attention at the same layer and of the same query, if it is chosen and held. */
  function shownTokens(row) {
    const own = answer(), one = state.head === "" ? null : headChosen(own, state.head), notHeld = [];
    if (one) {
      const layer = one.layers.indexOf(own.layers[state.layer]), query = layer < 0 ? null : queryIn(one, own, state.query);
      if (query !== null) return { one, layer, row: rowOf(one, { ...state, layer, query }), query, notHeld };
      notHeld.push(`the page does not hold this query's heads, so that ${own.method} is shown`);
    }
    return { one: own, layer: state.layer, row, query: state.query, notHeld };
  }

  function drawTokens(given) {
    const { one, layer, row, query, notHeld } = shownTokens(given);
    const scores = row.shown.map((unit) => unit.score), ends = textScale(scores, one.signed);
    const limit = data.heads && data.heads.limit && answer().rows === "query" ? [data.heads.limit] : [];
    const notes = [...notHeld, ...notesOf(one, layer, scores, ends, row.shown, sum(row.units.map((unit) => unit.score))), ...dropped(row), ...limit];
    const title = titleOf(one, { layer, query }, row.queries);
    const bar = make("div", { className: "bar" }, ...[headChoice(answer())].filter(Boolean), choice("Under each token", "numbers", [[0, "no number"], [1, "its score"], [2, "its share of the row"], [3, "its rank"]], state.numbers, (numbers) => set({ numbers })));
    return {
      title, elements: [bar, tokenList(row.shown, ends, `Tokens by their relevance: ${title}`), scaleLine(ends, theme().ramp), ...others(answer())], notes,
      svg: () => tokensSvg(data.ramps, title, row.shown, ends, notes, LIGHT),
    };
  }

  /** What the other methods say of the same query, a text each, on scales of their own. */
  function others(mine) {
    const alike = data.answers.filter((one) => one !== mine && one.example === mine.example && queryIn(one, mine, state.query) !== null);
    return alike.map((one) => {
      const layer = sameLayer(one, mine), row = rowOf(one, { ...state, layer, query: queryIn(one, mine, state.query) });
      const scores = row.shown.map((unit) => unit.score), ends = textScale(scores, one.signed), digits = decimalsOf(scores);
      const list = make("div", { className: "tokens" });
      laid(list, row.shown.map((unit) => {
        const span = make("span", { className: "token", title: `${unit.label} at ${unit.at}: ${numberOf(unit.score, digits, one.signed)}, ${percent(unit.share)} of the row, rank ${unit.rank}` });
        paint(span, unit, ends, digits);
        return span;
      }), row.shown);
      const title = titleOf(one, { layer, query: queryIn(one, mine, state.query) }, row.queries);
      const notes = notesOf(one, layer, scores, ends, row.shown, sum(row.units.map((unit) => unit.score)));
      return make("figure", { className: "other" }, make("figcaption", {}, title), list, scaleLine(ends, theme().ramp), ...notes.map((note) => make("p", {}, note)));
    });
  }

  /** The number of a query in another answer of the same input; null where it has no such query. */
  function queryIn(one, mine, query) {
    if (one === mine) return query;
    if (one.rows === "target") return 0;
    const theirs = queriesOf(one, state.words);
    if (mine.rows === "target") return theirs.findIndex((each) => each.at === data.start.query);
    if (one.rows !== mine.rows) return null;
    if (query < 0) return String(one.queries) === String(mine.queries) ? -1 : null;
    const found = theirs.findIndex((each) => each.at === queries()[query].at);
    return found < 0 ? null : found;
  }

  /** The place of the chosen layer in another answer, or of its topmost. */
  function sameLayer(one, mine) {
    const same = one.layers.indexOf(mine.layers[state.layer]);
    return same < 0 ? one.layers.length - 1 : same;
  }

  function dropped(row) {
    return state.drop.length && row.shown.length < row.units.length ? [`without tokens that hold ${percent(row.left)}`] : [];
  }

  // -------------------------------------------------------------- map

  function drawMap(row) {
    const one = answer(), byLayer = one.layers.length > 1;
    const rowAt = (changes) => rowOf(one, { ...state, ...changes });
    // Which tokens are sinks is asked of the layer that is chosen, so that every row has the same tokens.
    const kept = new Set(row.shown.map((unit) => unit.at));
    const line = (changes) => rowAt(changes).units.filter((unit) => kept.has(unit.at));
    const lines = byLayer
      ? [...one.layers.keys()].reverse().map((layer) => ({ label: String(one.layers[layer]), units: line({ layer }), chosen: layer === state.layer, change: { layer } }))
      : row.queries.map((query, at) => ({ label: query.label, units: line({ query: at }), chosen: at === state.query, change: { query: at } }));
    const rows = lines.map((each) => ({ ...each, scores: each.units.map((unit) => unit.score) }));
    const scores = rows.flatMap((each) => each.scores), ends = scale(scores, one.signed);
    const notes = [...notesOf(one, state.layer, scores, ends, row.shown, sum(row.units.map((unit) => unit.score))), ...dropped(row)];
    const of = byLayer ? `${one.method}, ${queryWords(one, row.queries, state.query)}, every layer; layer ${one.layers[0]} at the foot` : `${one.method}, every query, layer ${one.layers[0]}`;
    const begin = beginningsOf(one, row.shown).map(({ place }) => place);
    const picture = (how) => mapSvg(data.ramps, of, rows, row.shown, ends, [], how, raster, begin);
    const drawing = drawnFrom(picture(theme()));
    const places = mapPlaces(rows.length, row.shown.length, rows.map((each) => each.label));
    const group = drawing.querySelector("g");
    const cellAt = (event) => {
      const matrix = group.getScreenCTM();
      if (!matrix) return null;
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const x = Math.floor((point.x - places.left) / places.cell), y = Math.floor(point.y / places.high);
      return x >= 0 && x < row.shown.length && y >= 0 && y < rows.length ? { x, y } : null;
    };
    drawing.addEventListener("pointermove", (event) => {
      const cell = cellAt(event);
      if (!cell) return;
      say(rows[cell.y].units[cell.x], decimalsOf(scores));
      where.textContent += `, ${byLayer ? "layer" : "query"} ${rows[cell.y].label}`;
    });
    drawing.addEventListener("click", (event) => { const cell = cellAt(event); if (cell) set(rows[cell.y].change); });
    const scroll = make("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": `${of}; up and down choose a row` }, drawing);
    scroll.dataset.key = "map";
    scroll.addEventListener("keydown", (event) => {
      const way = { ArrowUp: -1, ArrowDown: 1 }[event.key], at = rows.findIndex((each) => each.chosen);
      if (!way) return;
      event.preventDefault();
      set(rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + way))].change);
    });
    return { elements: [scroll], notes, svg: () => mapSvg(data.ramps, of, rows, row.shown, ends, notes, LIGHT, raster, begin) };
  }

  /** Many cells as one picture. */
  function raster(columns, rows, colours) {
    const canvas = make("canvas", { width: columns, height: rows }), context = canvas.getContext("2d");
    colours.forEach((colour, at) => {
      if (colour === null) return;
      context.fillStyle = colour;
      context.fillRect(at % columns, Math.floor(at / columns), 1, 1);
    });
    return canvas.toDataURL("image/png");
  }

  // -------------------------------------------------------------- image

  /** The maps of a query: the chosen answer's, and those of other answers of the same patches that have the query. */
  function mapsOf(mine, query) {
    const at = queries()[query]?.at, queryOf = (one) => queryIn(one, mine, query);
    const alike = data.answers.filter((one) => one === mine || (one.example === mine.example && String(one.grid) === String(mine.grid)));
    const maps = alike.filter((one) => queryOf(one) !== null).map((one) => {
      const layer = sameLayer(one, mine), all = queriesOf(one, state.words), chosen = queryOf(one);
      const scores = scoresOf(one, layer, rowsOf(one, all, chosen));
      return { one, name: titleOf(one, { layer, query: chosen }, all), scores: patchPositions(one).map((place) => scores[place]) };
    });
    const common = patchScale(maps.flatMap((map) => map.scores), maps.some(({ one }) => one.signed));
    const alone = (map) => patchScale(map.scores, map.one.signed);
    // Scores of different sizes, such as shares and flows, would leave one map without a colour.
    const apart = state.own ?? maps.some((map) => alone(map).high < common.high / 4);
    for (const map of maps) map.ends = narrowed(apart ? alone(map) : common, state.top);
    return { maps, apart, at, without: alike.filter((one) => queryOf(one) === null).map((one) => one.method) };
  }

  /** The pictures of some maps, a frame each. */
  function framesOf({ maps, at, apart }, how, scaled) {
    return maps.flatMap((map) => {
      const frames = map.one.grid.length === 3 ? map.one.grid[0] : 1, photograph = frames === 1 ? data.photograph : null;
      const settings = { opacity: state.opacity, grid: state.grid, chosen: patchPositions(map.one).indexOf(at) };
      return [...Array(frames).keys()].map((frame) => {
        const range = apart && scaled ? `, ${brief(map.ends.low)} to ${brief(map.ends.high)}` : "";
        const several = maps.length > 1 ? `${map.name}, ` : "";
        const name = `${frames > 1 ? `${several}frame ${frame}` : map.name}${range}`;
        const svg = patchesSvg(data.ramps, name, map.one, frame, map.scores, map.ends, photograph, settings, how);
        return { ...patchPlaces(map.one, frame, photograph), map, name, svg };
      });
    });
  }

  function figureOf(part, mine, row, apart) {
    const drawing = drawnFrom(part.svg), own = patchPositions(mine), digits = decimalsOf(part.map.scores);
    const patchAt = (event) => {
      const matrix = drawing.getScreenCTM();
      if (!matrix) return -1;
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const x = Math.floor(point.x / part.cell), y = Math.floor(point.y / part.high);
      return x >= 0 && x < part.columns && y >= 0 && y < part.rows ? part.first + y * part.columns + x : -1;
    };
    drawing.addEventListener("pointermove", (event) => {
      const patch = patchAt(event), at = own[patch], unit = patch < 0 ? null : row.units.find((each) => each.positions.includes(at));
      if (unit && part.map.one === mine) say({ ...unit, at, score: part.map.scores[patch] }, digits);
      else if (unit) where.textContent = `${placeWords(at)}: ${numberOf(part.map.scores[patch], digits, part.map.one.signed)} by ${part.map.one.method}`;
    });
    drawing.addEventListener("click", (event) => { const patch = patchAt(event); if (patch >= 0) choose(own[patch]); });
    return make("figure", {}, make("figcaption", {}, part.name), drawing, apart ? scaleLine(part.map.ends, "ground") : "");
  }

  function drawImage(row) {
    const mine = answer(), found = mapsOf(mine, state.query), { maps, apart } = found;
    const { scores, ends } = maps.find((map) => map.one === mine);
    const photograph = mine.grid.length === 2 ? data.photograph : null;
    const plain = photograph ? [make("figure", {}, make("figcaption", {}, "the photograph"), make("img", { src: photograph.href, alt: "The photograph" }))] : [];
    const figures = make("div", { className: mine.grid.length === 3 ? "figures strip" : "figures" });
    const put = (these) => figures.replaceChildren(...plain, ...framesOf(these, theme()).map((part) => figureOf(part, mine, row, these.apart)));
    put(found);
    const bar = make("div", { className: "bar" }, ...[
      photograph && range("Opacity of the map", "opacity", 0, 1, 0.05, state.opacity, percent(state.opacity), (opacity) => set({ opacity })),
      range("Upper end of the scale", "top", 0.05, 1, 0.05, state.top, brief(ends.high), (top) => set({ top })),
      maps.length > 1 && checkbox("one scale for all", "own", !apart, (all) => set({ own: !all })),
      checkbox("grid of patches", "grid", state.grid, (grid) => set({ grid })),
    ].filter(Boolean));
    const notes = notesOf(mine, state.layer, scores, ends, null, sum(row.units.map((unit) => unit.score)));
    if (ends.highest !== null) notes.push(`the colours end at ${brief(ends.high)}; the patch farthest beyond holds ${brief(ends.highest)}`);
    if (maps.length > 1) notes.push(apart ? `${maps.length} maps, each on a scale of its own` : `${maps.length} maps on one scale`);
    if (found.without.length) notes.push(`not of this query: ${found.without.join(", ")}`);
    if (queries().length > 1) notes.push("point at a token to see its patches; click a token or a patch to keep what it draws from");
    const rest = row.shown.filter((unit) => unit.role !== "patch"), elements = [bar, figures, apart ? "" : scaleLine(ends, "ground")];
    if (rest.length) {
      const list = tokenList(rest, textScale(rest.map((unit) => unit.score), mine.signed), "Tokens that are no patches");
      let seen = state.query;  // whose patches are drawn while a token is pointed at
      const point = (query) => {
        if (query === seen) return;
        seen = query;
        put(mapsOf(mine, query));
      };
      list.addEventListener("pointerover", (event) => {
        const token = event.target.closest(".token"), query = token ? placeOf(Number(token.dataset.at)) : -1;
        point(query < 0 ? state.query : query);
      });
      list.addEventListener("pointerleave", () => point(state.query));
      elements.splice(1, 0, list);
    }
    return { elements, notes, svg: () => sheetSvg(data.ramps, titleOf(mine, state, row.queries), framesOf(found, LIGHT, true), apart ? null : ends, notes, LIGHT) };
  }

  // -------------------------------------------------------------- graph

  /** The positions in a graph's top layer of the chosen query, of all that its scores are the mean of. */
  function graphQueries(graph) {
    const one = answer(), count = graph.layers[graph.layers.length - 1].shape[0];
    if (one.rows === "target" || one.rows === "group") return [...Array(count).keys()];
    const before = one.rows === "generated" ? 1 : 0;  // a token was written by the position before it
    return rowsOf(one, queries(), state.query).map((row) => one.queries[row] - before).filter((at) => at < count);
  }

  function reached(from) {
    const one = answer(), chosen = queries()[state.query];
    return chosen && one.rows !== "target" ? queryWords(one, queries(), state.query) : `${from.length === 1 ? "the query" : `the ${from.length} queries, each counted alike,`}`;
  }

  let lens = null;  // the part of the graph that is seen, once it was moved
  let carried = {};  // what edges carry and how much can flow, for the pair that it was worked out for last
  const ROUTES = 5;  // that are listed of a pair

  function drawGraph() {
    const place = data.graph.numbers.indexOf(answer().layers[state.layer]);
    const whole = place < 0 || place === data.graph.layers.length - 1;
    const graph = whole ? data.graph : { ...data.graph, layers: data.graph.layers.slice(0, place + 1), numbers: data.graph.numbers.slice(0, place + 1), routes: [] };
    const was = graph.carried, from = was ? [] : graphQueries(graph);
    const pair = `${place} ${from} ${state.token}`;
    if (carried.pair !== pair) {
      carried = { pair, layers: was ? carriedTo(graph, state.token) : carriedBy(graph, from, state.token), known: was ? null : flowOf(graph, from) };
    }
    const { edges, share } = strongest(carried.layers, state.share), known = carried.known;
    const routes = was ? routesTo(graph, state.token) : known?.paths ?? [];
    const { steps: route = [], level } = routes[state.route] ?? {};
    const cut = state.cut && known ? known.cut : [];
    const top = graph.numbers[graph.numbers.length - 1];
    const token = state.token < 0 ? null : `${shortened(graph.tokens[state.token] ?? String(state.token))} at ${state.token}`;
    const title = was ? `what was carried of the score${token ? ` to ${token}` : ""}, in layers ${top} to ${graph.numbers[0]}` : `what reaches ${reached(from)} in layer ${top}${token ? ` from ${token}` : ""}`;
    const chosen = { queries: from, token: state.token, edges, route, level, cut };
    const wide = Math.max(280, panel.clientWidth - 2), drawing = drawnFrom(graphSvg(graph, title, chosen, theme(), null, wide));
    const places = graphPlaces(graph, wide), tall = Math.min(places.height, Math.max(320, 0.75 * innerHeight));
    const all = { x: 0, y: 0, width: places.width, height: places.height };
    // Of many tokens the part around the query is seen first, large enough to be read.
    const high = Math.min(all.height, (tall * all.width) / wide), middle = from.length === 1 ? places.y(from[0]) - high / 2 : 0;
    const home = { ...all, y: Math.min(Math.max(0, middle), all.height - high), height: high };
    const look = () => { const now = lens ?? home; drawing.setAttribute("viewBox", `${now.x} ${now.y} ${now.width} ${now.height}`); };
    look();
    const zoom = (factor, x = 0.5, y = 0.5) => {
      const now = lens ?? home, width = now.width / factor, height = now.height / factor;
      lens = { x: now.x + (now.width - width) * x, y: now.y + (now.height - height) * y, width, height };
      look();
    };
    const pan = (x, y) => { const now = lens ?? home; lens = { ...now, x: now.x + x * now.width, y: now.y + y * now.height }; look(); };
    const box = make("div", { className: "graph", tabIndex: 0, role: "group", dataset: { key: "graph" }, "aria-label": `${title}; arrows move, plus and minus zoom, 0 shows all` }, drawing);
    box.style.height = `${tall}px`;
    box.addEventListener("wheel", (event) => {
      event.preventDefault();
      const place = box.getBoundingClientRect();
      zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, (event.clientX - place.left) / place.width, (event.clientY - place.top) / place.height);
    }, { passive: false });
    let held = null, moved = false;
    box.addEventListener("pointerdown", (event) => { held = event; moved = false; });
    box.addEventListener("pointermove", (event) => {
      if (!held || !event.buttons) return;
      const place = box.getBoundingClientRect();
      if (Math.hypot(event.clientX - held.clientX, event.clientY - held.clientY) < 3 && !moved) return;
      moved = true;
      pan((held.clientX - event.clientX) / place.width, (held.clientY - event.clientY) / place.height);
      held = event;
    });
    box.addEventListener("pointerup", (event) => {
      held = null;
      const matrix = drawing.getScreenCTM();
      if (moved || !matrix) return;
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const row = Math.floor((point.y - 24) / places.high);
      if (point.x < places.side + places.step / 3 && row >= 0 && row < places.counts[0]) set({ token: row === state.token ? -1 : row });
      else if (!was && point.x > places.width - places.side - places.step / 3 && row >= 0) choose(answer().rows === "generated" ? row + 1 : row);
    });
    box.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => pan(-0.1, 0), ArrowRight: () => pan(0.1, 0), ArrowUp: () => pan(0, -0.1), ArrowDown: () => pan(0, 0.1), "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => { lens = all; look(); } };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const inputs = graph.layers[0].shape[1];
    const bar = make("div", { className: "bar" },
      choice("Input token", "token", [[-1, "any"], ...[...Array(inputs).keys()].map((at) => [at, `${shortened(graph.tokens[at] ?? String(at))} at ${at}`])], state.token, (token) => set({ token })),
      range("Share drawn", "share", 0.05, 1, 0.05, state.share, percent(state.share), (value) => set({ share: value })),
      ...[["Zoom in", () => zoom(1.25)], ["Zoom out", () => zoom(0.8)], ["All", () => { lens = all; look(); }]]
        .map(([name, onclick]) => make("button", { type: "button", onclick, dataset: { key: name } }, name)));
    const notes = was ? carriedNotes(graph) : [`edges: ${graph.edges}; drawn by what they carry of what reaches the query, as a product of edges`];
    const ofWhat = was ? "the sum of sizes in the layer" : "what the layer does";
    notes.push(`${edges.length} edges are drawn, the strongest of each layer: they carry at least ${percent(share)} of ${ofWhat}`);
    const kept = graph.layers.reduce((least, layer) => Math.min(least, layer.kept), 1);
    if (kept < 1) notes.push(`this page holds the strongest edges of each query: at least ${percent(kept)} of the weight of each layer`);
    return { title, elements: [bar, box, was ? routesCarried(graph, routes) : routesOf(graph, from, known)], notes, svg: () => graphSvg(graph, title, chosen, LIGHT, notes) };
  }

  /** The flow of the chosen pair: worked out where the page holds all edges, else one of those that it came with. */
  function flowOf(graph, from) {
    if (from.length !== 1 || state.token < 0) return undefined;
    if (holdsAll(graph)) return flowBetween(graph, from[0], state.token, ROUTES);
    return graph.routes.find((route) => route.query === from[0] && route.token === state.token);
  }

  /** What must be known of a graph of conserved relevance. */
  function carriedNotes(graph) {
    const { score, leaving, biases } = graph.carried, whole = graph.layers.length === data.graph.layers.length;
    const taken = biases.slice(0, graph.layers.length).map((amount, at) => `${brief(amount, 3, true)} in layer ${graph.numbers[at]}`).reverse();
    return [
      `edges: ${graph.edges}; drawn by what they carried of the score ${brief(score, 3, true)}: blue speaks for it, orange against`,
      ...(whole && Math.abs(score - leaving) > 1e-5 * Math.abs(score) ? [`${brief(leaving, 3, true)} leaves the last layer; the rest, ${brief(score - leaving, 3, true)}, was taken above it`] : []),
      `biases took ${taken.join(", ")}; what the embedding took below layer 0 is not in the graph`,
      ...(whole ? [] : [`routes are the parts of those from the topmost layer that run below layer ${graph.numbers[graph.numbers.length - 1]}; attnflow.paths with layer= takes that layer apart anew`]),
      ...(state.token < 0 ? [] : ["of a chosen token only the routes that end there are drawn"]),
    ];
  }

  function listed(name, routes, said) {
    return make("ol", {}, ...routes.map((path, at) => make("li", {}, make("button", {
      type: "button", dataset: { key: `route-${at}` }, "aria-pressed": String(at === state.route), onclick: () => set({ route: at === state.route ? -1 : at }),
    }, said(path)), ` ${name(path)}`)));
  }

  /** The largest routes of conserved relevance, of all or of those that end at the chosen token. */
  function routesCarried(graph, routes) {
    const name = (at) => shortened(graph.tokens[at] ?? String(at)), { score, all_routes: all } = graph.carried;
    const stepsOf = ({ level, steps, end }) => [...steps.map((step, down) => `${name(step)} @ ${graph.numbers[level - 1 - down] ?? "input"}`), ...(end === "token" ? [] : [end])].join(" → ");
    const known = all ? "" : ` (of the ${graph.carried.routes.length} largest routes, which this page holds)`;
    if (!routes.length) return make("p", {}, `None of the ${graph.carried.routes.length} largest routes, which this page holds, ends there; ask attnflow.paths.`);
    const total = sum(routes.map((route) => route.amount));
    const head = state.token < 0 ? `The largest routes of what was carried${known}`
      : `${routes.length} routes bring ${brief(total, 3, true)} of the ${brief(graph.carried.received[state.token], 3, true)} that ${name(state.token)} at ${state.token} received${known}; the largest`;
    const most = state.token < 0 ? 2 * ROUTES : ROUTES;
    return make("section", { "aria-label": "Routes" }, make("h2", {}, head),
      listed(stepsOf, routes.slice(0, most), ({ amount }) => `${brief(amount, 3, true)} (${percent(amount / score)} of the score)`),
      make("p", {}, "A route carries what speaks for the score or what speaks against it. It begins at the top, or where more of both goes on than came in, and ends at a token, in biases, or where it is cancelled by the other sign."));
  }

  /** The strongest routes and the minimum cut of the chosen pair, or for which pairs there are any. */
  function routesOf(graph, from, known) {
    const name = (at) => shortened(graph.tokens[at] ?? String(at));
    if (!known) {
      const pairs = graph.routes.map((route) => `${name(route.token)} at ${route.token}`);
      return make("p", {}, holdsAll(graph)
        ? `Choose ${from.length === 1 ? "an input token" : "one query and an input token"} for the routes of the maximum flow between the two and the minimum cut.`
        : pairs.length
        ? `This page does not hold all edges. Routes and minimum cuts of a maximum flow were worked out for the query ${name(graph.routes[0].query)} at ${graph.routes[0].query} and the tokens ${pairs.join(", ")}; of other pairs, ask attnflow.paths and attnflow.min_cut.`
        : "This page does not hold all edges, and routes and minimum cuts were worked out for the topmost layer alone; ask attnflow.paths and attnflow.min_cut.");
    }
    if (!known.flow) return make("p", {}, `Nothing flows from ${name(known.query)} at ${known.query} to ${name(known.token)} at ${known.token}.`);
    const top = graph.numbers[graph.numbers.length - 1];
    const column = (at) => (top - at < graph.numbers[0] ? "input" : String(top - at));
    return make("section", { "aria-label": "Routes" },
      make("h2", {}, `Maximum flow ${brief(known.flow)} from ${name(known.query)} to ${name(known.token)}: its strongest routes`),
      listed(({ steps }) => steps.map((step, place) => `${name(step)} @ ${column(place)}`).join(" → "), known.paths, ({ amount, share }) => `${brief(amount)} (${percent(share)})`),
      checkbox(`minimum cut: ${known.cut.length} edges that together let ${brief(known.flow)} through (dashed)`, "cut", state.cut, (cut) => set({ cut })));
  }

  // -------------------------------------------------------------- scores and recipe

  function drawScores(row) {
    const one = answer(), digits = decimalsOf(row.shown.map((unit) => unit.score));
    const ranked = row.shown.filter((unit) => !state.search || isFound(unit)).sort((a, b) => a.rank - b.rank);
    const most = 500, shown = ranked.slice(0, most);
    const lines = shown.map((unit) => {
      const bar = make("span", { className: "share" });
      bar.style.width = `${4 * unit.share}rem`;
      return make("tr", {}, make("td", { className: "number" }, String(unit.rank)), make("td", {}, make("bdi", {}, unit.label)), make("td", {}, placeWords(unit.at)), make("td", {}, unit.role),
        make("td", { className: "number" }, numberOf(unit.score, digits, one.signed)), make("td", { className: "number" }, bar, percent(unit.share)));
    });
    const heads = ["rank", "token", "place", "role", "score", "share of the row"];
    const more = ranked.length > most ? [`the first ${most} of ${ranked.length}; search, or take the file below`] : [];
    return {
      elements: [make("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Scores, best first" }, make("table", {},
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...lines)))],
      notes: [...more, ...dropped(row), ...(one.signed ? ["share and rank are of sizes, whatever their sign"] : [])], svg: null,
    };
  }

  /** JSON with each list of numbers or names on one line. */
  function flat(text) {
    return text.replace(/\[\n\s+([^[\]{}]*?)\n\s+\]/g, (_, inside) => `[${inside.replace(/\n\s+/g, " ")}]`);
  }

  function drawRecipe() {
    const one = answer();
    const copy = (text) => make("button", { type: "button", onclick: (event) => {
      navigator.clipboard.writeText(text).then(() => { event.target.textContent = "Copied"; }, () => { event.target.textContent = "Select the text to copy it"; });
    } }, "Copy");
    const part = (name, text) => [make("h2", {}, name), make("pre", {}, text), copy(text)];
    return {
      elements: [
        ...(data.command ? part("The command that made this page", data.command) : []),
        ...part("In Python", one.python),
        make("h2", {}, "Recipe"), make("p", {}, "Method, settings, model, proofs, versions and checks, as every file of attnflow holds them."),
        make("pre", {}, flat(JSON.stringify(one.recipe, null, 2))),
      ], notes: [], svg: null,
    };
  }

  // -------------------------------------------------------------- files

  function download(name, content, type) {
    const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function png(text, name) {
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas", { width: 2 * image.width, height: 2 * image.height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => (blob ? download(name, blob, "image/png") : failed()), "image/png");
    };
    const failed = () => { where.textContent = "this view is too large for a PNG; take the SVG"; };
    image.onerror = failed;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  }

  function exports(svgOf) {
    const name = `attnflow-${answer().method.replace(/[^\w-]+/g, "-")}-${state.view}`;
    const button = (text, onclick) => make("button", { type: "button", onclick, dataset: { key: text } }, text);
    const pictures = [
      button("Save SVG", () => download(`${name}.svg`, svgOf(), "image/svg+xml")),
      button("Save PNG", () => png(svgOf(), `${name}.png`)),
    ];
    return make("div", { className: "exports", role: "group", "aria-label": "Save" }, ...(svgOf ? pictures : []),
      button("Scores as JSON", () => download(`${name}.json`, jsonOf(answer()), "application/json")),
      button("Scores as CSV", () => download(`${name}.csv`, csvOf(answer()), "text/csv")));
  }

  // -------------------------------------------------------------- drawing

  function drawExamples() {
    return {
      title: `${data.examples.length} examples`, svg: null, notes: ["disagreement: 1 less the mean rank correlation of the methods' rows; 0 where all rank alike, 1 as by chance"],
      elements: exampleList(data.examples, { by: state.by, least: state.least }, set, (method) => set({ method, query: -1, view: data.answers[method].grid ? "image" : "tokens" })),
    };
  }

  const drawers = { examples: drawExamples, tokens: drawTokens, image: drawImage, map: drawMap, graph: drawGraph, scores: drawScores, recipe: drawRecipe };

  function draw() {
    const row = current(), { title, elements, notes, svg: svgOf } = drawers[state.view](row);
    drawControls(row);
    drawTabs();
    byId("about").textContent = answer().about;
    where.textContent = title ?? titleOf(answer(), state, row.queries);
    fill(panel, ...elements, exports(svgOf));
    const mixing = answer().mixers ? [`${answer().mixers} mixes positions unseen`] : [];
    byId("notes").replaceChildren(...[...notes, ...mixing].map((note) => make("li", {}, note)));
    byId("footer").textContent = "Scores are kept as float32. Nothing here is fetched; the address restores this view.";
  }

  addEventListener("resize", () => { if (state.view === "graph") draw(); });
  addEventListener("hashchange", () => { read(location.hash); draw(); });
  dark.addEventListener("change", draw);
  controls.addEventListener("submit", (event) => event.preventDefault());
  read(location.hash);
  draw();
}

if (typeof document !== "undefined") startPage();
