"use strict";
// The list of trajectories; only visible rows are in the page, so that it can be very long.

const ROW_HEIGHT = 46;
const SPARE_ROWS = 6;

class TrajectoryList {
  constructor(trajectories, chosen) {
    this.trajectories = trajectories;
    this.chosen = chosen;
    this.rows = [];
    this.selected = -1;
    this.sheet = make("div", { class: "sheet", role: "presentation" });
    this.place = make(
      "div",
      {
        class: "list", id: "trajectories", role: "listbox", tabindex: "0", "aria-label": "Trajectories",
        onscroll: () => this.draw(),
        onkeydown: (event) => this.onKey(event),
        onclick: (event) => this.onClick(event),
      },
      this.sheet,
    );
    this.height = 0;
    new ResizeObserver(() => this.onResize()).observe(this.place);
  }

  /** After a change of the list's height, keep a visible selected row in view. */
  onResize() {
    const place = this.rows.indexOf(this.selected);
    const top = place * ROW_HEIGHT - this.place.scrollTop;
    if (place >= 0 && top >= 0 && (top < this.height || !this.height)) this.reveal(place);
    this.height = this.place.clientHeight;
    this.draw();
  }

  /** List these rows, and scroll to the selected one if it is among them, unless `stays`. */
  show(rows, selected, { stays = false } = {}) {
    this.rows = rows;
    this.sheet.style.height = `${rows.length * ROW_HEIGHT}px`;
    this.select(selected, { isQuiet: true, stays });
  }

  select(row, { isQuiet = false, stays = false } = {}) {
    this.selected = row;
    const place = this.rows.indexOf(row);
    if (place >= 0 && !stays) this.reveal(place);
    this.draw();
    if (!isQuiet) this.chosen(row);
  }

  reveal(place) {
    const top = place * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.place;
    if (top < scrollTop) this.place.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + clientHeight) this.place.scrollTop = top + ROW_HEIGHT - clientHeight;
  }

  onKey(event) {
    const page = Math.max(1, Math.floor(this.place.clientHeight / ROW_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.move(moves[event.key]);
  }

  move(by) {
    if (!this.rows.length) return;
    const place = Math.max(-1, this.rows.indexOf(this.selected));
    this.select(this.rows[Math.min(Math.max(place + by, 0), this.rows.length - 1)]);
  }

  onClick(event) {
    const item = event.target.closest("[role=option]");
    if (!item) return;
    this.select(Number(item.dataset.row));
    if (isNarrow()) document.querySelector(".panes").scrollIntoView(); // they are below the list
  }

  draw() {
    const first = Math.max(0, Math.floor(this.place.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.ceil((this.place.scrollTop + this.place.clientHeight) / ROW_HEIGHT) + SPARE_ROWS;
    this.sheet.replaceChildren(...this.rows.slice(first, last).map((row, place) => this.item(row, first + place)));
    const isShown = this.sheet.querySelector("[aria-selected=true]");
    if (isShown) this.place.setAttribute("aria-activedescendant", isShown.id);
    else this.place.removeAttribute("aria-activedescendant");
  }

  item(row, place) {
    const { step, reward, length, failure } = this.trajectories.columns;
    const finish = this.trajectories.name("finish", row);
    const item = make(
      "div",
      {
        class: "item", role: "option", id: `row-${row}`, "data-row": row, "aria-selected": row === this.selected,
        "aria-setsize": this.rows.length, "aria-posinset": place + 1,
      },
      make("span", { class: `score ${this.trajectories.kind(row)}` }, number(reward[row])),
      make("span", { class: "what" }, make("span", {}, this.trajectories.asked(row)), make("span", {}, ` → ${this.trajectories.responses[row] || "∅"}`)),
      make("span", { class: "muted" },
        `step ${step[row]} · ${this.trajectories.name("source", row)} · ${plural(length[row], "token")}` +
          (finish === "stop" ? "" : ` · ${finish}`) + (failure[row] ? " · failed" : "")),
    );
    item.setAttribute("aria-selected", String(row === this.selected));
    item.style.top = `${place * ROW_HEIGHT}px`;
    return item;
  }
}
