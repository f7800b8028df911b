// Building the page. Text from runs only ever becomes text nodes: nothing here parses HTML.

/** h("div.note", {title: "x", onclick: f}, "text", child, null): an element. */
export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  return fill(element, props, children);
}

/** The same for SVG. */
export function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props ?? {})) element.setAttribute(key, value);
  append(element, children);
  return element;
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, setting] of Object.entries(value)) element.style.setProperty(name, setting);
    else if (key === "value" || key === "checked" || key === "indeterminate") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Numbers for people.

export function number(value, digits = 3) {
  if (typeof value === "string") return value; // "NaN", "Infinity"
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : "–");
/** For axes, whose numbers are round. */
export const wholePercent = (value) => `${Number((100 * value).toPrecision(3))} %`;
export const signed = (value) => (typeof value === "number" && value > 0 ? `+${number(value)}` : number(value));

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${value.toPrecision(3)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function ago(time) {
  const passed = Date.now() / 1000 - time;
  if (!(time > 0)) return "";
  if (passed < 60) return "just now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 130000) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export function bytes(length) {
  if (length < 10000) return `${length.toLocaleString("en")} characters`;
  return length < 1e6 ? `${Math.round(length / 1000)} thousand characters` : `${(length / 1e6).toFixed(1)} million characters`;
}

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Offers a file for download. */
export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const colours = new Map();
export const forgetColours = () => colours.clear();

/** A colour of the style sheet as the canvas needs it: resolved for light or dark. */
export function resolved(variable) {
  if (!colours.has(variable)) {
    const probe = h("span", { style: { color: `var(${variable})`, display: "none" } });
    document.body.append(probe);
    colours.set(variable, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(variable);
}

/** An empty state: what is missing, and what to do next. */
export function empty(title, ...lines) {
  return h("div.empty", {}, h("h1", {}, title), lines.map((line) => (line instanceof Node ? line : h("p", {}, line))));
}

export const command = (text) => h("pre.command", {}, text);

export function stopChip(stop) {
  const bad = ["error", "timeout", "unreadable"].includes(stop);
  return h(`span.chip.stop${bad ? ".bad" : stop === "answered" ? "" : ".cut"}`, {}, stop.replaceAll("_", " "));
}

/** A reward with a mark that does not depend on colour. */
export function rewardMark(reward, outcome, successReward, stop) {
  const failed = ["error", "timeout", "unreadable"].includes(stop);
  const won = !failed && outcome >= successReward;
  const label = failed ? "failed" : won ? "success" : "no success";
  return h(`span.reward.${won ? "won" : "lost"}`, { title: label }, h("span.mark", { "aria-label": label }, won ? "✓" : failed ? "!" : "✗"), number(reward));
}
