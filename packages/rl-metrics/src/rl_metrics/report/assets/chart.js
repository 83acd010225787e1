"use strict";
// Charts, drawn when they come into view. They share the shown range of steps, which is in the URL.

const CHART_HEIGHT = 190;
const LARGE_HEIGHT = 250;
const MAX_MARKED = 60;
const cards = new Set();

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColor(run) {
  return cssColor(`--run-${run % 7}`);
}

/** A color such as #0072b2 with this opacity. */
function faded(color, share) {
  return color + Math.round(share * 255).toString(16).padStart(2, "0");
}

const inView = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) drawCard(target.card);
  },
  { rootMargin: "200px" },
);

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const width = target.clientWidth;
    if (target.card?.chart && width && width !== target.card.chart.width) {
      target.card.chart.setSize({ width, height: target.card.chart.height });
    }
  }
});

/** A figure whose chart `draw(place, width)` creates when it comes into view; `label` is for screen readers. */
function chartCard(title, note, label, draw) {
  const place = make("div", {
    class: "chart", "data-key": title, role: "group", "aria-label": visible(label), tabindex: "0",
    "aria-keyshortcuts": "ArrowLeft ArrowRight Enter Escape", onkeydown: onChartKey, onblur: onChartBlur,
  });
  const figure = make("figure", { class: "card" }, make("figcaption", {}, make("h3", {}, title), note), place);
  place.card = { place, draw, chart: null };
  cards.add(place.card);
  inView.observe(place);
  resized.observe(place);
  return figure;
}

/** A figure without a chart. */
function plainCard(title, note) {
  return make("figure", { class: "card" }, make("figcaption", {}, make("h3", {}, title), note));
}

/** Left and right move the cursor by a step, Enter chooses it; Escape shows all steps, like a double click. */
function onChartKey(event) {
  const { chart } = event.currentTarget.card;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!chart || event.target !== event.currentTarget || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") zoomTo("", "");
  if (event.key === "Enter") chart.choose();
  if (!by) return;
  event.preventDefault();
  legendOf(chart).setAttribute("aria-live", "polite"); // announce only values reached by keys
  const [first, last] = chart.series[0].idxs;
  const place = Math.min(Math.max((chart.cursor.idx ?? last + 1) + by, first), last);
  chart.setCursor({ left: chart.valToPos(chart.data[0][place], "x"), top: chart.over.clientHeight / 2 });
}

function onChartBlur({ currentTarget }) {
  const { chart } = currentTarget.card;
  legendOf(chart)?.removeAttribute("aria-live");
  chart?.setCursor({ left: -10, top: -10 });
}

function legendOf(chart) {
  return chart?.root.querySelector(".u-legend");
}

/** Show these steps in all charts, including those drawn later; "" shows all. */
function zoomTo(first, last) {
  viewState.set({ x0: first, x1: last }, { isQuiet: true });
  for (const field of document.querySelectorAll("input[name=x0], input[name=x1]")) field.value = viewState.get(field.name);
  for (const { chart } of cards) if (chart) showSteps(chart);
}

function showSteps(chart) {
  const steps = chart.data[0];
  if (steps.length < 2) return;
  const all = [steps[0], steps[steps.length - 1]];
  const [min, max] = [viewState.number("x0", all[0]), viewState.number("x1", all[1])];
  const isThere = min < max && min < all[1] && max > all[0];
  chart.setScale("x", isThere ? { min, max } : { min: all[0], max: all[1] });
}

/** Show the selected range in all charts. */
function zoomToSelected(chart) {
  const { left, width } = chart.select;
  if (!width) return;
  chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  const first = Math.round(chart.posToVal(left, "x"));
  zoomTo(first, Math.max(first + 1, Math.round(chart.posToVal(left + width, "x"))));
}

function drawCard(card) {
  const width = card.place.clientWidth;
  if (card.chart || !width) return;
  card.chart = card.draw(card.place, width);
  if (viewState.get("x0") + viewState.get("x1")) showSteps(card.chart);
  inView.unobserve(card.place);
}

/** Release charts that are no longer in the page. */
function dropCards() {
  for (const card of cards) {
    if (card.place.isConnected) continue;
    card.chart?.destroy();
    inView.unobserve(card.place);
    resized.unobserve(card.place);
    cards.delete(card);
  }
}

function redrawCards() {
  for (const card of cards) {
    if (!card.chart) continue;
    card.chart.destroy();
    card.chart = null;
    drawCard(card);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCards);
addEventListener("beforeprint", () => cards.forEach(drawCard));

/**
 * A chart over steps.
 * data: [x, ...ys]; series: [{label, stroke, ...}] in uPlot's format; `of` is the index of the curve a series belongs to.
 * more: healthy `band`, filled `bands` between series, options of the `y` scale, `height`, and `choose(step)`, called with
 * a clicked step.
 */
function stepChart(place, width, data, series, more = {}) {
  const text = cssColor("--muted");
  const grid = { stroke: cssColor("--line"), width: 1 };
  const axis = { stroke: text, grid, ticks: grid, font: "11px system-ui" };
  const { band, y = {}, bands, height = CHART_HEIGHT, choose = (step) => showStepLinks(place, step) } = more;
  const isZoom = (event) => ["mousedown", "mouseup", "dblclick"].includes(event);
  const chart = new uPlot(
    {
      width,
      height,
      bands,
      cursor: {
        sync: { key: "steps", filters: { pub: (event) => !isZoom(event) } },
        points: { size: 5 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => zoomTo("", "") },
      },
      legend: { live: true },
      scales: { x: { time: false }, y: { range: valueRange, ...y } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: tickRoom, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
      ],
      series: [{ label: "step" }, ...series.map((one) => seriesOf(one, data[0].length))],
      hooks: {
        ready: [tellNewest, makeSwitches], setCursor: [tellNewest], setSeries: [tellShown], setSelect: [zoomToSelected],
        drawClear: band ? [(chart) => drawBand(chart, band)] : [],
      },
    },
    data,
    place,
  );
  chart.choose = () => choose(chart.data[0][chart.cursor.idx ?? chart.series[0].idxs[1]]);
  chart.over.addEventListener("click", () => chart.choose());
  return chart;
}

/** Show the newest value of each curve in the legend while the cursor is elsewhere. */
function tellNewest(chart) {
  if (Number.isInteger(chart.cursor.idx)) return;
  const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
  chart.setLegend({ idxs: chart.data.map((values) => values.findLastIndex(isKnown)) }, false);
}

/** Make names of the legend toggle their curves, also by keyboard; companions of a curve have no entry. */
function makeSwitches(chart) {
  const entries = [...legendOf(chart).querySelectorAll(".u-series")];
  chart.series.forEach(({ of }, place) => of && entries[place].remove());
  for (const name of switches(chart)) {
    name.setAttribute("role", "button");
    name.tabIndex = 0;
    name.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      name.click();
    });
  }
  tellShown(chart);
}

function switches(chart) {
  return [...legendOf(chart).querySelectorAll(".u-label")].slice(1); // the first is the step's
}

function tellShown(chart) {
  switches(chart).forEach((name, place) => name.setAttribute("aria-pressed", String(chart.series[place + 1].show)));
  chart.series.forEach(({ of, show }, place) => {
    if (of && show !== chart.series[of].show) chart.setSeries(place, { show: !show });
  });
}

/** Room for the longest label of an axis. */
function tickRoom(_, labels) {
  return Math.max(44, 20 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** A range slightly larger than the values; a constant curve is centered, one of zeros at the bottom. */
function valueRange(_, low, high) {
  if (low === null || (low === 0 && high === 0)) return [0, 1];
  const room = Math.abs(low) / 10;
  return low === high ? [low - room, high + room] : uPlot.rangeNum(low, high, 0.1, true);
}

/** Options of a logarithmic y scale. */
const LOG_SCALE = { distr: 3, range: (_, low, high) => (low === null ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false)) };

function seriesOf(one, length) {
  const points = { show: length <= MAX_MARKED, size: 4 };
  return { width: 1.5, spanGaps: true, points, value: (_, value) => number(value), ...one };
}

/** Healthy values, behind the curve. */
function drawBand(chart, { low, high }) {
  const { left, top, width, height } = chart.bbox;
  const isLog = chart.scales.y.distr === 3;
  const place = (value, otherwise) => {
    if (value === null || (isLog && value <= 0)) return otherwise;
    return Math.min(Math.max(chart.valToPos(value, "y", true), top), top + height);
  };
  const upper = place(high, top);
  const lower = place(low, top + height);
  chart.ctx.save();
  chart.ctx.fillStyle = cssColor("--band");
  chart.ctx.fillRect(left, upper, width, Math.max(lower - upper, low === high ? 2 : 0));
  chart.ctx.restore();
}

/** Curves of several runs as one set of columns: [x, ...ys], null where a run has no value. */
function joined(curves) {
  return curves.length === 1 ? curves[0] : uPlot.join(curves);
}
