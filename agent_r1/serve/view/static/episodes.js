// The table of episodes of a run: filters, search, sorting.
import { command, empty, h, number, plural, replace, rewardMark, seconds, stopChip } from "./dom.js";
import { currentRoute, go, hrefTo, setParams } from "./router.js";
import { RowList } from "./rows.js";
import { runTabs } from "./tabs.js";
import { ask } from "./source.js";
import { poll } from "./store.js";

export const FILTERS = ["kind", "step", "stop", "tool", "role", "row", "text", "reward_min", "reward_max", "step_min", "step_max", "bad_calls_min", "sort"];
const SORTS = [
  ["-step", "newest first"],
  ["step", "oldest first"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-calls", "most tool calls"],
  ["-bad_calls", "most failed calls"],
  ["-steps", "most steps"],
  ["-tokens", "longest responses"],
  ["-seconds", "slowest"],
  ["row", "by row"],
];

export const filtersOf = (params) => Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));

export function episodesPage(root, run, signal) {
  let success = 1;
  const status = h("p.count", { role: "status" });
  const bar = h("div.bar.filters");
  const controls = makeControls(() => {
    setParams({ ...Object.fromEntries(FILTERS.map((name) => [name, null])), ...controls.read() });
    list.reset();
  });
  const fetchPage = async (offset, limit) => {
    try {
      const answer = await ask("episodes", { run, ...filtersOf(currentRoute().params), offset, limit }, signal);
      success = answer.success_reward;
      controls.update(answer);
      describe(status, answer);
      missing.replaceChildren();
      if (answer.matches === 0) replace(missing, nothing(answer, currentRoute().params, run));
      root.dataset.state = answer.read < answer.total ? "reading" : "ready";
      return answer;
    } catch (error) {
      if (error.name === "AbortError") return null;
      replace(missing, empty("The episodes cannot be read", error.message));
      return { matches: 0, rows: [] };
    }
  };
  const linkTo = (row, index) => hrefTo(["run", run, "episode", row.file, String(row.n)], { ...filtersOf(currentRoute().params), at: index });
  const list = new RowList({
    label: "Episodes",
    fetchPage,
    render: (row, index) => episodeRow(row, linkTo(row, index), success),
    open: (row, index) => {
      location.hash = linkTo(row, index);
    },
  });
  const missing = h("div");
  const head = h("div.row.head", { "aria-hidden": "true" }, ["reward", "step", "question and answer", "stop", "steps", "calls", "tokens", "time"].map((name) => h("span", {}, name)));
  replace(bar, controls.element);
  list.element.prepend(head);
  replace(root, runTabs(run, "episodes"), bar, status, list.element, missing);
  root.classList.add("fill");
  signal.addEventListener("abort", () => root.classList.remove("fill"));
  let load = async () => {
    load = () => list.refresh();
    await list.reset();
    list.element.focus({ preventScroll: true });
  };
  poll(() => load(), signal, () => list.count === 0 && root.dataset.state === "reading");
}

function episodeRow(row, href, success) {
  return h(
    "a.row",
    { href },
    rewardMark(row.reward, row.outcome, success, row.stop),
    h("span.when", {}, h("small", {}, row.kind), number(row.step)),
    h("span.texts", {}, h("b", {}, row.question || row.row || "–"), h("small", {}, row.answer)),
    stopChip(row.stop),
    h("span.num", {}, number(row.steps)),
    h(`span.num`, { title: row.tools.join(", ") }, number(row.calls), row.bad_calls > 0 && h("small.bad", { title: plural(row.bad_calls, "call") + " refused or failed" }, ` ${row.bad_calls}!`)),
    h("span.num", {}, number(row.tokens)),
    h("span.num", {}, seconds(row.seconds)),
  );
}

function describe(status, answer) {
  const parts = [`${plural(answer.matches, "episode")}`];
  if (answer.mean_reward !== null) parts.push(`mean reward ${number(answer.mean_reward)}`);
  if (answer.read < answer.total) parts.push(`read ${number(answer.read)} of ${number(answer.total)} so far`);
  replace(status, parts.join(" · "));
}

function nothing(answer, params, run) {
  if (answer.read < answer.total) return empty("Nothing found yet", "Episodes are still being read.");
  if (answer.total === 0) return empty("No episodes were kept", "This run has no trajectories. They are written every trainer.dump_every steps:", command("agent-r1 train RECIPE trainer.dump_every=1"));
  const all = h("a.button", { href: hrefTo(["run", run, "episodes"]) }, "Show all episodes");
  if (params.step) return empty(`No episode of step ${params.step} matches`, "Episodes are kept every trainer.dump_every steps, and those of evaluations always.", all);
  return empty("No episode matches", "Change the filters, or start over.", all);
}

function makeControls(changed) {
  const { params } = currentRoute();
  const field = (name, props) => h("input", { name, value: params[name] ?? "", ...props });
  const inputs = {
    text: field("text", { type: "search", id: "search", placeholder: "Search in messages and tool results", "aria-label": "Search" }),
    kind: choice("kind", "Kind"),
    step: field("step", { type: "number", min: "0", placeholder: "step", "aria-label": "Step" }),
    stop: choice("stop", "Stop reason"),
    tool: choice("tool", "Tool"),
    role: choice("role", "Role"),
    reward_min: field("reward_min", { type: "number", step: "any", placeholder: "from", "aria-label": "Reward at least" }),
    reward_max: field("reward_max", { type: "number", step: "any", placeholder: "to", "aria-label": "Reward at most" }),
    row: field("row", { type: "text", placeholder: "row", "aria-label": "Row", size: "10" }),
    sort: h("select", { "aria-label": "Sort" }, SORTS.map(([value, label]) => h("option", { value, selected: (params.sort ?? "-step") === value }, label))),
  };
  let timer = 0;
  for (const [name, input] of Object.entries(inputs)) {
    input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => {
      clearTimeout(timer);
      timer = setTimeout(changed, name === "text" ? 150 : 0);
    });
  }
  const element = h("form.controls", { role: "search", onsubmit: (event) => event.preventDefault() }, inputs.text, inputs.kind, inputs.step, inputs.stop, inputs.tool, inputs.role, h("span.pair", {}, "reward", inputs.reward_min, inputs.reward_max), inputs.row, inputs.sort);
  return {
    element,
    read: () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value || null]).filter(([name, value]) => !(name === "sort" && value === "-step"))),
    update: (answer) => {
      options(inputs.kind, Object.fromEntries(answer.kinds.map((kind) => [kind, null])), "training and evaluation", params.kind);
      options(inputs.stop, answer.stops, "any stop reason", params.stop);
      options(inputs.tool, answer.tools, "any tool", params.tool);
      options(inputs.role, answer.roles, "any role", params.role);
      inputs.role.hidden = inputs.role.options.length < 2; // most runs have no roles
    },
  };
}

const choice = (name, label) => h("select", { name, "aria-label": label, value: "" });

function options(select, counts, any, first) {
  const value = select.options.length ? select.value : (first ?? "");
  const names = [...new Set([...Object.keys(counts), ...(value ? [value] : [])])];
  const labels = names.map((name) => (counts[name] === null || counts[name] === undefined ? name : `${name.replaceAll("_", " ")} (${number(counts[name])})`));
  if (select.dataset.shown === labels.join("\n") && select.value === value) return;
  select.dataset.shown = labels.join("\n");
  replace(select, h("option", { value: "" }, any), names.map((name, index) => h("option", { value: name }, labels[index])));
  select.value = value;
}

/** The episode after or before one in the list it was opened from, or in its file. */
export async function neighbour(run, page, params, by) {
  if (params.at !== undefined) {
    const at = Number(params.at) + by;
    if (!(at >= 0)) return null;
    const answer = await ask("episodes", { run, ...filtersOf(params), offset: at, limit: 1 });
    return answer.rows.length ? { parts: ["run", run, "episode", answer.rows[0].file, String(answer.rows[0].n)], params: { ...params, at } } : null;
  }
  const n = page.n + by;
  return n >= 0 && n < page.count ? { parts: ["run", run, "episode", page.file, String(n)], params } : null;
}

export const openNeighbour = async (run, page, params, by) => {
  const found = await neighbour(run, page, params, by);
  if (found) go(found.parts, found.params);
};
