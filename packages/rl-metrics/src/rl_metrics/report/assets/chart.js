"use strict";
// Charts, drawn when they come into view.

const CHART_HEIGHT = 190;
const MAX_MARKED = 60;
const cards = new Set();
const zooms = new Map(); // by a card's title, the steps that it shows

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColor(run) {
  return cssColor(`--run-${run % 7}`);
}

/** A colour such as #0072b2, let through so much. */
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

/** A figure whose chart `draw(place, width)` makes when it is seen. `label` tells what it shows without eyes. */
function chartCard(title, note, label, draw) {
  const place = make("div", {
    class: "chart", "data-key": title, role: "group", "aria-label": visible(label), tabindex: "0",
    "aria-keyshortcuts": "ArrowLeft ArrowRight Escape", onkeydown: onChartKey, onblur: onChartBlur,
  });
  const figure = make("figure", { class: "card" }, make("figcaption", {}, make("h3", {}, title), note), place);
  place.card = { title, place, draw, chart: null };
  cards.add(place.card);
  inView.observe(place);
  resized.observe(place);
  return figure;
}

/** A figure that has nothing to draw. */
function plainCard(title, note) {
  return make("figure", { class: "card" }, make("figcaption", {}, make("h3", {}, title), note));
}

/** Left and right move the cursor by a step; escape shows all steps, in all charts, as a double click does. */
function onChartKey(event) {
  const { chart } = event.currentTarget.card;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!chart || event.target !== event.currentTarget || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") for (const card of cards) showAllSteps(card);
  if (!by) return;
  event.preventDefault();
  legendOf(chart).setAttribute("aria-live", "polite"); // only what keys bring under the cursor is told
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

function showAllSteps({ title, chart }) {
  zooms.delete(title);
  const steps = chart?.data[0];
  if (steps?.length) chart.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
}

function drawCard(card) {
  const width = card.place.clientWidth;
  if (card.chart || !width) return;
  card.chart = card.draw(card.place, width);
  if (zooms.has(card.title)) card.chart.setScale("x", zooms.get(card.title));
  inView.unobserve(card.place);
}

/** What a reader has zoomed into stays when the chart is made anew. */
function keepZoom({ title, chart }) {
  const { min, max } = chart.scales.x;
  const steps = chart.data[0];
  if (min > steps[0] || max < steps[steps.length - 1]) zooms.set(title, { min, max });
  else zooms.delete(title);
}

/** Charts that are no longer in the page let go of what they hold. */
function dropCards() {
  for (const card of cards) {
    if (card.place.isConnected) continue;
    if (card.chart) {
      keepZoom(card);
      card.chart.destroy();
    }
    inView.unobserve(card.place);
    resized.unobserve(card.place);
    cards.delete(card);
  }
}

function redrawCards() {
  for (const card of cards) {
    if (!card.chart) continue;
    keepZoom(card);
    card.chart.destroy();
    card.chart = null;
    drawCard(card);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCards);
addEventListener("beforeprint", () => cards.forEach(drawCard));

/**
 * A chart over steps.
 * data: [x, ...ys]; series: [{label, stroke, ...}] as uPlot takes them.
 */
function stepChart(place, width, data, series, more = {}) {
  const text = cssColor("--muted");
  const grid = { stroke: cssColor("--line"), width: 1 };
  const axis = { stroke: text, grid, ticks: grid, font: "11px system-ui" };
  const { band, y = {}, bands } = more;
  return new uPlot(
    {
      width,
      height: CHART_HEIGHT,
      bands,
      cursor: { sync: { key: "steps" }, points: { size: 5 }, drag: { x: true, y: false } },
      legend: { live: true },
      scales: { x: { time: false }, y: { range: valueRange, ...y } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: tickRoom, values: (_, ticks) => ticks.map(number) },
      ],
      series: [{ label: "step" }, ...series.map((one) => seriesOf(one, data[0].length))],
      hooks: {
        ready: [tellNewest, makeSwitches], setCursor: [tellNewest], setSeries: [tellShown],
        drawClear: band ? [(chart) => drawBand(chart, band)] : [],
      },
    },
    data,
    place,
  );
}

/** While the cursor is elsewhere, the legend has the newest value of each curve. */
function tellNewest(chart) {
  if (Number.isInteger(chart.cursor.idx)) return;
  const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
  chart.setLegend({ idxs: chart.data.map((values) => values.findLastIndex(isKnown)) }, false);
}

/** The names of a legend hide and show their curves, also by keyboard. */
function makeSwitches(chart) {
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
}

/** Room for the longest label of an axis. */
function tickRoom(_, labels) {
  return Math.max(44, 20 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** A little more than the values; a curve that never moves lies in the middle. */
function valueRange(_, low, high) {
  if (low === null) return [0, 1];
  const room = Math.abs(low) / 10 || 1;
  return low === high ? [low - room, high + room] : uPlot.rangeNum(low, high, 0.1, true);
}

function seriesOf(one, length) {
  const points = { show: length <= MAX_MARKED, size: 4 };
  return { width: 1.5, spanGaps: true, points, value: (_, value) => number(value), ...one };
}

/** Healthy values, behind the curve. */
function drawBand(chart, { low, high }) {
  const { left, top, width, height } = chart.bbox;
  const place = (value, otherwise) => {
    if (value === null) return otherwise;
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
