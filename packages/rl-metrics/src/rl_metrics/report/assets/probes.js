"use strict";
// The policy's predictions at chosen tokens, over the steps.

const LEAST_TOLD = 1e-3;

function probeCard(run, place, probe, isOneOfMany) {
  const steps = run.columns[`px${place}`];
  const shares = probe.candidates.map((_, index) => run.columns[`p${place}c${index}`].map((value) => Math.exp(value)));
  const names = probe.candidates.map((text) => `“${visible(text)}”`);
  const asked_ = `${snippet(probe.prompt, 60)} → ${snippet(probe.response, 30)}`;
  const title = isOneOfMany ? `${asked_} · ${run.header.name}` : asked_;
  const newest = names
    .map((name, index) => [name, shares[index].at(-1)])
    .filter(([, share], index) => index === 0 || share >= LEAST_TOLD)
    .sort((one, other) => other[1] - one[1])
    .map(([name, share]) => `${name} ${percent(share)}`)
    .join(", ");
  const asked = make(
    "p", { class: "note", title: visible(`${probe.probe}\n${probe.prompt}\n${probe.response}`) },
    `Token ${probe.position + 1} of the response: `, make("strong", {}, names[0]), `. Newest: ${newest}.`,
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
    const text = "Probabilities of the policy's top tokens at one position of a known response; the thick line is the probed token: the response's own, or one that the run's settings name.";
    place.replaceChildren(make("p", { class: "muted" }, text), make("div", { class: "cards" }, cardsOf));
  },
};
