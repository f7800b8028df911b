// One episode.
import { conversation, longText, showStep, timeline } from "./conversation.js";
import { empty, h, number, plural, replace, rewardMark, seconds, stopChip } from "./dom.js";
import { filtersOf, neighbour, openNeighbour } from "./episodes.js";
import { currentRoute, hrefTo, setParams } from "./router.js";
import { ask } from "./source.js";
import { colourings, labelOf, legendOf, scaleOf, tokenTips } from "./tokens.js";

export async function episodePage(root, [run, file, n], signal) {
  replace(root, h("p.loading", {}, "Reading the episode…"));
  let page = { file, n: Number(n), count: Infinity }; // until it is read
  let choose = () => {};
  document.addEventListener("shortcut", ({ detail }) => {
    if (detail === "t") choose((currentRoute().params.view ?? "text") === "text" ? "tokens" : "text");
    if (detail === "j") openNeighbour(run, page, currentRoute().params, 1);
    if (detail === "k") openNeighbour(run, page, currentRoute().params, -1);
    if (detail === "g" && page.row) location.hash = hrefTo(["run", run, "group", page.file, page.row]);
    if (detail === "Escape") location.hash = hrefTo(["run", run, "episodes"], filtersOf(currentRoute().params));
  }, { signal });
  try {
    page = await ask("episode", { run, file, n }, signal);
  } catch (error) {
    if (error.name !== "AbortError") replace(root, empty("This episode cannot be shown", error.message, h("a.button", { href: hrefTo(["run", run, "episodes"]) }, "All episodes of this run")));
    return;
  }
  const offered = colourings(page.steps);
  const body = h("div");
  const legend = h("span");
  const draw = () => {
    const { view = "text", color } = currentRoute().params;
    const colouring = offered.includes(color) ? color : offered[0];
    const mode = { view, colouring, scale: scaleOf(colouring, page.steps) };
    replace(body, conversation(page, run, mode));
    replace(legend, view === "tokens" && legendOf(colouring, mode.scale));
    picker.hidden = view !== "tokens";
    for (const button of tabs.children) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  };
  choose = (view) => {
    setParams({ view: view === "text" ? null : view });
    draw();
  };
  const tabs = h("span.segments", { role: "group", "aria-label": "Show as" }, ["text", "tokens"].map((view) => h("button", { "data-view": view, onclick: () => choose(view), title: "Press t" }, view)));
  const select = h("select", { "aria-label": "Colour tokens by" }, offered.map((name) => h("option", { value: name, selected: name === currentRoute().params.color }, labelOf(name))));
  select.addEventListener("change", () => {
    setParams({ color: select.value });
    draw();
  });
  const picker = h("label", {}, "Colour by", select);
  replace(root, await header(page, run), timeline(page), h("div.bar.sticky", {}, tabs, picker, legend), body);
  draw();
  tokenTips(body, signal);
  if (currentRoute().params.s) showStep(currentRoute().params.s);
  root.dataset.state = "ready";
}

async function header(page, run) {
  const { params } = currentRoute();
  const [before, after] = await Promise.all([-1, 1].map((by) => neighbour(run, page, params, by).catch(() => null)));
  const arrow = (found, sign, label) => (found ? h("a.button", { href: hrefTo(found.parts, found.params), title: label }, sign) : h("span.button.off", { "aria-hidden": "true" }, sign));
  const tokens = page.steps.reduce((sum, step) => sum + step.sampled_tokens, 0);
  const parts = Object.entries(page.components).filter(([name]) => name !== "reward");
  return h(
    "header.episode",
    {},
    h("nav.crumbs", { "aria-label": "Breadcrumb" }, h("a", { href: hrefTo([], { runs: run }) }, run), " / ", h("a", { href: hrefTo(["run", run, "episodes"], filtersOf(params)) }, "episodes"), " / ", h("a", { href: hrefTo(["run", run, "episodes"], { kind: page.kind, step: page.step }) }, `${page.kind} step ${page.step}`)),
    h("div.title", {}, h("h1", {}, page.row), h("span.arrows", {}, arrow(before, "‹", "Previous episode (k)"), arrow(after, "›", "Next episode (j)"))),
    h(
      "div.facts",
      {},
      rewardMark(page.reward, page.outcome, page.success_reward, page.stop),
      page.reward !== page.outcome && h("span", {}, `outcome ${number(page.outcome)}`),
      parts.map(([name, value]) => h("span", {}, `${name} ${number(value)}`)),
      stopChip(page.stop),
      h("span", {}, plural(page.steps.length, "step")),
      h("span", {}, plural(tokens, "token")),
      h("span", {}, seconds(page.seconds)),
      h("a", { href: hrefTo(["run", run, "group", page.file, page.row]) }, "All attempts at this row"),
      h("a", { href: hrefTo(["run", run, "row", page.row]) }, "This row at other steps"),
      h("a", { href: hrefTo(["run", run, "batch", page.file]) }, "Time line of its batch"),
    ),
    page.ground_truth.length > 0 && h("div.truth", {}, h("b", {}, "Expected "), longText(page.ground_truth, { run, file: page.file, n: page.n }, "span.text")),
  );
}
