// The maximum flow from one query to one input token of the page's graph, its strongest routes and its minimum cut.
// It says what attnflow.flow, attnflow.paths and attnflow.min_cut say; a test holds it to them.

// As in attnflow: a maximum flow keeps to the widest routes, up to so many, down to such a share of the widest.
const WIDEST = 64, WIDTH = 1e-3;
const NOISE = 1e-12;  // of what the two ends let through: less is rounding

/** {query, token, flow, paths: [{amount, share, steps}], cut: [{layer, query, key, capacity}]}; layers as places in the graph. */
function flowBetween(graph, query, token, count) {
  const layers = capacitiesOf(graph, query, token), top = layers.length - 1;
  const ends = Math.min(sum(layers[top].room), sum(layers[0].room)), least = NOISE * ends;
  if (ends === 0) return { query, token, flow: 0, paths: [], cut: [] };
  const capacity = layers.map((layer) => layer.room.slice());
  let flow = 0, first = 0, more = 0;
  for (let k = 0; k < WIDEST; k++) {
    const route = widestRoute(layers, "room", query, token);
    first ||= route.amount;
    if (route.amount <= least || route.amount < WIDTH * first) break;
    eachStep(layers, route.steps, (layer, place) => { layer.room[place] -= route.amount; layer.sent[place] += route.amount; });
    flow += route.amount;
  }
  while ((more = augment(layers, query, token, least)) > 0) flow += more;
  const cut = cutOf(layers, capacity, token, least);  // before routes are taken from what was sent
  return { query, token, flow, paths: routesSent(layers, query, token, count, flow, least), cut };
}

/** The strongest routes of what was sent, which is taken apart by the widest that is left. */
function routesSent(layers, query, token, count, flow, least) {
  const paths = [];
  while (paths.length < count) {
    const { amount, steps } = widestRoute(layers, "sent", query, token);
    if (amount <= least) break;
    eachStep(layers, steps, (layer, place) => { layer.sent[place] -= amount; });
    paths.push({ amount, share: amount / flow, steps });
  }
  return paths;
}

/** The edges from what can send nothing more to the token to what can, from the top down. */
function cutOf(layers, capacity, token, least) {
  const reaches = reaching(layers, token, least), cut = [];
  for (let at = layers.length - 1; at >= 0; at--) {
    const { queries, keys } = layers[at];
    for (let i = 0; i < queries; i++) {
      for (let j = 0; j < keys; j++) {
        const amount = capacity[at][i * keys + j];
        if (amount > 0 && !reaches[at + 1][i] && reaches[at][j]) cut.push({ layer: at, query: i, key: j, capacity: amount });
      }
    }
  }
  return cut;
}

/** Of each layer what its edges can still carry and what they carry, of one query above and one token below alone. */
function capacitiesOf(graph, query, token) {
  const top = graph.layers.length - 1;
  let limit = 0;  // of what goes on as it is where a layer does not concern a position: as much as any row holds
  for (const layer of graph.layers) {
    const rows = new Float64Array(layer.shape[0]);
    eachEdge(layer, (from, to, weight) => { rows[from] += weight; });
    limit = rows.reduce((most, row) => Math.max(most, row), limit);
  }
  return graph.layers.map((layer, at) => {
    const [queries, keys] = layer.shape, room = new Float64Array(queries * keys), leftOut = new Set(graph.left_out[at]);
    eachEdge(layer, (from, to, weight) => {
      if ((at < top || from === query) && (at > 0 || to === token)) room[from * keys + to] = leftOut.has(from) ? limit : weight;
    });
    return { queries, keys, room, sent: new Float64Array(queries * keys) };
  });
}

/** The route whose narrowest edge is the widest, by one of the numbers of edges: its amount, and its steps down. */
function widestRoute(layers, number, query, token) {
  let width = new Float64Array(layers[layers.length - 1].queries);
  width[query] = Infinity;
  const via = layers.map((layer) => new Int32Array(layer.keys));
  for (let at = layers.length - 1; at >= 0; at--) {
    const { queries, keys } = layers[at], edges = layers[at][number], below = new Float64Array(keys);
    for (let i = 0; i < queries; i++) {
      if (!(width[i] > 0)) continue;
      for (let j = 0; j < keys; j++) {
        const wide = Math.min(width[i], edges[i * keys + j]);
        if (wide > below[j]) { below[j] = wide; via[at][j] = i; }
      }
    }
    width = below;
  }
  const steps = [token];
  for (const above of via) steps.push(above[steps[steps.length - 1]]);
  return { amount: width[token], steps: steps.reverse() };
}

/** Calls visit(layer, place of the edge) for each step down. */
function eachStep(layers, steps, visit) {
  steps.slice(1).forEach((key, down) => {
    const layer = layers[layers.length - 1 - down];
    visit(layer, steps[down] * layer.keys + key);
  });
}

/** For each level, the input first, zeros for its positions. */
function atEveryLevel(layers) {
  return [layers[0].keys, ...layers.map((layer) => layer.queries)].map((count) => new Int32Array(count));
}

/**
 * The neighbours of a node in what is left: one level down over room, one up by taking back what was sent.
 * visit(level, position, layer, place of the edge, down) returns true to stop; begin: how many neighbours are passed over.
 */
function eachNeighbour(layers, level, at, least, begin, visit) {
  const under = layers[level - 1], above = layers[level], down = under ? under.keys : 0, all = down + (above ? above.queries : 0);
  for (let number = begin; number < all; number++) {
    const isDown = number < down, layer = isDown ? under : above, other = isDown ? number : number - down;
    const place = isDown ? at * layer.keys + other : other * layer.keys + at;
    if ((isDown ? layer.room : layer.sent)[place] > least && visit(isDown ? level - 1 : level + 1, other, layer, place, isDown)) return number;
  }
  return all;
}

/** Send what shortest routes through what is left can carry (Dinic 1970); returns how much. */
function augment(layers, query, token, least) {
  const far = atEveryLevel(layers), passed = atEveryLevel(layers);
  far[layers.length][query] = 1;
  let edge = [[layers.length, query]];
  while (edge.length && !far[0][token]) {
    const next = [];
    for (const [level, at] of edge) {
      eachNeighbour(layers, level, at, least, 0, (to, other) => {
        if (!far[to][other]) { far[to][other] = far[level][at] + 1; next.push([to, other]); }
        return false;
      });
    }
    edge = next;
  }
  if (!far[0][token]) return 0;
  const push = (level, at, amount) => {
    if (level === 0 && at === token) return amount;
    let carried = 0;
    passed[level][at] = eachNeighbour(layers, level, at, least, passed[level][at], (to, other, layer, place, isDown) => {
      if (far[to][other] !== far[level][at] + 1) return false;
      const sent = push(to, other, Math.min(amount - carried, (isDown ? layer.room : layer.sent)[place]));
      layer.room[place] += isDown ? -sent : sent;
      layer.sent[place] += isDown ? sent : -sent;
      carried += sent;
      return amount - carried <= least;
    });
    return carried;
  };
  return push(layers.length, query, Infinity);
}

/** For each level which positions can still send something to the token: the side of the minimum cut nearest it. */
function reaching(layers, token, least) {
  const reached = atEveryLevel(layers);
  reached[0][token] = 1;
  const waiting = [[0, token]];
  while (waiting.length) {
    const [level, at] = waiting.pop(), above = layers[level], under = layers[level - 1];
    const reach = (to, other) => { if (!reached[to][other]) { reached[to][other] = 1; waiting.push([to, other]); } };
    for (let i = 0; above && i < above.queries; i++) if (above.room[i * above.keys + at] > least) reach(level + 1, i);
    for (let j = 0; under && j < under.keys; j++) if (under.sent[at * under.keys + j] > least) reach(level - 1, j);
  }
  return reached;
}
