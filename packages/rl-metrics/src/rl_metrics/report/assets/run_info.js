"use strict";
// Further facts about a run: its end, settings and events.

function settingsTable(runs, kind, caption) {
  const names = [...new Set(runs.flatMap(({ header }) => header[kind].map(([name]) => name)))];
  if (!names.length) return null;
  const known = runs.map(({ header }) => new Map(header[kind]));
  const rows = names.map((name) => {
    const values = known.map((of) => of.get(name) ?? "–");
    const differs = new Set(values).size > 1;
    return [name, ...values.map((value) => (differs ? make("strong", {}, value) : value))];
  });
  return makeTable(caption, ["setting", ...runs.map(({ header }) => header.name)], rows);
}

const runView = {
  id: "run",
  title: "Run",
  render(place, runs) {
    const events = runs.map(({ header }) => {
      const rows = [...header.events].reverse().map(({ time, event, level, text }) => [
        moment(time), level ? make("span", { class: `level ${["error", "critical"].includes(level) ? "critical" : "warning"}` }, level) : "", event, text,
      ]);
      return rows.length ? makeTable(`Events of ${header.name}, newest first`, [["time", "moment"], "level", "event", ["", "long"]], rows) : null;
    });
    const spans = runs.map(({ header }) => [
      header.name, header.folder, moment(header.times[0]), moment(header.times[1]), header.steps, header.is_finished ? "yes" : "no",
    ]);
    const tables = [
      makeTable("Runs", ["run", "folder", ["first step", "moment"], ["newest step", "moment"], ["steps", "number"], "finished"], spans),
      settingsTable(runs, "summary", "Summary"),
      ...events,
      settingsTable(runs, "settings", "Settings; differences are bold"),
    ];
    place.replaceChildren(...tables.filter(Boolean));
  },
};
