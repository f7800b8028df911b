// The head of the pages of one run.
import { h } from "./dom.js";
import { hrefTo } from "./router.js";
import { statusChip } from "./runs.js";
import { runsState } from "./store.js";

export function runTabs(run, active) {
  const known = runsState.runs.find((one) => one.id === run);
  const tab = (name, label, href) => h("a", { href, "aria-current": name === active ? "page" : null }, label);
  const title = h("h1", {}, run, known && statusChip(known));
  // The list of runs may arrive after the page.
  if (!known) document.addEventListener("runs", () => title.isConnected && title.append(...runsState.runs.filter((one) => one.id === run).map(statusChip)), { once: true });
  return h(
    "div.tabs",
    {},
    title,
    h("nav", { "aria-label": `Pages of ${run}` }, tab("curves", "Curves", hrefTo([], { runs: run })), tab("episodes", "Episodes", hrefTo(["run", run, "episodes"])), tab("batch", "Time line", hrefTo(["run", run, "batch"])), tab("settings", "Settings", hrefTo(["settings"], { runs: run })), tab("evaluations", "Evaluations", hrefTo(["run", run, "evaluations"]))),
  );
}
