"use strict";
// The page: loads the runs, shows the view in the URL, and follows the runs if it is served.

const VIEWS = [outcomeView, curvesView, rolloutsView, validationView, worstView, timesView, distributionsView, probesView, runView];
const POLL_MS = 2000;

const page = { runs: [], written: 0, view: null };

async function loadRun(name) {
  const { header, columns } = await store.read(name);
  const trajectories = new Trajectories(await store.read(header.index));
  const generations = new Generations(await store.read(header.generations));
  return { header, columns, trajectories, generations };
}

async function loadReport() {
  const manifest = await store.manifest();
  if (manifest.written === page.written) return false;
  page.runs = await Promise.all(manifest.runs.map(loadRun));
  page.written = manifest.written;
  return true;
}

function chosenView() {
  const there = VIEWS.filter((view) => view.isThere?.(page.runs) ?? true);
  return there.find(({ id }) => id === viewState.get("view")) ?? there[0];
}

function showNavigation() {
  const links = VIEWS.filter((view) => view.isThere?.(page.runs) ?? true).map(({ id, title }) =>
    make("a", { href: location.href.split("#")[0] + viewState.link({ view: id }), "data-view": id, onclick: (event) => goTo(event, id) }, title),
  );
  byId("views").replaceChildren(...links);
}

function goTo(event, view) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  viewState.set({ view }, { isStep: true });
}

function markView() {
  byId("view").textContent = page.view.title; // for screen readers
  const views = byId("views");
  for (const link of views.children) {
    if (link.dataset.view !== page.view.id) {
      link.removeAttribute("aria-current");
      continue;
    }
    link.setAttribute("aria-current", "page");
    views.scrollLeft = link.offsetLeft - views.offsetLeft - (views.clientWidth - link.offsetWidth) / 2; // a phone shows a few at once
  }
}

function showPage({ isRenewed = false } = {}) {
  const view = chosenView();
  const main = byId("main");
  hideTip();
  if (page.view === view && view.follow && !isRenewed) {
    view.follow(main, page.runs);
  } else if (page.view !== view || isRenewed || view.id !== "curves") {
    page.view = view;
    main.className = `view-${view.id}`;
    view.render(main, page.runs, { isRenewed });
    dropCards();
  }
  markView();
}

function showTitle() {
  const names = page.runs.map(({ header }) => header.name).join(", ");
  document.title = `${visible(names)} – report`;
  byId("title").textContent = visible(names);
  byId("title").title = `Written ${moment(page.written)}`;
  showVerdicts(page.runs);
  showNavigation();
}

function showFailure(error) {
  byId("main").replaceChildren(make("p", { class: "failure", role: "alert" }, `The report cannot be shown: ${error.message}`));
}

/** Poll the server for updates, keeping the reader's position. */
async function follow() {
  try {
    if (await loadReport()) {
      keepingPlace(byId("main"), () => {
        showTitle();
        showPage({ isRenewed: true });
      });
    }
    document.body.classList.remove("offline");
  } catch {
    document.body.classList.add("offline");
  }
  setTimeout(follow, POLL_MS);
}

/** Tell sticky elements the height of the header. */
new ResizeObserver(([{ target }]) => document.documentElement.style.setProperty("--header", `${target.offsetHeight}px`))
  .observe(document.querySelector("header"));

async function begin() {
  try {
    await loadReport();
    showTitle();
    showPage();
    viewState.listeners.push(() => showPage());
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    showFailure(error);
  }
  if (store.isLive) setTimeout(follow, POLL_MS);
}

begin();
