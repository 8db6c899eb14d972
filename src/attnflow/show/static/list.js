// Lists of examples that can be sorted; both the page of answers and the page of a list draw them.

/** An element with properties, and children that are elements or text. */
function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "dataset") Object.assign(element.dataset, value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** An SVG as an element; text that is no SVG is an error, never markup. */
function drawnFrom(text) {
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml");
  if (parsed.querySelector("parsererror")) throw new Error("a view is no well-formed SVG");
  return document.importNode(parsed.documentElement, true);
}

/** The numbers that some of the examples have, in the order in which they come. */
function numbersOf(examples) {
  return [...new Set(examples.flatMap((one) => Object.keys(one.numbers)))];
}

/** Examples by one of their numbers, largest or least first; those without it come last, ties as they came. */
function sorted(examples, name, least) {
  if (name === "") return examples;
  const value = (one) => one.numbers[name] ?? null;
  return [...examples].sort((a, b) => {
    if (value(a) === null || value(b) === null) return Number(value(a) === null) - Number(value(b) === null);
    return least ? value(a) - value(b) : value(b) - value(a);
  });
}

/**
 * A list of examples. chosen: {by, least}, the number that they are sorted by; change: called with another choice.
 * open: called with the answer that an example is, where it is one of this page.
 */
function exampleList(examples, chosen, change, open) {
  const names = numbersOf(examples);
  const by = make("select", { dataset: { key: "by" }, onchange: (event) => change({ by: event.target.value }) },
    ...["", ...names].map((name) => make("option", { value: name, selected: name === chosen.by }, name === "" ? "as they came" : name)));
  const least = make("input", { type: "checkbox", checked: chosen.least, dataset: { key: "least" }, onchange: (event) => change({ least: event.target.checked }) });
  const bar = make("div", { className: "bar" }, make("label", { className: "control" }, "Sorted by", by), make("label", { className: "control check" }, least, "least first"));
  const items = sorted(examples, chosen.by, chosen.least).map((one) => exampleItem(one, names, open));
  return [...(names.length ? [bar] : []), make("ol", { className: "examples" }, ...items)];
}

/** One example of a list, with those of the numbers that it has. */
function exampleItem(one, names, open) {
  return make("li", { className: "example" },
    make("h3", {}, nameOf(one, open)),
    ...(one.facts ? [make("p", {}, one.facts)] : []),
    ...(one.text ? [make("p", { className: "said" }, one.text)] : []),
    ...(one.pictures.length ? [make("div", { className: "figures small" }, ...one.pictures.map((picture) =>
      make("figure", {}, make("img", { src: picture.href, alt: `${one.name}: ${picture.name}` }), make("figcaption", {}, picture.name))))] : []),
    make("dl", {}, ...names.filter((name) => one.numbers[name] !== undefined).map((name) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, one.numbers[name] === null ? "undefined" : brief(one.numbers[name]))))));
}

function nameOf(one, open) {
  if (one.page) return make("a", { href: one.page }, one.name);
  if (one.answer !== null && open) return make("button", { type: "button", className: "link", dataset: { key: `example-${one.answer}` }, onclick: () => open(one.answer) }, one.name);
  return one.name;
}
