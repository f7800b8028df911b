// The first page: the list of runs, and the curves of the chosen ones.
import { Chart } from "./chart.js";
import { CURVES, otherCurves, seriesOf, timeCurve, timeSplit } from "./curves.js";
import { ago, command, empty, h, number, percent, replace, svg } from "./dom.js";
import { currentRoute, go, hrefTo, setParams } from "./router.js";
import { colourOf, poll, refreshCurves, runsState } from "./store.js";

const FIRST_CHOSEN = 5;
const MAX_TIME_CHARTS = 4;

export function sparkline(points, label) {
  const [width, height] = [96, 26];
  if (points.length < 2) return h("span.spark");
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const scale = (value, low, high, size) => 2 + ((value - low) / (high - low || 1)) * (size - 4);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const line = points.map(([x, y]) => `${scale(x, x0, x1, width).toFixed(1)},${(height - scale(y, y0, y1, height)).toFixed(1)}`).join(" ");
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, svg("polyline", { points: line }));
}

/** The chosen runs, as the address names them; by default the newest. */
export function chosenRuns(params) {
  const known = new Set(runsState.runs.map((run) => run.id));
  if (params.runs !== undefined) return params.runs.split(",").filter((run) => known.has(run));
  return runsState.runs.slice(0, FIRST_CHOSEN).map((run) => run.id);
}

export function statusChip(run) {
  const text = { running: "running", finished: "finished", stopped: "no news" }[run.status];
  return h(`span.chip.status.${run.status}`, { title: `last change ${ago(run.updated)}` }, text);
}

function runItem(run, isChosen) {
  const id = `choose-${run.id}`;
  const value = run.value === null ? "" : run.measure === "success" ? percent(run.value) : number(run.value);
  const what = `${run.measure} (${run.spark_kind === "eval" ? "held-out rows" : run.spark_kind})`;
  const box = h("input", { type: "checkbox", id, checked: isChosen, "data-run": run.id, style: { "accent-color": `var(${colourOf(run.id)})` } });
  return h(
    "li.run",
    { "data-run": run.id },
    box,
    h(
      "label",
      { for: id, title: run.path },
      h("b", {}, run.id),
      h("small", {}, [run.recipe, run.algorithm, run.seed !== undefined && run.seed !== null && `seed ${run.seed}`].filter(Boolean).join(" · ")),
      h("small", {}, statusChip(run), ` ${run.kind === "sft" ? "update" : run.kind === "collect" ? "file" : "step"} ${number(run.steps)}${run.total ? ` of ${number(run.total)}` : ""}`),
    ),
    h("a.side", { href: hrefTo(["run", run.id, "episodes"]), title: `Episodes of ${run.id}` }, sparkline(run.spark, what), h("small", {}, value || "episodes")),
  );
}

/** What all charts of the page share. */
function sharedState(charts, axis) {
  const shared = { cursor: null, zoom: null, xName: () => (axis() === "minutes" ? "minute" : "step") };
  shared.onCursor = (at) => {
    if (shared.cursor === at) return;
    shared.cursor = at;
    requestAnimationFrame(() => charts.forEach((chart) => chart.draw()));
  };
  shared.onZoom = (zoom) => {
    shared.zoom = zoom;
    setParams({ zoom: zoom && zoom.map((edge) => Number(edge.toPrecision(6))).join(",") });
    charts.forEach((chart) => chart.draw());
  };
  return shared;
}

export function runsPage(root, signal) {
  const charts = new Map(); // title -> Chart
  const axis = () => currentRoute().params.x ?? "step";
  const shared = sharedState(charts, axis);
  const zoom = currentRoute().params.zoom?.split(",").map(Number);
  if (zoom?.length === 2 && zoom.every(Number.isFinite)) shared.zoom = zoom;
  const list = h("ul.runs", { "aria-label": "Runs" });
  const grid = h("div.grid");
  const more = h("div.grid");
  const others = h("details.more", {}, h("summary", {}, "All other metrics"), more);
  const bar = h("div.bar");
  const body = h("div.split", {}, h("aside", {}, h("h1", {}, "Runs"), list), h("section", { "aria-label": "Curves" }, bar, grid, others));
  replace(root, body);

  const open = (series, x) => {
    const point = series.points.find((one) => one.x === x);
    go(["run", series.run, "episodes"], { kind: series.kind === "sft" ? "" : series.kind, step: point.step });
  };
  const showChart = (place, curve, series, stacked = false) => {
    let chart = charts.get(curve.title);
    if (!chart) {
      chart = new Chart({ ...curve, stacked, shared, onOpen: open });
      charts.set(curve.title, chart);
    }
    const isSmooth = !stacked && curve.kind !== "eval"; // evaluations are few, and have their own error
    chart.setData(series, isSmooth ? Number(currentRoute().params.smooth ?? 0) : 0);
    if (chart.element.parentNode !== place) place.append(chart.element);
    chart.element.hidden = chart.series.length === 0;
  };
  const drawCurves = () => {
    const chosen = chosenRuns(currentRoute().params);
    for (const curve of CURVES) showChart(grid, curve, chosen.map((run) => seriesOf(curve, run, axis())));
    charts.forEach((chart) => {
      if (chart.stacked) chart.element.hidden = true;
    });
    for (const run of chosen.slice(0, MAX_TIME_CHARTS)) showChart(grid, { ...timeCurve, title: `${timeCurve.title}: ${run}` }, timeSplit(run, axis()).reverse(), true);
    const rest = otherCurves(chosen);
    others.hidden = rest.length === 0;
    if (others.open) for (const curve of rest) showChart(more, curve, chosen.map((run) => seriesOf(curve, run, axis())));
    grid.dataset.state = "ready";
    const isEmpty = [...charts.values()].every((chart) => chart.element.hidden);
    bar.querySelector(".waiting").textContent = !chosen.length ? "Choose a run on the left." : isEmpty ? "These runs have no metrics yet. Curves appear with the first step." : "";
  };
  others.addEventListener("toggle", drawCurves);
  drawBar(bar, shared, drawCurves);
  list.addEventListener("change", () => {
    const chosen = [...list.querySelectorAll("input:checked")].map((box) => box.dataset.run);
    setParams({ runs: chosen.length ? chosen.join(",") : "-" });
    load();
  });

  const showList = () => {
    if (runsState.loaded && runsState.runs.length === 0) {
      replace(root, noRuns());
      return;
    }
    if (!body.isConnected && runsState.runs.length) replace(root, body);
    const focused = document.activeElement?.id;
    const chosen = new Set(chosenRuns(currentRoute().params));
    replace(list, runsState.runs.map((run) => runItem(run, chosen.has(run.id))));
    if (focused?.startsWith("choose-")) document.getElementById(focused)?.focus();
  };
  const load = async () => {
    const chosen = chosenRuns(currentRoute().params);
    const changed = await Promise.all(chosen.map((run) => refreshCurves(run).catch(() => false)));
    if (!signal.aborted && (changed.some(Boolean) || grid.dataset.chosen !== chosen.join())) {
      grid.dataset.chosen = chosen.join();
      drawCurves();
    }
  };
  document.addEventListener("runs", showList, { signal });
  document.addEventListener("shortcut", ({ detail }) => detail === "Escape" && shared.onZoom(null), { signal });
  document.addEventListener("theme", () => charts.forEach((chart) => chart.draw()), { signal });
  if (runsState.loaded) showList();
  poll(async () => runsState.loaded && (await load()), signal);
  document.addEventListener("runs", load, { signal, once: true });
}

function drawBar(bar, shared, redraw) {
  const { params } = currentRoute();
  const slider = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", id: "smooth", value: params.smooth ?? "0" });
  slider.addEventListener("input", () => {
    setParams({ smooth: slider.value === "0" ? null : slider.value });
    redraw();
  });
  const axes = h("select", { id: "axis" }, ["step", "minutes"].map((name) => h("option", { value: name, selected: (params.x ?? "step") === name }, name)));
  axes.addEventListener("change", () => {
    shared.onZoom(null);
    setParams({ x: axes.value === "step" ? null : axes.value });
    redraw();
  });
  const settings = h("button", { onclick: () => go(["settings"], { runs: chosenRuns(currentRoute().params).join(",") }) }, "Compare settings");
  replace(
    bar,
    h("label", { for: "smooth" }, "Smoothing", slider),
    h("label", { for: "axis" }, "Over", axes),
    h("button", { onclick: () => shared.onZoom(null), title: "Or double-click a chart" }, "Reset zoom"),
    settings,
    h("span.hint", {}, "Drag to zoom, also with a finger. Click a point to see its episodes."),
    h("p.waiting", { role: "status" }),
  );
}

function noRuns() {
  return empty(
    "No runs yet",
    "Train a small agent on this machine. It takes about two minutes, and its run appears here at once:",
    command("agent-r1 train quickstart"),
    runsState.places.length ? `Looked in: ${runsState.places.join(", ")}. To look elsewhere: agent-r1 view FOLDER` : "",
  );
}
