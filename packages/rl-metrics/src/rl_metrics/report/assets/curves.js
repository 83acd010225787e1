"use strict";
// Every metric over the steps, runs laid over each other.

/** Metrics by chapter in the order of the table. */
function chaptersOf(runs) {
  const chapters = new Map();
  for (const { header } of runs) {
    for (const { name, chapter } of header.curves) {
      if (!chapters.has(chapter)) chapters.set(chapter, new Set());
      chapters.get(chapter).add(name);
    }
  }
  return chapters;
}

function metricNames(runs) {
  return [...new Set(runs.flatMap(({ header }) => header.curves.map(({ name }) => name)))];
}

/** The place of a metric among those of a run; undefined where it has no such metric. */
function metricPlace(run, name) {
  run.places ??= new Map(run.header.curves.map((metric, place) => [metric.name, place]));
  return run.places.get(name);
}

/** The curve of a metric of a run: {x, y, metric}; null where it has none, or no value of it. */
function curveOf(run, name) {
  const place = metricPlace(run, name);
  const x = run.columns[`x${place}`];
  return x ? { x, y: run.columns[`y${place}`], metric: run.header.curves[place] } : null;
}

/** The mean of each value and those before it, so many together; what is not known is left out. */
function trailingMeans(values, count) {
  if (!(count > 1)) return values;
  return Float64Array.from(values, (_, place) => {
    const known = values.subarray(Math.max(0, place + 1 - count), place + 1).filter((value) => !Number.isNaN(value));
    return known.reduce((sum, value) => sum + value, 0) / known.length;
  });
}

/** "first: it was not finite at any of its 20 steps", of each run that wrote the metric, and never a number. */
function neverFinite(runs, name) {
  return runs
    .filter((run) => metricPlace(run, name) !== undefined && !curveOf(run, name))
    .map(({ header }) => ` ${header.name}: it was not finite at any of its ${plural(header.num_rows, "step")}.`);
}

function metricCard(runs, name) {
  const found = runs.map((run, place) => ({ place, name: run.header.name, curve: curveOf(run, name) }));
  const shown = found.filter(({ curve }) => curve);
  const described = runs.find((run) => metricPlace(run, name) !== undefined);
  const { unit, meaning, band } = described.header.curves[metricPlace(described, name)];
  const last = shown.map((one) => `${one.name}: ${number(one.curve.y[one.curve.y.length - 1])} ${unit}`.trim());
  const thinned = shown.some(({ curve }) => curve.metric.is_thinned) ? " Thinned: lowest and highest of each stretch, also for means." : "";
  const note = make(
    "p",
    { class: "note" },
    unit ? make("span", { class: "unit" }, unit) : null,
    make("span", {}, meaning + thinned),
    band ? make("span", { class: "healthy" }, ` Healthy: ${band.text}.`) : null,
    neverFinite(runs, name).map((text) => make("span", { class: "failure" }, text)),
  );
  if (!shown.length) return plainCard(name, note);
  const label = `${name}. ${meaning} Newest: ${last.join(", ")}`;
  return chartCard(name, note, label, (place, width) => {
    const count = Number(viewState.key("smooth", SMOOTHINGS));
    const data = joined(shown.map(({ curve }) => [curve.x, trailingMeans(curve.y, count)]));
    const series = shown.map((one) => ({ label: one.name, stroke: runColor(one.place) }));
    return stepChart(place, width, data, series, { band });
  });
}

const SMOOTHINGS = { "": "as recorded", 5: "mean of the last 5 values", 20: "mean of the last 20 values", 100: "mean of the last 100 values" };

const curvesView = {
  id: "curves",
  title: "Curves",
  render(place, runs) {
    const body = make("div", {});
    const wanted = make("input", { type: "search", name: "chart", id: "search", placeholder: "part of a metric's name" });
    wanted.value = viewState.get("chart");
    const draw = () => {
      const text = wanted.value.trim().toLowerCase();
      const chapters = [...chaptersOf(runs)].map(([chapter, names]) => {
        const matching = [...names].filter((name) => name.toLowerCase().includes(text));
        if (!matching.length) return null;
        const cardsOf = matching.map((name) => metricCard(runs, name));
        const summary = [make("h2", {}, chapter), ` ${plural(matching.length, "metric")}`];
        return foldable(`chapter ${chapter}`, true, "chapter", summary, make("div", { class: "cards" }, cardsOf));
      });
      const none = make("p", { class: "muted" }, text ? "No metric has this in its name." : "The run has no metrics yet.");
      body.replaceChildren(...(chapters.some(Boolean) ? chapters.filter(Boolean) : [none]));
      dropCards();
    };
    wanted.addEventListener("input", settled(() => {
      viewState.set({ chart: wanted.value });
      draw();
    }));
    const smoothings = Object.entries(SMOOTHINGS).sort(([one], [other]) => one - other); // numbers come before ""
    const smooth = makeSelect("Smoothing", smoothings, viewState.get("smooth"), (value) => {
      viewState.set({ smooth: value });
      redrawCards();
    });
    place.replaceChildren(
      make("div", { class: "bar" }, labelled("Metric", wanted), labelled("Curves", smooth), runLegend(runs)),
      body,
    );
    draw();
  },
};

function runLegend(runs) {
  if (runs.length < 2) return null;
  const items = runs.map(({ header }, place) =>
    make("li", {}, make("span", { class: `swatch run-${place % 7}` }), header.name),
  );
  return make("ul", { class: "legend", "aria-label": "Runs" }, items);
}
