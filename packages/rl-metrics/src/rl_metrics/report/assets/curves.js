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

/** The curve of a metric of a run: {x, y, metric}, or null. */
function curveOf(run, name) {
  run.places ??= new Map(run.header.curves.map((metric, place) => [metric.name, place]));
  const place = run.places.get(name);
  if (place === undefined) return null;
  return { x: run.columns[`x${place}`], y: run.columns[`y${place}`], metric: run.header.curves[place] };
}

/** Exponential moving average over so many steps. */
function smoothed(values, steps) {
  if (!(steps > 1)) return values;
  const weight = 2 / (steps + 1);
  let mean = values[0];
  return values.map((value) => (mean += weight * (value - mean)));
}

function metricCard(runs, name) {
  const found = runs.map((run, place) => ({ place, name: run.header.name, curve: curveOf(run, name) }));
  const shown = found.filter(({ curve }) => curve);
  const { unit, meaning, band } = shown[0].curve.metric;
  const last = shown.map((one) => `${one.name}: ${number(one.curve.y[one.curve.y.length - 1])} ${unit}`.trim());
  const thinned = shown.some(({ curve }) => curve.metric.is_thinned) ? " Thinned: lowest and highest of each stretch." : "";
  const note = make(
    "p",
    { class: "note" },
    unit ? make("span", { class: "unit" }, unit) : null,
    make("span", {}, meaning + thinned),
    band ? make("span", { class: "healthy" }, ` Healthy: ${band.text}.`) : null,
  );
  const label = `${name}. ${meaning} Newest: ${last.join(", ")}`;
  return chartCard(name, note, label, (place, width) => {
    const steps = viewState.number("smooth", 0);
    const data = joined(shown.map(({ curve }) => [curve.x, smoothed(curve.y, steps)]));
    const series = shown.map((one) => ({ label: one.name, stroke: runColor(one.place) }));
    return stepChart(place, width, data, series, { band });
  });
}

const SMOOTHINGS = [["", "as recorded"], ["5", "mean of 5 steps"], ["20", "mean of 20 steps"], ["100", "mean of 100 steps"]];

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
        const summary = make("summary", {}, make("h2", {}, chapter), ` ${plural(matching.length, "metric")}`);
        return make("details", { class: "chapter", open: true }, summary, make("div", { class: "cards" }, cardsOf));
      });
      const none = make("p", { class: "muted" }, text ? "No metric has this in its name." : "The run has no metrics yet.");
      body.replaceChildren(...(chapters.some(Boolean) ? chapters.filter(Boolean) : [none]));
      dropCards();
    };
    wanted.addEventListener("input", settled(() => {
      viewState.set({ chart: wanted.value });
      draw();
    }));
    const smooth = makeSelect("Smoothing", SMOOTHINGS, viewState.get("smooth"), (value) => {
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
