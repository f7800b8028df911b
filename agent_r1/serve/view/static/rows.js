// A list of any length: only the rows in sight exist, and pages of them are fetched when they come into sight.
import { h, replace } from "./dom.js";

const PAGE = 100;
const EXTRA = 8; // rows kept above and below the visible ones

export class RowList {
  /** `fetchPage(offset, limit)` returns {matches, rows}; `render(row, index)` an element; `open(row, index)` follows it. */
  constructor({ fetchPage, render, open, label }) {
    Object.assign(this, { fetchPage, render, open, pages: new Map(), count: 0, active: -1, version: 0 });
    this.inner = h("div.inner", { role: "presentation" });
    this.element = h("div.rows", { tabindex: "0", role: "group", "aria-label": label }, this.inner);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  get rowHeight() {
    return Number.parseFloat(getComputedStyle(this.element).getPropertyValue("--row-height")) || 44;
  }

  /** Starts over with other rows. */
  async reset() {
    this.pages.clear();
    this.active = -1;
    this.version += 1;
    await this.load(0);
    this.element.scrollTop = 0;
    this.draw();
  }

  /** Asks again for what is in sight, for example because a run goes on. */
  async refresh() {
    const first = this.firstVisible();
    const page = Math.floor(first / PAGE);
    for (const known of [...this.pages.keys()]) if (Math.abs(known - page) > 1) this.pages.delete(known);
    await Promise.all([...new Set([page, Math.floor((first + 30) / PAGE)])].map((one) => this.load(one)));
    this.draw();
  }

  async load(page) {
    const { version } = this;
    this.pages.set(page, this.pages.get(page) ?? null); // being fetched
    const answer = await this.fetchPage(page * PAGE, PAGE);
    if (version !== this.version || !answer) return;
    this.pages.set(page, answer.rows);
    this.count = answer.matches;
  }

  firstVisible() {
    return Math.floor(this.element.scrollTop / this.rowHeight);
  }

  rowAt(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  draw() {
    const height = this.rowHeight;
    this.inner.style.height = `${this.count * height}px`;
    const first = Math.max(0, this.firstVisible() - EXTRA);
    const last = Math.min(this.count, this.firstVisible() + Math.ceil(this.element.clientHeight / height) + EXTRA);
    const shown = [];
    for (let index = first; index < last; index += 1) {
      const page = Math.floor(index / PAGE);
      if (!this.pages.has(page)) this.load(page).then(() => this.draw());
      const row = this.rowAt(index);
      const element = row ? this.render(row, index) : h("div.row.pending", {}, "…");
      element.style.top = `${index * height}px`;
      if (index === this.active) element.classList.add("active");
      shown.push(element);
    }
    replace(this.inner, shown);
  }

  move(to) {
    this.active = Math.max(0, Math.min(this.count - 1, to));
    const [top, height] = [this.active * this.rowHeight, this.rowHeight];
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (top + height > this.element.scrollTop + this.element.clientHeight) this.element.scrollTop = top + height - this.element.clientHeight;
    this.draw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves && !event.ctrlKey && !event.metaKey) {
      this.move(Number.isFinite(moves[event.key]) ? this.active + moves[event.key] : event.key === "Home" ? 0 : this.count - 1);
      event.preventDefault();
      event.stopPropagation();
    } else if (event.key === "Enter" && this.rowAt(this.active)) this.open(this.rowAt(this.active), this.active);
  }
}
