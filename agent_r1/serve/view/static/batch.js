// The time line of a batch: a row per episode, on one clock. Rows in sight are drawn on canvases, so any number is quick.
import { empty, h, number, plural, replace, resolved, rewardMark, seconds } from "./dom.js";
import { currentRoute, go, hrefTo, setParams } from "./router.js";
import { RowList } from "./rows.js";
import { ask } from "./source.js";
import { runsState } from "./store.js";
import { runTabs } from "./tabs.js";

const SORTS = {
  played: ["as played", (a, b) => a.n - b.n],
  slowest: ["slowest first", (a, b) => b.seconds - a.seconds],
  end: ["last to end first", (a, b) => endOf(b) - endOf(a)],
};
const OTHER = "\u0000other";
const ENDED = "\u0000ended";
const TICKS = 4; // at most, besides 0

const endOf = (episode) => episode.start + episode.seconds;

export async function batchPage(root, [run, file], signal) {
  replace(root, h("p.loading", {}, "Reading the batch…"));
  let page;
  try {
    page = await ask("batch", { run, file }, signal);
  } catch (error) {
    if (error.name !== "AbortError") replace(root, runTabs(run, "batch"), empty("There is no time line", error.message, h("a.button", { href: hrefTo(["run", run, "episodes"]) }, "All episodes of this run")));
    return;
  }
  const order = () => [...page.episodes].sort((SORTS[currentRoute().params.sort] ?? SORTS.played)[1]);
  let rows = order();
  const status = h("p.count", { role: "status" });
  const list = new RowList({
    label: "Episodes of the batch",
    fetchPage: (offset, limit) => Promise.resolve({ matches: rows.length, rows: rows.slice(offset, offset + limit) }),
    render: (episode, index) => batchRow(page, episode, run, index === list.active && status),
    open: (episode) => go(["run", run, "episode", page.file, String(episode.n)]),
  });
  list.element.classList.add("batch");
  list.element.prepend(axis(page.seconds));
  list.element.setAttribute("aria-describedby", "batch-status");
  status.id = "batch-status";
  const sort = h("select", { "aria-label": "Sort" }, Object.entries(SORTS).map(([key, [label]]) => h("option", { value: key, selected: key === currentRoute().params.sort }, label)));
  sort.addEventListener("change", () => {
    setParams({ sort: sort.value === "played" ? null : sort.value });
    rows = order();
    list.reset();
  });
  const next = h("span");
  const arrow = (to, sign, label) => (to ? h("a.button", { href: hrefTo(["run", run, "batch", ...(to === true ? [] : [to])]), title: label, "aria-label": label }, sign) : h("span.button.off", { "aria-hidden": "true" }, sign));
  const drawNext = () => {
    const isOld = page.kind === "train" && (runsState.runs.find((one) => one.id === run)?.steps ?? 0) > page.step;
    replace(next, arrow(page.after ?? isOld, "›", "Next batch (l)"));
  };
  drawNext();
  replace(
    root,
    runTabs(run, "batch"),
    h("div.title", {}, h("h2", {}, `${page.kind} step ${page.step}`), h("span.arrows", {}, arrow(page.before, "‹", "Batch before (h)"), next)),
    summary(page, run),
    h("div.bar", {}, legend(), sort),
    !page.recorded && page.episodes.length > 0 && h("p.hint", {}, "This run did not record when episodes and steps began: episodes are drawn from the left, and their steps one after the other."),
    status,
    list.element,
  );
  root.classList.add("fill");
  signal.addEventListener("abort", () => root.classList.remove("fill"));
  tips(list.element, page, signal);
  document.addEventListener("runs", drawNext, { signal });
  document.addEventListener("theme", () => list.draw(), { signal });
  document.addEventListener("shortcut", ({ detail }) => {
    if (detail === "h" && page.before) go(["run", run, "batch", page.before]);
    if (detail === "l" && page.after) go(["run", run, "batch", page.after]);
    if (detail === "Escape") go(["run", run, "episodes"], { kind: page.kind, step: page.step });
  }, { signal });
  await list.reset();
  list.element.focus({ preventScroll: true });
  root.dataset.state = "ready";
}

/** Who waited for what: the batch as a whole, its slowest episode, and the sums over all episodes. */
function summary(page, run) {
  const { episodes } = page;
  if (!episodes.length) return h("p.hint", {}, "No episodes yet.");
  const last = episodes.reduce((latest, one) => (endOf(one) > endOf(latest) ? one : latest));
  const most = longest(page, last);
  const ends = episodes.map(endOf).sort((a, b) => a - b);
  const early = ends[Math.ceil(0.9 * ends.length) - 1];
  const link = h("a", { href: hrefTo(["run", run, "episode", page.file, String(last.n)], { s: most?.step }) }, `${last.row} (episode ${last.n})`);
  const total = Object.values(page.spent).reduce((sum, one) => sum + one, 0) || 1;
  const spent = Object.entries(page.spent).filter(([, time]) => time > 0.005 * total).sort((a, b) => b[1] - a[1]);
  return h(
    "div.batch-summary",
    {},
    h("p", {}, `${plural(episodes.length, "episode")} in ${seconds(page.seconds)}; nine of ten had ended after ${seconds(early)}. `, page.recorded ? "The last to end was " : "The longest was ", link, most && `, which spent ${seconds(most.time)} on ${most.what} in step ${most.step + 1}`, "."),
    h("ul.spent", { "aria-label": "Time of all episodes together" }, spent.slice(0, 8).map(([what, time]) => h("li", {}, h(`i.${kindOf(what)}`), h("span", {}, nameOf(what)), h("b", {}, `${Math.round((100 * time) / total)} %`), h("small", {}, seconds(time))))),
  );
}

const kindOf = (what) => (what === "sampling" ? "sampling" : what === OTHER ? "rest" : what === ENDED ? "ended" : "tools");
const nameOf = (what) => ({ sampling: "sampling", [OTHER]: "other", [ENDED]: "ended, waiting for the batch" })[what] ?? `waiting for ${what}`;

/** The longest wait of an episode: sampling or a tool. */
function longest(page, episode) {
  const found = episode.steps.flatMap(([, sampling, waiting, what], step) => [{ step, time: sampling, what: "sampling" }, { step, time: waiting, what: page.names[what] }]);
  return found.length ? found.reduce((most, one) => (one.time > most.time ? one : most)) : null;
}

const legend = () => h("div.legend", {}, [["sampling", "sampling"], ["tools", "tools and environment"], ["rest", "other (waiting for a place, set-up, scoring)"]].map(([kind, label]) => h("span", {}, h(`i.${kind}`), label)));

function axis(total) {
  const rough = total / TICKS || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const gap = size * [1, 2, 5, 10].find((factor) => factor * size >= rough);
  const marks = Array.from({ length: Math.floor(total / gap) + 1 }, (_, index) => h("span", { style: { left: `${(100 * index * gap) / (total || 1)}%` } }, index ? seconds(index * gap) : "0"));
  return h("div.row.head", { "aria-hidden": "true" }, h("span", {}, "episode"), h("span.ticks", {}, marks), h("span", {}, "time"));
}

function batchRow(page, episode, run, status) {
  const label = `${episode.row} (episode ${episode.n})`;
  const canvas = h("canvas", { role: "img", "aria-label": "time line" });
  const row = h("a.row", { href: hrefTo(["run", run, "episode", page.file, String(episode.n)]), "aria-label": `${label}: ${seconds(episode.seconds)}` }, h("span.who", {}, rewardMark("", episode.outcome, page.success_reward, episode.stop), h("span", {}, episode.row)), canvas, h("span.num", {}, seconds(episode.seconds)));
  row.dataset.n = episode.n;
  if (status) {
    const most = longest(page, episode);
    status.textContent = `${label}: ${seconds(episode.seconds)}, reward ${number(episode.reward)}, ${episode.stop.replaceAll("_", " ")}${most ? `; longest: ${most.what}, ${seconds(most.time)} in step ${most.step + 1}` : ""}`;
  }
  requestAnimationFrame(() => paint(canvas, page, episode));
  return row;
}

function paint(canvas, page, episode) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return; // scrolled out of sight meanwhile
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const scale = width / (page.seconds || 1);
  const bar = (start, time, colour) => {
    context.fillStyle = resolved(colour);
    context.fillRect((episode.start + start) * scale, 0, Math.max(time * scale, 0.75), height);
  };
  bar(0, episode.seconds, "--line");
  for (const [start, sampling, waiting] of episode.steps) {
    if (sampling > 0) bar(start, sampling, "--part-sampling");
    if (waiting > 0) bar(start + sampling, waiting, "--part-tools");
  }
}

/** What happened under the pointer. */
function tips(element, page, signal) {
  const tip = h("div.tip.batch-tip", { hidden: true, role: "tooltip" });
  document.body.append(tip);
  signal.addEventListener("abort", () => tip.remove());
  const byNumber = new Map(page.episodes.map((episode) => [String(episode.n), episode]));
  element.addEventListener("pointermove", (event) => {
    const canvas = event.target.closest("canvas");
    const episode = canvas && byNumber.get(canvas.closest(".row").dataset.n);
    tip.hidden = !episode;
    if (!episode) return;
    const box = canvas.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * page.seconds;
    replace(tip, h("div.at", {}, `${episode.row} (episode ${episode.n}), at ${seconds(at)}`), h("div", {}, happening(page, episode, at - episode.start)));
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    Object.assign(tip.style, { left: `${Math.max(8, left)}px`, top: `${box.bottom + 4}px` });
  }, { signal });
  element.addEventListener("pointerleave", () => (tip.hidden = true), { signal });
}

function happening(page, episode, at) {
  if (at < 0) return "not yet begun";
  if (at > episode.seconds) return "ended; the batch waits for others";
  const step = episode.steps.findLastIndex(([start]) => start <= at);
  if (step < 0) return "before its first step";
  const [start, sampling, waiting, what, role] = episode.steps[step];
  const name = `step ${step + 1}${role ? ` (${page.names[role]})` : ""}`;
  if (at <= start + sampling) return `${name}: sampling, ${seconds(sampling)}`;
  if (at <= start + sampling + waiting) return `${name}: ${page.names[what]}, ${seconds(waiting)}`;
  return `after ${name}`;
}
