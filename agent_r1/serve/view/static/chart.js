// A line chart on a canvas: bands, smoothing, a shared cursor and zoom, a click that leads to episodes, PNG and CSV.
import { download, h, number, replace, resolved, wholePercent } from "./dom.js";

const HEIGHT = 190;
const EDGE = { left: 50, right: 12, top: 10, bottom: 24 };
const FONT = "11px system-ui, sans-serif";

/** Exponential moving average that is not biased towards its start. */
export function smooth(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** About `count` round numbers that cover the range. */
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= 0.95 * raw) ?? raw; // 0 to 1.02 is 0 to 1
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

export class Chart {
  /** `shared`: {cursor, zoom, onCursor, onZoom} of all charts of a page. `onOpen(series, x)`: a click. */
  constructor({ title, note, format = number, tick = format, stacked = false, shared, onOpen }) {
    Object.assign(this, { title, note, format, tick, stacked, shared, onOpen, series: [], weight: 0, drag: null });
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.tip = h("div.tip", { hidden: true });
    this.legend = h("div.legend");
    const menu = h("span.menu", {}, this.button("PNG", "Save as a picture", () => this.savePng()), this.button("CSV", "Save the numbers", () => this.saveCsv()));
    this.element = h("figure.chart", {}, h("figcaption", { title: note }, h("h2", {}, title), menu, note && h("p", {}, note)), h("div.plot", {}, this.canvas, this.tip), stacked && this.legend);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  button(label, title, act) {
    return h("button.quiet", { title: `${title}: ${this.title}`, onclick: act }, label);
  }

  setData(series, weight) {
    this.series = series.filter((one) => one.points.length > 0);
    this.weight = weight;
    for (const one of this.series) one.smoothed = smooth(one.points.map((point) => point.y), this.stacked ? 0 : weight);
    const last = this.series.map((one) => `${one.name} ${this.format(one.points.at(-1).y)}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title}. Last values: ${last || "none"}`);
    replace(this.legend, this.series.map((one) => h("span", {}, h("i", { style: { background: `var(${one.colour})` } }), one.label ?? one.name)));
    this.draw();
  }

  range() {
    const xs = this.series.flatMap((one) => [one.points[0].x, one.points.at(-1).x]);
    const zoom = this.shared.zoom;
    let [x0, x1] = zoom ?? [Math.min(...xs), Math.max(...xs)];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    let y0 = Infinity;
    let y1 = -Infinity;
    const see = (value) => {
      if (Number.isFinite(value)) {
        y0 = Math.min(y0, value);
        y1 = Math.max(y1, value);
      }
    };
    for (const one of this.series) {
      one.points.forEach((point, index) => {
        if (point.x < x0 || point.x > x1) return;
        see(this.weight > 0 ? one.smoothed[index] : point.y);
        if (point.band) [point.y - point.band, point.y + point.band].forEach(see);
        else see(point.y);
      });
    }
    if (this.stacked) y0 = 0;
    if (!Number.isFinite(y0)) [y0, y1] = [0, 1];
    if (y0 === y1) [y0, y1] = [y0 - Math.abs(y0 || 1) * 0.1, y1 + Math.abs(y1 || 1) * 0.1];
    const room = (y1 - y0) * 0.06;
    const isShare = this.tick === wholePercent; // shares end at 0 % and 100 %
    return { x0, x1, y0: this.stacked || y0 === 0 ? y0 : Math.max(y0 - room, isShare ? 0 : -Infinity), y1: isShare ? Math.max(Math.min(y1 + room, 1.02), y0 + 1e-6) : y1 + room };
  }

  draw(canvas = this.canvas, width = this.canvas.clientWidth, top = 0) {
    if (width === 0) return;
    const ratio = canvas === this.canvas ? window.devicePixelRatio || 1 : 2;
    if (canvas === this.canvas) [canvas.width, canvas.height] = [width * ratio, HEIGHT * ratio];
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, top * ratio);
    pen.font = FONT;
    const range = this.range();
    const x = (value) => EDGE.left + ((value - range.x0) / (range.x1 - range.x0)) * (width - EDGE.left - EDGE.right);
    const y = (value) => HEIGHT - EDGE.bottom - ((value - range.y0) / (range.y1 - range.y0)) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.scale = { ...range, x, y, width };
    this.drawAxes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(EDGE.left, 0, width - EDGE.left - EDGE.right + 4, HEIGHT - EDGE.bottom + 1);
    pen.clip();
    for (const one of this.stacked ? this.series : [...this.series].reverse()) this.drawSeries(pen, one); // the tallest layer first
    pen.restore();
    if (canvas === this.canvas) this.drawCursor(pen);
  }

  drawAxes(pen) {
    const { x, y, x0, x1, y0, y1, width } = this.scale;
    const [grid, text] = [resolved("--line"), resolved("--muted")];
    pen.lineWidth = 1;
    pen.strokeStyle = grid;
    pen.fillStyle = text;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of ticks(y0, y1, 5)) {
      pen.beginPath();
      pen.moveTo(EDGE.left, Math.round(y(tick)) + 0.5);
      pen.lineTo(width - EDGE.right, Math.round(y(tick)) + 0.5);
      pen.stroke();
      pen.fillText(this.tick(tick), EDGE.left - 6, y(tick));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) pen.fillText(number(tick), x(tick), HEIGHT - EDGE.bottom + 7);
  }

  drawSeries(pen, one) {
    const { x, y } = this.scale;
    const colour = resolved(one.colour);
    const path = (value) => {
      pen.beginPath();
      let isDown = false;
      one.points.forEach((point, index) => {
        const at = value(point, index);
        if (!Number.isFinite(at)) isDown = false; // a gap
        else if (isDown) pen.lineTo(x(point.x), y(at));
        else pen.moveTo(x(point.x), y(at));
        isDown = Number.isFinite(at);
      });
    };
    pen.fillStyle = pen.strokeStyle = colour;
    if (this.stacked) {
      path((point) => point.y);
      pen.lineTo(x(one.points.at(-1).x), y(0));
      pen.lineTo(x(one.points[0].x), y(0));
      pen.fill();
      return;
    }
    const banded = one.points.map((point, index) => ({ ...point, mid: this.weight > 0 ? one.smoothed[index] : point.y })).filter((point) => point.band > 0 && Number.isFinite(point.y));
    if (banded.length > 1) {
      pen.globalAlpha = 0.16;
      pen.beginPath();
      banded.forEach((point) => pen.lineTo(x(point.x), y(point.mid + point.band)));
      banded.reverse().forEach((point) => pen.lineTo(x(point.x), y(point.mid - point.band)));
      pen.fill();
    }
    if (this.weight > 0) {
      pen.globalAlpha = 0.28;
      pen.lineWidth = 1;
      path((point) => point.y);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    path((_, index) => one.smoothed[index]);
    pen.stroke();
    if (one.points.length <= 24) {
      for (const [index, point] of one.points.entries()) {
        pen.beginPath();
        pen.arc(x(point.x), y(one.smoothed[index]), 2.6, 0, 7);
        pen.fill();
      }
    }
  }

  drawCursor(pen) {
    const at = this.drag ? null : this.shared.cursor;
    const { x, y, x0, x1 } = this.scale;
    if (this.drag && this.drag.to !== null) {
      pen.globalAlpha = 0.15;
      pen.fillStyle = resolved("--accent");
      pen.fillRect(Math.min(this.drag.from, this.drag.to), EDGE.top, Math.abs(this.drag.to - this.drag.from), HEIGHT - EDGE.top - EDGE.bottom);
      pen.globalAlpha = 1;
    }
    if (at === null || at < x0 || at > x1) return;
    pen.strokeStyle = resolved("--muted");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x(at), EDGE.top);
    pen.lineTo(x(at), HEIGHT - EDGE.bottom);
    pen.stroke();
    for (const one of this.series) {
      const index = nearest(one.points, at);
      if (one.points[index].x !== at || this.stacked) continue;
      pen.fillStyle = resolved(one.colour);
      pen.beginPath();
      pen.arc(x(at), y(one.smoothed[index]), 4, 0, 7);
      pen.fill();
    }
  }

  listen() {
    const place = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      this.drag = { from: place(event), to: null };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.drag && Math.abs(place(event) - this.drag.from) > 5) this.drag.to = place(event);
      this.moveCursor(this.snap(place(event)), place(event));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const { drag } = this;
      this.drag = null;
      if (drag && drag.to !== null) this.shared.onZoom([this.valueAt(Math.min(drag.from, drag.to)), this.valueAt(Math.max(drag.from, drag.to))]);
      else this.open(event);
    });
    for (const end of ["pointerleave", "pointercancel"]) { // cancelled: the finger scrolls the page
      this.canvas.addEventListener(end, () => {
        this.drag = null;
        this.moveCursor(null);
      });
    }
    this.canvas.addEventListener("dblclick", () => this.shared.onZoom(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.moveCursor(null));
  }

  key(event) {
    const xs = [...new Set(this.series.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
    const at = xs.indexOf(this.shared.cursor);
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const next = at < 0 ? xs.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1);
      const x = xs[Math.max(0, Math.min(xs.length - 1, next))];
      const { x0, x1 } = this.scale;
      const beyond = Math.max(0, x - x1) + Math.min(0, x - x0); // the zoom follows the cursor
      if (this.shared.zoom && beyond) this.shared.onZoom([x0 + beyond, x1 + beyond]);
      this.moveCursor(x, this.scale.x(x));
      event.preventDefault();
    } else if (["+", "=", "-"].includes(event.key)) this.zoomBy(event.key === "-" ? 2 : 0.5, xs);
    else if (event.key === "Enter" && at >= 0) this.onOpen?.(this.series[0], xs[at]);
    else if (event.key === "Escape") this.shared.onZoom(null);
  }

  /** Makes the range so many times as wide, around the cursor or the middle. All of it: no zoom. */
  zoomBy(factor, xs) {
    const { x0, x1 } = this.scale;
    const width = (x1 - x0) * factor;
    if (xs.length < 2 || width >= xs.at(-1) - xs[0]) {
      this.shared.onZoom(null);
      return;
    }
    const centre = this.shared.cursor ?? (x0 + x1) / 2;
    const low = Math.max(xs[0], Math.min(xs.at(-1) - width, centre - width / 2));
    this.shared.onZoom([low, low + width]);
  }

  valueAt(pixel) {
    const { x0, x1, width } = this.scale;
    return x0 + ((pixel - EDGE.left) / (width - EDGE.left - EDGE.right)) * (x1 - x0);
  }

  snap(pixel) {
    const at = this.valueAt(pixel);
    const found = this.series.map((one) => one.points[nearest(one.points, at)].x);
    return found.length ? found.reduce((best, x) => (Math.abs(x - at) < Math.abs(best - at) ? x : best)) : null;
  }

  moveCursor(at, pixel) {
    this.shared.onCursor(at);
    const lines = at === null ? [] : this.series.filter((one) => one.points[nearest(one.points, at)].x === at);
    this.tip.hidden = lines.length === 0;
    if (lines.length === 0) return;
    const rows = lines.map((one) => {
      const point = one.points[nearest(one.points, at)];
      const band = point.band > 0 ? ` ± ${this.format(point.band)}` : "";
      return h("div", {}, h("i", { style: { background: `var(${one.colour})` } }), h("b", {}, this.format(point.own ?? point.y), band), h("span", {}, one.label ?? one.name));
    });
    replace(this.tip, h("div.at", {}, `${this.shared.xName()} ${number(at)}`), rows);
    const isLeft = pixel > this.scale.width / 2;
    this.tip.style.left = isLeft ? "" : `${pixel + 14}px`;
    this.tip.style.right = isLeft ? `${this.scale.width - pixel + 14}px` : "";
  }

  open(event) {
    if (!this.onOpen || !this.series.length || this.shared.cursor === null) return;
    const at = this.shared.cursor;
    const height = event.clientY - this.canvas.getBoundingClientRect().top;
    const distance = (one) => Math.abs(this.scale.y(one.smoothed[nearest(one.points, at)]) - height);
    const near = this.series.filter((one) => one.points[nearest(one.points, at)].x === at).sort((a, b) => distance(a) - distance(b));
    if (near.length) this.onOpen(near[0], at);
  }

  savePng() {
    const width = 720;
    const legend = this.series.length * 18;
    const canvas = h("canvas");
    [canvas.width, canvas.height] = [2 * width, 2 * (HEIGHT + 40 + legend)];
    const pen = canvas.getContext("2d");
    pen.fillStyle = resolved("--card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    this.draw(canvas, width, 36);
    pen.setTransform(2, 0, 0, 2, 0, 0);
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    pen.fillStyle = resolved("--text");
    pen.font = "600 14px system-ui, sans-serif";
    pen.fillText(this.title, 14, 24);
    pen.font = "12px system-ui, sans-serif";
    this.series.forEach((one, index) => {
      const at = HEIGHT + 50 + index * 18;
      pen.fillStyle = resolved(one.colour);
      pen.fillRect(EDGE.left, at - 8, 10, 10);
      pen.fillStyle = resolved("--text");
      pen.fillText(one.label ?? one.name, EDGE.left + 16, at);
    });
    canvas.toBlob((blob) => download(`${fileName(this.title)}.png`, blob));
    this.draw();
  }

  saveCsv() {
    const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const lines = [["series", this.shared.xName(), "value", "band"].join(",")];
    for (const one of this.series) for (const point of one.points) lines.push([quote(one.label ?? one.name), point.x, point.own ?? point.y, point.band ?? ""].join(","));
    download(`${fileName(this.title)}.csv`, new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  }
}

const fileName = (title) => title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");

/** The index of the point nearest to x; points are sorted. */
function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? low : high;
}
