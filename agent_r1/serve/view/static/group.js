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

export async function rowPage(root, [run, row], signal) {
  replace(root, h("p.loading", {}, "Looking for this row…"));
  let answer;
  try {
    do answer = await ask("episodes", { run, row, sort: "step", limit: 200 }, signal);
    while (answer.read < answer.total && !signal.aborted);
  } catch (error) {
    failed(root, run, error);
    return;
  }
  if (signal.aborted) return;
  if (!answer.rows.length) {
    failed(root, run, new Error(`No episode of ${row} was kept.`));
    return;
  }
  const side = h("div.side-by-side.two");
  const strip = h("div.strip", { role: "group", "aria-label": "Attempts by step" });
  const key = (one) => `${one.file}/${one.n}`;
  const pick = (name, fallback) => answer.rows.find((one) => key(one) === currentRoute().params[name]) ?? fallback;
  const draw = async () => {
    const [a, b] = [pick("a", answer.rows[0]), pick("b", answer.rows.at(-1))];
    replace(strip, answer.rows.map((one) => dot(one, key(one) === key(a) ? "A" : key(one) === key(b) ? "B" : "", answer.success_reward, (name) => {
      setParams({ [name]: key(one) });
      draw();
    })));
    const columns = [a, b].map((one) => column(run, one, answer.success_reward));
    replace(side, columns.map((one) => one.element));
    const [left, right] = await Promise.all(columns.map((one) => one.loaded));
    if (left && right && key(a) !== key(b)) markDifferences(columns[0].element, columns[1].element);
    root.dataset.state = "ready";
  };
  replace(
    root,
    runTabs(run, ""),
    h("h2", {}, answer.rows[0].question || row),
    h("p.hint", {}, `${plural(answer.matches, "attempt")} at ${row}${answer.matches > 200 ? ", of which 200 are shown" : ""}. A click puts an attempt on the right, a click with Shift on the left. Marked words differ.`),
    strip,
    side,
  );
  await draw();
}

function dot(one, letter, success, choose) {
  const won = one.outcome >= success && !["error", "timeout"].includes(one.stop);
  const label = `${one.kind} step ${one.step}: reward ${number(one.reward)}`;
  return h(`button.dot${won ? ".won" : ""}${letter ? ".chosen" : ""}`, { title: label, onclick: (event) => choose(event.shiftKey ? "a" : "b") }, h("small", {}, `${one.step}`), h("b", {}, `${won ? "✓" : "✗"} ${letter}`.trim()));
}
