// Starts the page: the frame, the keyboard, and which page an address means.
import { batchPage } from "./batch.js";
import { command, empty, forgetColours, h, number, percent, replace } from "./dom.js";
import { episodePage } from "./episode.js";
import { episodesPage } from "./episodes.js";
import { groupPage, rowPage } from "./group.js";
import { currentRoute, go, hrefTo } from "./router.js";
import { runsPage } from "./runs.js";
import { settingsPage } from "./settings.js";
import { ask, exportNote, isExport } from "./source.js";
import { poll, refreshRuns, runsLoaded, runsState } from "./store.js";
import { runTabs } from "./tabs.js";

const KEYS = [
  ["/", "search"],
  ["j  k", "next and previous episode, row, line or attempt"],
  ["Enter", "open the marked episode"],
  ["t", "text or tokens"],
  ["g", "all attempts of this group"],
  ["← →", "move along a focused curve or the tokens; Enter opens the episodes of a point"],
  ["+  -", "zoom into a focused curve, and out"],
  ["a  b", "one row at several steps: j and k move the left or the right attempt"],
  ["h  l", "time line: the batch before and the next one"],
  ["Esc", "back to the list; ends a zoom"],
  ["?", "this help"],
];

async function evaluationsPage(root, run, signal) {
  document.addEventListener("shortcut", ({ detail }) => detail === "Escape" && go([], { runs: run }), { signal });
  const { evaluations } = await ask("evaluations", { run }, signal);
  await runsLoaded(signal);
  const rows = evaluations.map((one) => (one.problem ? h("tr", {}, h("th", { scope: "row" }, one.name), h("td", { colspan: "5" }, one.problem)) : h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, one.model), h("td", {}, one.split), h("td.num", {}, number(one.rows)), h("td.num", {}, `${percent(one.success)} ± ${percent(one.stderr)}`), h("td", {}, one.panel))));
  const table = h("table.settings", {}, h("thead", {}, h("tr", {}, ["name", "model", "split", "rows", "success ± standard error", "panel"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows));
  const none = empty("No evaluations yet", "Evaluations made while training are on the page of curves. To evaluate the newest checkpoint on held-out rows:", command(`agent-r1 eval ${runsState.runs.find((one) => one.id === run)?.path ?? run}`));
  replace(root, runTabs(run, "evaluations"), rows.length ? h("div.wide", { tabindex: "0" }, table) : none);
}

function choosePage(root, { parts }, signal) {
  const [place, run, page, ...rest] = parts;
  if (place === undefined) return runsPage(root, signal);
  if (place === "settings") return settingsPage(root, signal);
  if (place === "run" && run) {
    if (page === "episodes") return episodesPage(root, run, signal);
    if (page === "episode" && rest.length === 2) return episodePage(root, [run, ...rest], signal);
    if (page === "batch" && rest.length < 2) return batchPage(root, [run, ...rest], signal);
    if (page === "group" && rest.length === 2) return groupPage(root, [run, ...rest], signal);
    if (page === "row" && rest.length === 1) return rowPage(root, [run, ...rest], signal);
    if (page === "evaluations") return evaluationsPage(root, run, signal);
  }
  replace(root, empty("There is no such page", "The address may be cut off.", h("a.button", { href: hrefTo([]) }, "All runs")));
  return null;
}

function makeHelp() {
  const dialog = h("dialog.help", { "aria-label": "Keyboard" }, h("h2", {}, "Keyboard"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("form", { method: "dialog" }, h("button", { value: "close" }, "Close")));
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
  return dialog;
}

function themeButton() {
  const stored = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // a file may have no storage
    }
  };
  const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const changed = () => {
    forgetColours();
    document.dispatchEvent(new CustomEvent("theme"));
  };
  if (stored()) document.documentElement.dataset.theme = stored();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const toggle = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", document.documentElement.dataset.theme);
    } catch {
      // only for this page, then
    }
    changed();
  };
  return h("button.quiet", { onclick: toggle, "aria-label": "Light or dark" }, "◐");
}

function start() {
  const help = makeHelp();
  let root = h("main", { id: "main" });
  const alarm = h("div.alarm", { role: "alert", hidden: true });
  const top = h("header.top", {}, h("a.skip", { href: "#main", onclick: (event) => (event.preventDefault(), root.querySelector("a, button, input, [tabindex]")?.focus()) }, "Skip to content"), h("a.brand", { href: hrefTo([]) }, "agent-r1"), h("span.note", {}, isExport ? exportNote : ""), h("span.space"), h("button.quiet", { onclick: () => help.showModal(), "aria-label": "Keyboard help" }, "?"), themeButton());
  document.body.append(top, alarm, root, help);

  let controller = new AbortController();
  let shown = "";
  const show = () => {
    const route = currentRoute();
    controller.abort();
    controller = new AbortController();
    const { signal } = controller;
    const fresh = h("main", { id: "main" }); // what the last page still writes goes nowhere
    root.replaceWith(fresh);
    root = fresh;
    if (shown !== route.parts.join("/")) scrollTo(0, 0);
    shown = route.parts.join("/");
    document.title = [...route.parts.slice(1), "agent-r1"].join(" · ");
    Promise.resolve(choosePage(root, route, signal)).catch((error) => {
      if (error.name !== "AbortError" && !signal.aborted) replace(root, empty("This page cannot be shown", error.message, h("a.button", { href: hrefTo([]) }, "All runs")));
    });
  };
  addEventListener("hashchange", show);
  if (isExport) document.addEventListener("click", followInside);
  document.addEventListener("runs", () => {
    alarm.hidden = !runsState.error;
    alarm.textContent = runsState.error ?? "";
  });
  document.addEventListener("keydown", (event) => pressed(event, help));
  show();
  poll(refreshRuns, new AbortController().signal);
}

/** A page inside a frame without an address of its own would resolve "#/" against the address of the page around it. */
function followInside(event) {
  const href = event.target.closest?.("a[href^='#/']")?.getAttribute("href");
  if (!href || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  location.hash = href;
}

function pressed(event, help) {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "?") help.showModal();
  else if (event.key === "/") {
    const search = document.getElementById("search");
    if (search) {
      search.focus();
      event.preventDefault();
    }
  } else document.dispatchEvent(new CustomEvent("shortcut", { detail: event.key }));
}

start();
