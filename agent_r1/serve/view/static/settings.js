// Settings: those of one run, or where several runs differ.
import { empty, h, replace } from "./dom.js";
import { currentRoute, go, setParams } from "./router.js";
import { ask } from "./source.js";
import { chosenRuns } from "./runs.js";
import { runsLoaded, runsState } from "./store.js";

const spelled = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export async function settingsPage(root, signal) {
  replace(root, h("p.loading", {}, "Reading settings…"));
  document.addEventListener("shortcut", ({ detail }) => detail === "Escape" && go([], { runs: currentRoute().params.runs }), { signal });
  await runsLoaded(signal);
  const chosen = chosenRuns(currentRoute().params);
  if (!chosen.length) {
    replace(root, empty("No run is chosen", "Choose runs on the first page, then press Compare settings."));
    return;
  }
  const answers = await Promise.all(chosen.map((run) => ask("config", { run }, signal)));
  const columns = answers.map((answer) => answer.settings);
  const names = [...new Set(columns.flatMap((settings) => Object.keys(settings)))];
  const differing = names.filter((name) => new Set(columns.map((settings) => spelled(settings[name]))).size > 1);

  const body = h("tbody");
  const search = h("input", { type: "search", id: "search", placeholder: "Filter settings", "aria-label": "Filter settings", value: currentRoute().params.text ?? "" });
  const all = h("input", { type: "checkbox", id: "all", checked: chosen.length === 1 || currentRoute().params.all === "1", disabled: chosen.length === 1 });
  const draw = () => {
    const text = search.value.toLowerCase();
    const shown = (all.checked ? names : differing).filter((name) => name.toLowerCase().includes(text) || columns.some((settings) => spelled(settings[name]).toLowerCase().includes(text)));
    replace(
      body,
      shown.map((name) => h(`tr${differing.includes(name) ? ".differs" : ""}`, {}, h("th", { scope: "row" }, name), columns.map((settings) => h("td", {}, spelled(settings[name]))))),
      shown.length === 0 && h("tr", {}, h("td", { colspan: String(chosen.length + 1) }, differing.length || all.checked ? "No setting matches." : "These runs have the same settings.")),
    );
  };
  search.addEventListener("input", () => {
    setParams({ text: search.value });
    draw();
  });
  all.addEventListener("change", () => {
    setParams({ all: all.checked ? "1" : null });
    draw();
  });
  draw();
  replace(
    root,
    h("h1", {}, chosen.length === 1 ? `Settings of ${chosen[0]}` : "Where the settings differ"),
    h("div.bar", {}, search, h("label", { for: "all" }, all, "Show all settings")),
    h("div.wide", { tabindex: "0" }, h("table.settings", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), chosen.map((run) => h("th", { scope: "col" }, run)))), body)),
  );
}
