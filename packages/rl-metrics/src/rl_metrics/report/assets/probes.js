"use strict";
// What the policy thinks at chosen tokens, over the steps.

function probeCard(run, place, probe, isOneOfMany) {
  const steps = run.columns[`px${place}`];
  const shares = probe.candidates.map((_, index) => run.columns[`p${place}c${index}`].map((value) => Math.exp(value)));
  const names = probe.candidates.map((text) => `“${visible(text)}”`);
  const title = isOneOfMany ? `${probe.probe} · ${run.header.name}` : probe.probe;
  const newest = names.map((name, index) => `${name} ${percent(shares[index].at(-1))}`).join(", ");
  const asked = make(
    "p", { class: "note" },
    make("code", {}, snippet(probe.prompt, 200)), " → ", make("code", {}, snippet(probe.response, 120)),
    ` token ${probe.position + 1}: `, make("strong", {}, names[0]), `. Newest: ${newest}.`,
  );
  return chartCard(title, asked, `Probabilities of candidates at a token. Newest: ${newest}`, (target, width) => {
    const series = names.map((label, index) => ({
      label, stroke: cssColor(`--phase-${index % 12}`), width: index ? 1.2 : 2.5, spanGaps: false, value: (_, value) => percent(value ?? NaN),
    }));
    return stepChart(target, width, [steps, ...shares], series, { y: { range: [0, 1] } });
  });
}

const probesView = {
  id: "probes",
  title: "Probes",
  isThere: (runs) => runs.some(({ header }) => header.probes.length),
  render(place, runs) {
    const cardsOf = runs.flatMap((run) => run.header.probes.map((probe, number_) => probeCard(run, number_, probe, runs.length > 1)));
    const text = "Probabilities that the policy gives to the likeliest tokens at one place of a known response; the thick line is the response's own token.";
    place.replaceChildren(make("p", { class: "muted" }, text), make("div", { class: "cards" }, cardsOf));
  },
};
