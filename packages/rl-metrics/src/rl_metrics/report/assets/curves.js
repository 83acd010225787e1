"use strict";
// Every metric over the steps, with runs overlaid: the most important first and large, constant ones last.

const MAIN = [
  /^critic\/score\/mean$/, /^val-core\/.+\/mean@\d+$/, /^actor\/distillation\/loss$/, /^actor\/entropy$/,
  /^actor\/(ppo_kl|kl_loss|reference_kl)$/, /^response_length\/mean$/, /^actor\/grad_norm$/,
];
const ALWAYS_DRAWN = 2; // drawn even if constant: reward and validation
const INTERVAL_ENDS = ["/ci_low", "/ci_high"];
const ALMOST_ZERO = 1e-6; // nats: rounding of a KL that is 0 by design

/** Metrics by chapter in the order of the table; ends of intervals are drawn with their metric. */
function chaptersOf(runs) {
  const chapters = new Map();
  for (const run of runs) {
    for (const { name, chapter } of run.header.curves) {
      if (INTERVAL_ENDS.some((end) => name.endsWith(end) && metricPlace(run, name.slice(0, -end.length)) !== undefined)) continue;
      if (!chapters.has(chapter)) chapters.set(chapter, new Set());
      chapters.get(chapter).add(name);
    }
  }
  return chapters;
}

/** The index of a metric in a run; undefined if the run lacks it. */
function metricPlace(run, name) {
  run.places ??= new Map(run.header.curves.map((metric, place) => [metric.name, place]));
  return run.places.get(name);
}

/** The curve of a run's metric: {x, y, metric}; null without a value. */
function curveOf(run, name) {
  const place = metricPlace(run, name);
  const x = run.columns[`x${place}`];
  return x ? { x, y: run.columns[`y${place}`], metric: run.header.curves[place] } : null;
}

/** Whether a metric is constant in all runs, or 0 except for rounding; never-finite metrics are not constant. */
function standsStill(runs, name) {
  return runs.every((run) => {
    const curve = curveOf(run, name);
    if (!curve) return metricPlace(run, name) === undefined;
    const { y, metric } = curve;
    const limit = metric.unit === "nats" ? ALMOST_ZERO : 0;
    return y.every((value) => value === y[0]) || y.every((value) => Math.abs(value) < limit);
  });
}

/** The mean of the last `count` values at each place, ignoring unknown ones. */
function trailingMeans(values, count) {
  if (!(count > 1)) return values;
  return Float64Array.from(values, (_, place) => {
    const known = values.subarray(Math.max(0, place + 1 - count), place + 1).filter((value) => !Number.isNaN(value));
    return known.reduce((sum, value) => sum + value, 0) / known.length;
  });
}

/** "first: not finite at any of its 20 steps", for each run that wrote the metric but never a finite value. */
function neverFinite(runs, name) {
  return runs
    .filter((run) => metricPlace(run, name) !== undefined && !curveOf(run, name))
    .map(({ header }) => ` ${header.name}: not finite at any of its ${plural(header.num_rows, "step")}.`);
}

/** The definition of a metric. */
function meaningOf(runs, name) {
  const described = runs.find((run) => metricPlace(run, name) !== undefined);
  return described.header.curves[metricPlace(described, name)];
}

function metricCard(runs, name, { height } = {}) {
  const shown = runs.map((run, place) => ({ run, place, curve: curveOf(run, name) })).filter(({ curve }) => curve);
  const { unit, meaning, band } = meaningOf(runs, name);
  const last = shown.map(({ run, curve }) => `${run.header.name}: ${number(curve.y[curve.y.length - 1])} ${unit}`.trim());
  const thinned = shown.some(({ curve }) => curve.metric.is_thinned) ? " Thinned to the lowest and highest value of each range, also for means." : "";
  const leftOut = make("span", {});
  const note = make(
    "p",
    { class: "note" },
    unit ? make("span", { class: "unit" }, unit) : null,
    make("span", {}, meaning + thinned),
    band ? make("span", { class: "healthy" }, ` Healthy: ${band.text}.`) : null,
    leftOut,
    neverFinite(runs, name).map((text) => make("span", { class: "failure" }, text)),
  );
  if (!shown.length) return plainCard(name, note);
  const label = `${name}. ${meaning} Newest: ${last.join(", ")}`;
  return chartCard(name, note, label, (place, width) => {
    const { lines, bands } = linesOf(shown, name);
    const isLog = viewState.get("axis") === "log" && lines.some(({ y }) => y.some((value) => value > 0));
    const drawn = ({ x, y }) => [x, isLog ? Array.from(y, (value) => (value > 0 ? value : null)) : y];
    leftOut.textContent = isLog && lines.some(({ y }) => y.some((value) => value <= 0)) ? " The logarithmic axis omits values that are not above 0." : "";
    const series = lines.map(({ x, y, ...look }) => look);
    return stepChart(place, width, joined(lines.map(drawn)), series, { band, bands, height, y: isLog ? LOG_SCALE : {} });
  });
}

/** A curve per run, then its companions: the values if a mean is drawn, else the ends of the interval. */
function linesOf(shown, name) {
  const count = Number(viewState.key("smooth", SMOOTHINGS));
  const lines = shown.map(({ run, place, curve: { x, y } }) => ({ x, y: trailingMeans(y, count), label: run.header.name, stroke: runColor(place) }));
  const bands = [];
  shown.forEach(({ run, place, curve: { x, y } }, number_) => {
    const look = { of: number_ + 1, width: 1, points: { show: false }, stroke: faded(runColor(place), 0.35) };
    const ends = INTERVAL_ENDS.map((end) => curveOf(run, name + end)).filter(Boolean);
    if (count > 1) lines.push({ x, y, ...look });
    else if (ends.length === 2) {
      bands.push({ series: [lines.length + 2, lines.length + 1], fill: faded(runColor(place), 0.15) });
      lines.push(...ends.map((end) => ({ x: end.x, y: end.y, ...look, width: 0 })));
    }
  });
  return { lines, bands };
}

/** Constant metrics as a table, because a chart would show nothing. */
function stillTable(runs, names) {
  const value = (run, name) => {
    const curve = curveOf(run, name);
    if (!curve) return "–";
    return curve.y.every((one) => one === curve.y[0]) ? number(curve.y[0]) : "0 except for rounding";
  };
  const rows = names.map((name) => [name, ...runs.map((run) => value(run, name)), meaningOf(runs, name).meaning]);
  return makeTable("Metrics with the same value at all steps", [["metric", "name"], ...runs.map(({ header }) => [header.name, "number"]), ["", "long"]], rows);
}

const SMOOTHINGS = { "": "as recorded", 5: "mean of the last 5 values", 20: "mean of the last 20 values", 100: "mean of the last 100 values" };

const curvesView = {
  id: "curves",
  title: "Curves",
  render(place, runs) {
    const body = make("div", {});
    const wanted = stateInput("chart", { type: "search", id: "search", placeholder: "part of a metric's name" }, (chart) => {
      viewState.set({ chart });
      drawCurves(body, runs);
    });
    const choice = (name, label, options) =>
      labelled(label, makeSelect(label, options, viewState.get(name), (value) => {
        viewState.set({ [name]: value });
        redrawCards();
      }));
    const smoothings = Object.entries(SMOOTHINGS).sort(([one], [other]) => one - other); // numbers come before ""
    const step = (name, label) =>
      stateInput(name, { type: "number", step: 1, placeholder: name === "x0" ? "first" : "last", "aria-label": label }, (value) => zoomTo(...(name === "x0" ? [value, viewState.get("x1")] : [viewState.get("x0"), value])));
    place.replaceChildren(
      make(
        "div", { class: "bar" },
        labelled("Metric", wanted),
        choice("smooth", "Curves", smoothings),
        choice("axis", "Values", [["", "linear"], ["log", "logarithmic"]]),
        labelled("Steps", make("span", { class: "range" }, step("x0", "Steps from"), "–", step("x1", "Steps to"))),
        runLegend(runs),
      ),
      body,
    );
    drawCurves(body, runs);
  },
};

function drawCurves(body, runs) {
  const text = INTERVAL_ENDS.reduce((name, end) => name.replace(end, ""), viewState.get("chart").trim().toLowerCase());
  const chapters = [...chaptersOf(runs)].map(([title, names]) => [title, [...names].filter((name) => name.toLowerCase().includes(text))]);
  const all = chapters.flatMap(([, names]) => names);
  const main = MAIN.map((pattern) => all.filter((name) => pattern.test(name)));
  const drawn = new Set(main.slice(0, ALWAYS_DRAWN).flat());
  const still = all.filter((name) => !drawn.has(name) && standsStill(runs, name));
  const first = main.flat().filter((name) => !still.includes(name));
  const isRest = (name) => !first.includes(name) && !still.includes(name);
  const parts = [["Main", first], ...chapters.map(([title, names]) => [title, names.filter(isRest)])].filter(([, names]) => names.length);
  const nodes = parts.map(([title, names]) => {
    const height = title === "Main" ? LARGE_HEIGHT : undefined;
    const cardsOf = names.map((name) => metricCard(runs, name, { height }));
    const summary = [make("h2", {}, title), ` ${plural(names.length, "metric")}`];
    return foldable(`chapter ${title}`, true, "chapter", summary, make("div", { class: `cards ${height ? "large" : ""}` }, cardsOf));
  });
  if (still.length) {
    const summary = [make("h2", {}, "Constant"), ` ${plural(still.length, "metric")}`];
    nodes.push(foldable("chapter still", text !== "" || all.every((name) => drawn.has(name) || still.includes(name)), "chapter", summary, stillTable(runs, still)));
  }
  const none = make("p", { class: "muted" }, text ? "No metric has this text in its name." : "The run has no metrics yet.");
  body.replaceChildren(...(nodes.length ? nodes : [none]));
  dropCards();
}

function runLegend(runs) {
  if (runs.length < 2) return null;
  const items = runs.map(({ header }, place) =>
    make("li", {}, make("span", { class: `swatch run-${place % 7}` }), header.name),
  );
  return make("ul", { class: "legend", "aria-label": "Runs" }, items);
}
