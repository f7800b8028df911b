// Attempts side by side: those of one group, and those at one row at different steps.
import { conversation } from "./conversation.js";
import { empty, h, number, plural, replace, rewardMark, stopChip } from "./dom.js";
import { currentRoute, go, hrefTo, setParams } from "./router.js";
import { ask } from "./source.js";
import { runTabs } from "./tabs.js";
import { markDifferences } from "./diff.js";

const AT_ONCE = 8; // columns before "show more"
const MODE = { view: "text", colouring: "mask", scale: 1 };

function column(run, row, success) {
  const body = h("div", {}, "Reading…");
  const element = h(
    "section.attempt",
    { "aria-label": `${row.kind} step ${row.step}, episode ${row.n}` },
    h("header", {}, rewardMark(row.reward, row.outcome, success, row.stop), stopChip(row.stop), h("a", { href: hrefTo(["run", run, "episode", row.file, String(row.n)]) }, "open"), h("small", {}, `${row.kind} step ${row.step} · ${plural(row.steps, "step")} · ${plural(row.tokens, "token")}`)),
    body,
  );
  const loaded = ask("episode", { run, file: row.file, n: row.n }).then(
    (page) => {
      replace(body, conversation(page, run, MODE, true));
      return page;
    },
    (error) => {
      replace(body, error.message);
      return null;
    },
  );
  return { element, loaded };
}

function failed(root, run, error) {
  if (error.name !== "AbortError") replace(root, runTabs(run, ""), empty("This cannot be shown", error.message, h("a.button", { href: hrefTo(["run", run, "episodes"]) }, "All episodes of this run")));
}

export async function groupPage(root, [run, file, row], signal) {
  replace(root, h("p.loading", {}, "Reading the group…"));
  let answer;
  try {
    answer = await ask("group", { run, file, row }, signal);
  } catch (error) {
    failed(root, run, error);
    return;
  }
  const { attempts } = answer;
  const rewards = attempts.map((attempt) => attempt.reward);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const side = h("div.side-by-side", { tabindex: "0" });
  const show = (from) => {
    const some = attempts.slice(from, from + AT_ONCE).map((attempt) => column(run, attempt, answer.success_reward));
    side.append(...some.map((one) => one.element));
    const left = attempts.length - from - AT_ONCE;
    if (left > 0) {
      const more = h("button", { onclick: () => (more.remove(), show(from + AT_ONCE)) }, `Show ${Math.min(left, AT_ONCE)} more`);
      side.append(more);
    }
    return Promise.all(some.map((one) => one.loaded));
  };
  const arrow = (to, sign, label) => (to ? h("a.button", { href: hrefTo(["run", run, "group", file, to]), title: label }, sign) : h("span.button.off", { "aria-hidden": "true" }, sign));
  replace(
    root,
    runTabs(run, ""),
    h("div.title", {}, h("h2", {}, attempts[0].question || row), h("span.arrows", {}, arrow(answer.before, "‹", "Previous row (k)"), arrow(answer.after, "›", "Next row (j)"))),
    h("div.facts", {}, h("span", {}, row), h("span", {}, plural(attempts.length, "attempt")), h("span", {}, `mean reward ${number(mean)}`), new Set(rewards).size === 1 && h("span", {}, attempts.length > 1 ? "all earned the same: no signal for group advantages" : ""), h("a", { href: hrefTo(["run", run, "row", row]) }, "This row at other steps")),
    side,
  );
  await show(0);
  root.dataset.state = "ready";
  document.addEventListener("shortcut", ({ detail }) => {
    const to = { j: answer.after, k: answer.before }[detail];
    if (to) go(["run", run, "group", file, to]);
    if (detail === "Escape") history.back();
  }, { signal });
}

const SIDES = [["a", "A (left)"], ["b", "B (right)"]];
const keyOf = (one) => `${one.file}/${one.n}`;

/** The attempts at a row: spread over all steps if there are many, and those that the address names. */
async function attemptsAt(run, row, signal) {
  let answer;
  do answer = await ask("episodes", { run, row, sort: "step", limit: 200, spread: 1 }, signal);
  while (answer.read < answer.total && !signal.aborted);
  const known = new Set(answer.rows.map(keyOf));
  const { a = "", b = "" } = currentRoute().params;
  const missing = [a, b].filter((key) => key.includes("/") && !known.has(key)).map((key) => key.split("/")[0]);
  const groups = await Promise.all([...new Set(missing)].map((file) => ask("group", { run, file, row }, signal).catch(() => ({ attempts: [] }))));
  const named = groups.flatMap((group) => group.attempts).filter((one) => [a, b].includes(keyOf(one)) && !known.has(keyOf(one)));
  return { ...answer, rows: [...answer.rows, ...named].sort((one, other) => one.step - other.step) };
}

export async function rowPage(root, [run, row], signal) {
  replace(root, h("p.loading", {}, "Looking for this row…"));
  let choose = () => {};
  let move = () => {};
  document.addEventListener("shortcut", ({ detail }) => {
    if (detail === "a" || detail === "b") choose(detail);
    if (detail === "j") move(1);
    if (detail === "k") move(-1);
    if (detail === "Escape") go(["run", run, "episodes"], { row });
  }, { signal });
  let answer;
  try {
    answer = await attemptsAt(run, row, signal);
  } catch (error) {
    failed(root, run, error);
    return;
  }
  if (signal.aborted) return;
  if (!answer.rows.length) {
    failed(root, run, new Error(`No episode of ${row} was kept.`));
    return;
  }
  const { rows } = answer;
  const columnsOf = h("div.side-by-side.two");
  const strip = h("div.strip", { role: "group", "aria-label": "Attempts by step" });
  const picked = () => ({ a: pick("a", rows[0]), b: pick("b", rows.at(-1)) });
  const pick = (name, fallback) => rows.find((one) => keyOf(one) === currentRoute().params[name]) ?? fallback;
  let side = "b"; // where the next attempt goes
  const sides = h("span.segments", { role: "group", "aria-label": "Choose the attempt for" }, SIDES.map(([name, label]) => h("button", { "data-side": name, title: `Press ${name}`, onclick: () => choose(name) }, label)));
  const mark = () => {
    for (const button of sides.children) button.setAttribute("aria-pressed", String(button.dataset.side === side));
  };
  choose = (name) => {
    side = name;
    mark();
  };
  const put = (name, one) => {
    setParams({ [name]: keyOf(one) });
    return draw();
  };
  move = (by) => put(side, rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(picked()[side]) + by))]);
  const draw = async () => {
    const { a, b } = picked();
    const focused = [...strip.children].indexOf(document.activeElement);
    replace(strip, rows.map((one) => dot(one, [one === a && "A", one === b && "B"].filter(Boolean).join(""), answer.success_reward, (isLeft) => put(isLeft ? "a" : side, one))));
    if (focused >= 0) strip.children[focused].focus();
    const columns = [a, b].map((one) => column(run, one, answer.success_reward));
    replace(columnsOf, columns.map((one) => one.element));
    const [left, right] = await Promise.all(columns.map((one) => one.loaded));
    if (left && right && a !== b) markDifferences(columns[0].element, columns[1].element);
    root.dataset.state = "ready";
  };
  mark();
  const shown = rows.length < answer.matches ? `, of which ${rows.length} are shown, spread over all steps` : "";
  replace(
    root,
    runTabs(run, ""),
    h("h2", {}, rows[0].question || row),
    h("p.hint", {}, `${plural(answer.matches, "attempt")} at ${row}${shown}. Marked words differ.`),
    h("div.bar", {}, h("span.pair", {}, "Choose", sides), h("span.hint", {}, "Click an attempt, or press a or b, then j and k.")),
    strip,
    columnsOf,
  );
  await draw();
}

function dot(one, letter, success, choose) {
  const won = one.outcome >= success && !["error", "timeout"].includes(one.stop);
  const label = `${one.kind} step ${one.step}: reward ${number(one.reward)}`;
  return h(`button.dot${won ? ".won" : ""}${letter ? ".chosen" : ""}`, { title: label, onclick: (event) => choose(event.shiftKey) }, h("small", {}, `${one.step}`), h("b", {}, `${won ? "✓" : "✗"} ${letter}`.trim()));
}
