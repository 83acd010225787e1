"use strict";
// The rollout viewer: filters, the list, and the trajectory; of several runs the same problem beside it.

const viewer = { generation: 0, list: null, panes: null, shown: "" };

const rolloutsView = {
  id: "rollouts",
  title: "Rollouts",
  render(place, runs, { isRenewed = false } = {}) {
    const number_ = viewState.place("run", runs.length, 0);
    const { trajectories } = runs[number_];
    const status = make("p", { class: "muted", role: "status", id: "found" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Search" });
    const panes = viewer.panes ?? make("div", { class: "panes" }); // what is shown in them stays, as long as it is the same
    viewer.panes = panes;
    const list = new TrajectoryList(trajectories, (row) => viewState.set({ row }));
    const listed = isRenewed && viewer.shown === filterText() ? viewer.list?.rows : undefined;
    viewer.list = list;
    const refresh = (before) => {
      viewer.shown = filterText();
      listRows(trajectories, list, status, progress, before);
      showPanes(panes, runs, number_);
    };
    place.replaceChildren(
      filterForm(runs, trajectories, () => refresh()),
      make("div", { class: "viewer" },
        make("div", { class: "side-list" }, make("div", { class: "found" }, status, progress), list.place), panes),
    );
    viewer.show = () => showPanes(panes, runs, number_);
    refresh(listed);
  },
  /** Follow the URL without making everything anew, where only the trajectory is another. */
  follow(place, runs) {
    if (filterText() !== viewer.shown) return this.render(place, runs);
    const row = viewState.place("row", runs[viewState.place("run", runs.length, 0)].trajectories.count);
    if (viewer.list && row !== viewer.list.selected) viewer.list.select(row, { isQuiet: true });
    return viewer.show();
  },
};

function filterText() {
  return ["run", ...FILTERS].map((name) => viewState.get(name)).join("\n");
}

/** List what the filters let through; rows that were listed `before` stay until a search is through. */
async function listRows(trajectories, list, status, progress, before) {
  const generation = ++viewer.generation;
  const isOver = () => generation !== viewer.generation;
  const rows = matchingRows(trajectories);
  const text = viewState.get("q");
  const selected = viewState.place("row", trajectories.count);
  if (text === "") {
    progress.hidden = true;
    list.show(rows, selected, { stays: before !== undefined });
    status.textContent = foundText(trajectories, rows.length);
    return;
  }
  progress.hidden = false;
  list.show(before ?? [], selected);
  const found = await searchTexts(trajectories, rows, text, {
    isOver,
    progress: (share, soFar) => {
      progress.value = share;
      if (before) return;
      list.show(soFar, selected);
      status.textContent = `${plural(soFar.length, "trajectory", "trajectories")} so far`;
    },
  });
  if (!found || isOver()) return;
  progress.hidden = true;
  list.show(found, selected, { stays: before !== undefined });
  status.textContent = foundText(trajectories, found.length);
}

function foundText(trajectories, count) {
  const { count: all, recorded } = trajectories;
  const kept = recorded > all ? ` kept of ${recorded.toLocaleString("en")} recorded: whole problems drawn fairly, and the worst` : "";
  return `${count.toLocaleString("en")} of ${plural(all, "trajectory", "trajectories")}${kept}`;
}

/** The chosen trajectory, and beside it the same problem of the other run. */
function showPanes(panes, runs, number_) {
  const { trajectories } = runs[number_];
  const row = viewState.place("row", trajectories.count);
  if (row < 0) {
    const text = trajectories.count
      ? "Choose a trajectory: arrow keys go through the list, left and right through the tokens."
      : "The run recorded no trajectories.";
    panes.replaceChildren(make("div", { class: "pane" }, make("p", { class: "muted" }, text)));
    return;
  }
  const wanted = runs.length > 1 ? [[number_, row], otherRun(runs, number_, row)] : [[number_, row]];
  while (panes.children.length > wanted.length || panes.querySelector(".pane > p:only-child")) panes.lastChild.remove();
  wanted.forEach(([run, ofRun], place) => {
    if (!panes.children[place]) panes.append(make("article", { class: "pane", tabindex: "0", "aria-label": `Trajectory ${place + 1}` }));
    const pane = panes.children[place];
    if (ofRun === undefined) {
      pane.shown = "";
      pane.replaceChildren(make("div", {}, besideChoice(runs, number_, run), make("p", { class: "muted" }, "This run recorded no trajectory of the problem.")));
      return;
    }
    if (pane.shown === trajectoryKey(runs, run, ofRun)) return;
    showTrajectory(pane, runs, run, ofRun, { isBeside: place > 0 }).then(
      (text) => text && place > 0 && pane.prepend(besideChoice(runs, number_, run)),
      (error) => pane.replaceChildren(make("p", { class: "failure" }, `It cannot be shown: ${error.message}`)),
    );
  });
}

function besideChoice(runs, number_, chosen) {
  const others = runs.map(({ header }, place) => [String(place), header.name]).filter(([place]) => Number(place) !== number_);
  return labelled("Beside", makeSelect("Run beside", others, String(chosen), (value) => viewState.set({ beside: value, other: "" })));
}

/** The run beside, and its trajectory of the same problem at the nearest step. */
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
