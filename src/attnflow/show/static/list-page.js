// The page of a list: what is said above, a chart for each metric, and the examples.

function startList() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const panel = document.getElementById("panel"), tabs = document.getElementById("tabs");
  const chosen = { by: "", least: false };
  panel.removeAttribute("role");
  tabs.remove();

  /** The numbers of a chart, for those who read rather than look. */
  function tableOf(chart) {
    const digits = decimalsOf(chart.intervals.map((one) => one.mean ?? NaN)), number = (value) => (value === null ? "undefined" : numberOf(value, digits, false));
    return make("details", {}, make("summary", {}, "Numbers"), make("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": `Numbers of ${chart.name}` }, make("table", {},
      make("thead", {}, make("tr", {}, ...["method", "mean", "95 % interval", "examples", "undefined"].map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...bestFirst(chart).map((one) => make("tr", {}, make("td", {}, one.label), make("td", { className: "number" }, number(one.mean)),
        make("td", { className: "number" }, one.low === null ? "undefined" : `${number(one.low)} to ${number(one.high)}`), make("td", { className: "number" }, String(one.n)), make("td", { className: "number" }, String(one.undefined))))))));
  }

  function draw() {
    const theme = dark.matches ? DARK : LIGHT;
    panel.replaceChildren(
      ...(data.warning ? [make("p", { className: "warning" }, data.warning)] : []),
      ...(data.words.length ? [make("ul", {}, ...data.words.map((sentence) => make("li", {}, sentence)))] : []),
      ...data.charts.map((chart) => make("section", {}, make("h2", {}, `${chart.name}, ${chart.direction === "up" ? "more" : "less"} is better`),
        make("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": `Chart of ${chart.name}` }, drawnFrom(chartSvg(chart, theme, panel.clientWidth))),
        ...(chart.lines.length ? [make("div", { className: "figures" }, ...panelsOf(chart).map((one) => drawnFrom(curveSvg(chart, one, theme))))] : []), tableOf(chart))),
      ...(data.means.length ? [make("h2", {}, "Means of classes"), make("ol", { className: "examples" }, ...data.means.map((one) => exampleItem(one, [], null)))] : []),
      ...(data.examples.length ? [make("h2", {}, `${data.examples.length} examples`), ...exampleList(data.examples, chosen, (change) => {
        const key = document.activeElement?.dataset.key;
        Object.assign(chosen, change);
        draw();
        panel.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
      }, null)] : []));
    document.getElementById("footer").textContent = "Nothing here is fetched.";
  }

  dark.addEventListener("change", draw);
  draw();
}

if (typeof document !== "undefined") startList();
