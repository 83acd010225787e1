"use strict";
// The rollout viewer: filters, list and trajectory, with the same problem of another run next to it.

/** State of a single trajectory: the chosen token, and the trajectory of its group to compare with. */
const NO_CHOICE = { token: "", with: "" };

const viewer = { generation: 0, isSearching: false, list: null, panes: null, shown: "" };

const rolloutsView = {
  id: "rollouts",
  title: "Rollouts",
  render(place, runs, { isRenewed = false } = {}) {
    const number_ = viewState.place("run", runs.length, 0);
    const { trajectories } = runs[number_];
    const status = make("p", { class: "muted", role: "status", id: "found" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Search" });
    const panes = viewer.panes ?? make("div", { class: "panes" }); // their content stays if it is unchanged
    viewer.panes = panes;
    const list = new TrajectoryList(trajectories, (row) => viewState.set({ row, ...NO_CHOICE }));
    const listed = isRenewed && viewer.shown === filterText() ? viewer.list?.rows : undefined;
    viewer.list = list;
    viewer.show = () => showPanes(panes, runs, number_);
    const refresh = (before) => {
      viewer.shown = filterText();
      listRows(trajectories, list, status, progress, before);
    };
    place.replaceChildren(
      filterForm(runs, trajectories, () => refresh()),
      make("div", { class: "viewer" },
        make("div", { class: "side-list" }, make("div", { class: "found" }, status, progress), list.place), panes),
    );
    refresh(listed);
  },
  /** Follow the URL without rendering everything again if only the trajectory changes. */
  follow(place, runs) {
    if (filterText() !== viewer.shown) return this.render(place, runs);
    const row = chosenRow(runs[viewState.place("run", runs.length, 0)].trajectories);
    if (viewer.list && row !== viewer.list.selected) viewer.list.select(row, { isQuiet: true });
    return viewer.show();
  },
};

function filterText() {
  return ["run", ...FILTERS].map((name) => viewState.get(name)).join("\n");
}

/** The trajectory in the URL, or else the first of the list. */
function chosenRow({ count }) {
  const row = viewState.place("row", count);
  return row >= 0 ? row : (viewer.list?.rows[0] ?? -1);
}

/** List the rows that match the filters; rows listed `before` stay until a search is done. */
async function listRows(trajectories, list, status, progress, before) {
  const generation = ++viewer.generation;
  const isOver = () => generation !== viewer.generation;
  const rows = matchingRows(trajectories);
  const text = viewState.get("q");
  const show = (listed, more) => {
    list.rows = listed; // the first of them may be shown
    list.show(listed, chosenRow(trajectories), more);
    viewer.show();
  };
  if (text === "") {
    viewer.isSearching = false;
    progress.hidden = true;
    show(rows, { stays: before !== undefined });
    status.textContent = foundText(trajectories, rows.length);
    return;
  }
  viewer.isSearching = true;
  progress.hidden = false;
  show(before ?? []);
  const found = await searchTexts(trajectories, rows, text, {
    isOver,
    progress: (share, soFar) => {
      progress.value = share;
      if (before) return;
      show(soFar);
      status.textContent = `${plural(soFar.length, "trajectory", "trajectories")} so far`;
    },
  });
  if (!found || isOver()) return;
  viewer.isSearching = false;
  progress.hidden = true;
  show(found, { stays: before !== undefined });
  status.textContent = foundText(trajectories, found.length);
}

function foundText(trajectories, count) {
  const { count: all, recorded } = trajectories;
  const kept = recorded > all ? ` kept of ${recorded.toLocaleString("en")} recorded: a fair sample of complete problems, and the worst` : "";
  return `${count.toLocaleString("en")} of ${plural(all, "trajectory", "trajectories")}${kept}`;
}

/** Show the chosen trajectory, and next to it the same problem of another run. */
function showPanes(panes, runs, number_) {
  const { trajectories } = runs[number_];
  const row = chosenRow(trajectories);
  if (row < 0) {
    const text = trajectories.count ? (viewer.isSearching ? "Searching …" : "No trajectory matches the filters.") : "The run recorded no trajectories.";
    panes.replaceChildren(make("div", { class: "pane" }, make("p", { class: "muted" }, text)));
    return;
  }
  const wanted = besides(runs, number_, row);
  const isAlone = wanted.length < 2 || wanted[1][1] === undefined;
  while (panes.children.length > wanted.length || panes.querySelector(".pane > p:only-child")) panes.lastChild.remove();
  wanted.forEach(([run, ofRun], place) => {
    if (!panes.children[place]) panes.append(make("article", { class: "pane", tabindex: "0", "aria-label": `Trajectory ${place + 1}` }));
    const pane = panes.children[place];
    if (ofRun === undefined) {
      pane.shown = "";
      pane.replaceChildren(make("div", {}, besideChoice(runs, number_, run), make("p", { class: "muted" }, "This run recorded no trajectory of this problem.")));
      return;
    }
    const against = isAlone ? null : wanted[1 - place];
    if (pane.shown === trajectoryKey(runs, run, ofRun, against)) return;
    showTrajectory(pane, runs, run, ofRun, { isBeside: place > 0, against }).then(
      (text) => text && place > 0 && run !== number_ && pane.prepend(besideChoice(runs, number_, run)),
      (error) => pane.replaceChildren(make("p", { class: "failure" }, `The trajectory cannot be shown: ${error.message}`)),
    );
  });
}

function besideChoice(runs, number_, chosen) {
  const others = runs.map(({ header }, place) => [String(place), header.name]).filter(([place]) => Number(place) !== number_);
  return labelled("Next to it", makeSelect("Run next to it", others, String(chosen), (value) => viewState.set({ beside: value, other: "" })));
}

/** The trajectory and its neighbor: a chosen one of its group, or that of the other run. */
function besides(runs, number_, row) {
  const other = viewState.place("with", runs[number_].trajectories.count);
  if (other >= 0 && other !== row) return [[number_, row], [number_, other]];
  return runs.length > 1 ? [[number_, row], otherRun(runs, number_, row)] : [[number_, row]];
}

/** The neighboring run, and its trajectory of the same problem at the nearest step. */
function otherRun(runs, number_, row) {
  const wanted = viewState.place("beside", runs.length, number_);
  const other = wanted === number_ ? Number(number_ === 0) : wanted;
  const { trajectories } = runs[number_];
  const beside = runs[other].trajectories;
  return [other, beside.nearest(trajectories.name("problem", row), trajectories.columns.step[row])];
}

addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, select, textarea, .list, .tokens");
  if (isTyping) return;
  const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
  const search = byId("search");
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  } else if (by && viewState.get("view") === "rollouts" && viewer.list && !event.target.closest?.(".pane") && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    viewer.list.move(by);
  }
});
