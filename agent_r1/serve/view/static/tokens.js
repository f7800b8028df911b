// Tokens, coloured by what was recorded for them. Only sampled tokens have values; the others are shown without.
import { h, number, replace, signed } from "./dom.js";

const LABELS = { logprob: "log-prob", ratio: "importance ratio", entropy: "entropy" };
const PAGE = 2000;

/** The value that a colour shows: what is neutral is 0. */
const signedSize = (name, value) => (name === "ratio" ? Math.log(value) : value);

export const labelOf = (name) => LABELS[name] ?? name.replaceAll("_", " ");

/** The colourings that a page offers: what was recorded in any step, then the mask. */
export function colourings(steps) {
  const names = new Set(steps.flatMap((step) => Object.keys(step.tokens.values)));
  return [...names].filter((name) => steps.some((step) => (step.tokens.values[name] ?? []).some((value) => typeof value === "number"))).concat("mask");
}

/** How strong and in which colour: [variable of the colour, 0..1], or null for no value. */
export function shade(name, value, scale) {
  if (typeof value !== "number") return null;
  if (name === "logprob") return ["--warm", Math.min(1, -value / 4.6)]; // full at a probability of 1 %
  const size = signedSize(name, value);
  return [size < 0 ? "--warm" : "--cool", scale > 0 ? Math.min(1, Math.abs(size) / scale) : 0];
}

/** The largest size of a value over all steps, so that colours can be compared. */
export function scaleOf(name, steps) {
  if (name === "ratio") return Math.log(2); // full at half and at twice the probability
  return Math.max(0, ...steps.flatMap((step) => (step.tokens.values[name] ?? []).filter((value) => typeof value === "number").map(Math.abs)));
}

export function legendOf(name, scale) {
  if (name === "mask") return key(["--cool", 0.5, "sampled and trained"], [null, 0, "given to the model: no value"]);
  if (name === "logprob") return key(["--warm", 0.05, "certain"], ["--warm", 0.5, "p = 10 %"], ["--warm", 1, "p ≤ 1 %"]);
  if (name === "ratio") return key(["--warm", 1, "≤ 0.5"], ["--cool", 0, "1"], ["--cool", 1, "≥ 2"]);
  if (name === "entropy") return key(["--cool", 0, "0"], ["--cool", 1, `${number(scale)} nats`]);
  return key(["--warm", 1, number(-scale)], ["--cool", 0, "0"], ["--cool", 1, signed(scale)]);
}

const key = (...entries) => h("span.key", {}, entries.map(([colour, strength, text]) => h("span", {}, h("i", { style: { background: colour ? mix(colour, strength) : "none" } }), text)));
const mix = (colour, strength) => `color-mix(in srgb, var(${colour}) ${Math.round(6 + 44 * strength)}%, transparent)`;

/** One page of tokens as spans. `part` is response or prompt. */
function tokenSpans(page, part, colouring, scale, isOld) {
  const values = colouring === "mask" ? null : page.values[colouring];
  return page.ids.map((id, index) => {
    const text = page.texts ? page.texts[index] : `#${id} `;
    const span = h(`span.token${part === "response" ? "" : ".given"}${isOld(page.start + index) ? ".old" : ""}`, { "data-index": String(index), tabindex: "-1" });
    span.textContent = text.replaceAll("\n", "↵\n") || "∅";
    const shaded = part !== "response" ? null : colouring === "mask" ? ["--cool", 0.5] : shade(colouring, values?.[index], scale);
    if (shaded) span.style.backgroundColor = mix(...shaded);
    return span;
  });
}

/** Tokens with a tooltip, and a button for the next ones. `fetchMore(start)` returns the next page; `isOld(position)`
 * whether a token was seen before. */
export function tokenBlock(first, part, colouring, scale, fetchMore, isOld = () => false) {
  const pages = [first];
  const block = h("div.tokens", { "data-part": part, tabindex: "0", role: "group", "aria-label": `${part === "response" ? "Sampled" : "Given"} tokens; the arrow keys read their values` });
  const more = h("button.quiet");
  const add = (page) => {
    const spans = h("span", { "data-page": String(pages.indexOf(page)) }, tokenSpans(page, part, colouring, scale, isOld));
    more.before(spans);
    const end = page.start + page.ids.length;
    more.hidden = end >= page.total;
    more.textContent = `Show ${Math.min(PAGE, page.total - end).toLocaleString("en")} more of ${page.total.toLocaleString("en")} tokens`;
  };
  more.addEventListener("click", async () => {
    more.disabled = true;
    const last = pages.at(-1);
    try {
      const next = await fetchMore(last.start + last.ids.length);
      pages.push(next);
      add(next);
    } catch (error) {
      more.after(h("small", {}, ` ${error.message}`));
    }
    more.disabled = false;
  });
  block.append(more);
  add(first);
  block.lookUp = (span) => {
    const page = pages[Number(span.parentNode.dataset.page)];
    const index = Number(span.dataset.index);
    const values = Object.entries(page.values).map(([name, list]) => [name, list[index]]);
    return { id: page.ids[index], text: page.texts?.[index], position: page.start + index, values, part };
  };
  return block;
}

/** Moves the focus from token to token, and back to their block. */
function moveFocus(event) {
  const block = event.target.closest?.(".tokens");
  if (!block?.lookUp || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  const tokens = [...block.querySelectorAll(".token")];
  const at = tokens.indexOf(event.target);
  if (event.key === "Escape" && at >= 0) block.focus();
  else if (by && tokens.length) tokens[Math.max(0, Math.min(tokens.length - 1, at < 0 && by === -1 ? tokens.length - 1 : at + by))].focus();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

/** One tooltip for all tokens below an element, under the pointer or the focus. */
export function tokenTips(root, signal) {
  const tip = h("div.tip.token-tip", { id: "token-tip", hidden: true, role: "tooltip" });
  document.body.append(tip);
  signal.addEventListener("abort", () => tip.remove());
  const show = (event) => {
    const span = event.target.closest?.(".token");
    tip.hidden = !span;
    if (!span) return;
    root.querySelector(".token[aria-describedby]")?.removeAttribute("aria-describedby");
    span.setAttribute("aria-describedby", tip.id);
    const { id, text, position, values, part } = span.closest(".tokens").lookUp(span);
    const rows = values.map(([name, value]) => h("div", {}, h("b", {}, name === "advantage" ? signed(value) : number(value, 4)), h("span", {}, labelOf(name) + (name === "logprob" && typeof value === "number" ? ` (p = ${number(100 * Math.exp(value), 4)} %)` : ""))));
    replace(tip, h("div.at", {}, `id ${id}, position ${position}`), h("code", {}, text === undefined ? "text not recorded" : JSON.stringify(text)), part === "response" ? rows : h("div", {}, "given to the model: no value"));
    const box = span.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 12))}px`;
    tip.style.top = box.bottom + tip.offsetHeight + 12 > innerHeight ? `${box.top - tip.offsetHeight - 6}px` : `${box.bottom + 6}px`;
  };
  root.addEventListener("pointerover", show, { signal });
  root.addEventListener("click", show, { signal });
  root.addEventListener("focusin", show, { signal });
  root.addEventListener("focusout", () => (tip.hidden = true), { signal });
  root.addEventListener("keydown", moveFocus, { signal });
  root.addEventListener("pointerleave", () => (tip.hidden = true), { signal });
  document.addEventListener("scroll", () => (tip.hidden = true), { signal, passive: true, capture: true });
}
