"use strict";
// Distributions over the steps: bands between quantiles, and the median.

function distributionCard(run, place, runs) {
  return run.header.distributions.map(({ name, quantiles, unit, meaning }, number_) => {
    const columns = quantiles.map((_, index) => run.columns[`d${number_}q${index}`]);
    const steps = run.columns[`dx${number_}`];
    const middle = columns[quantiles.indexOf(0.5)];
    const title = runs.length > 1 ? `${name} · ${run.header.name}` : name;
    const ends = [0, 0.5, 0.95, 1].map((quantile) => `${quantileName(quantile)} ${number(columns[quantiles.indexOf(quantile)].at(-1))}`);
    const note = make("p", { class: "note" }, unit ? make("span", { class: "unit" }, unit) : null, `${meaning} Newest: ${ends.join(", ")}.`);
    const label = `${title}. ${meaning} Median at the newest step ${number(middle.at(-1))}.`;
    return chartCard(title, note, label, (target, width) => {
      const color = runColor(place);
      const series = quantiles.map((quantile) => ({
        label: quantileName(quantile), stroke: quantile === 0.5 ? color : faded(color, 0.4),
        width: quantile === 0.5 ? 2 : 1, points: { show: false },
      }));
      const bands = [];
      for (let low = 0, high = quantiles.length - 1; low < high; low++, high--) {
        bands.push({ series: [high + 1, low + 1], fill: faded(color, 0.12 + 0.1 * low) });
      }
      return stepChart(target, width, [steps, ...columns], series, { bands });
    });
  });
}

function quantileName(quantile) {
  return { 0: "lowest", 0.5: "median", 1: "highest" }[quantile] ?? percent(quantile);
}

const distributionsView = {
  id: "distributions",
  title: "Distributions",
  isThere: (runs) => runs.some(({ header }) => header.distributions.length),
  render(place, runs) {
    const all = runs.flatMap((run, number_) => distributionCard(run, number_, runs));
    all.sort((one, other) => one.querySelector("h3").textContent.localeCompare(other.querySelector("h3").textContent));
    const accuracy = "Quantiles between the lowest and the highest value are accurate to 2 %.";
    place.replaceChildren(make("p", { class: "muted" }, accuracy), make("div", { class: "cards" }, all));
  },
};
