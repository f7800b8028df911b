// A conversation: the opening messages, then each step with its tool calls, rewards and times.
import { bytes, h, number, plural, replace, seconds, signed } from "./dom.js";
import { setParams } from "./router.js";
import { ask, pictureSource } from "./source.js";
import { tokenBlock } from "./tokens.js";

/** A text of the episode. Long ones are cut, and a button fetches the rest part by part. */
export function longText(clip, where, tag = "div.text") {
  const element = h(tag, {}, clip.text);
  if (clip.end >= clip.length) return element;
  let shown = clip.end; // in code points, which the lengths of JavaScript are not
  const more = h("button.quiet");
  const label = () => {
    more.textContent = `Show more (${bytes(shown)} of ${bytes(clip.length)} shown)`;
    more.hidden = shown >= clip.length;
  };
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      const part = await ask("text", { ...where, at: clip.at, start: shown });
      element.append(document.createTextNode(part.text));
      shown = part.end;
    } catch (error) {
      more.after(h("small", {}, ` ${error.message}`));
    }
    more.disabled = false;
    label();
  });
  label();
  return h("div.long", {}, element, more);
}

const SMALL = 128; // pixels; smaller pictures are enlarged, with sharp edges

/** Pictures in a row. A click shows one in full size. */
export function pictureRow(names, run) {
  return names.length > 0 && h("div.pictures", {}, names.map((name) => picture(name, run)));
}

function picture(name, run) {
  const missing = () => h("span.picture.missing", {}, `[image ${name.slice(0, 6)} is missing]`);
  const source = pictureSource(run, name);
  if (source === null) return missing();
  const image = h("img", { alt: `image ${name.slice(0, 6)}`, decoding: "async" });
  const button = h("button.picture", { "aria-expanded": "false", title: "Show in full size" }, image);
  image.addEventListener("load", () => {
    button.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < SMALL);
    button.title = `${image.naturalWidth} x ${image.naturalHeight} pixels, ${name.slice(0, 12)}`;
  });
  image.addEventListener("error", () => button.replaceWith(missing()));
  button.addEventListener("click", () => button.setAttribute("aria-expanded", String(button.classList.toggle("full"))));
  image.src = source;
  return button;
}

const bubble = (role, label, ...content) => h(`article.message.${role}`, {}, h("header", {}, label), content);

function callCard(call, where) {
  const facts = [seconds(call.seconds), call.reward !== 0 && `reward ${signed(call.reward)}`, call.fault && call.fault.replaceAll("_", " ")].filter(Boolean).join(" · ");
  const values = call.arguments.map(({ name, value }) => [h("dt", {}, name), h("dd", {}, longText(value, where, "span.text"))]);
  return h(
    `div.call${call.error === null ? "" : ".bad"}`,
    {},
    h("header", {}, h("b", {}, call.name || "(no name)"), h("small", {}, facts)),
    values.length > 0 && h("dl", {}, values),
    call.error === null ? (call.result.length > 0 || !call.pictures.length) && longText(call.result, where, "div.text.result") : h("div", {}, h("small.bad", {}, "refused or failed"), longText(call.error, where, "div.text.result")),
    pictureRow(call.pictures, where.run),
  );
}

/** The text of a step, with each tool call in its place. */
function actionParts(step, where) {
  const parts = [];
  let at = 0;
  const chars = [...step.text.text]; // spans count characters, not UTF-16 units
  for (const call of step.calls) {
    const [start, end] = call.span;
    if (start > at && chars.slice(at, start).join("").trim()) parts.push(h("div.text", {}, chars.slice(at, start).join("").trim()));
    parts.push(callCard(call, where));
    at = Math.max(at, end);
  }
  const rest = chars.slice(at).join("");
  if (step.text.end < step.text.length) parts.push(longText({ ...step.text, text: rest }, where));
  else if (rest.trim() || !parts.length) parts.push(h("div.text", {}, rest.trim() || "(empty)"));
  return parts;
}

function seenByModel(step, index, where) {
  const body = h("div.seen");
  const change = index === 0 ? "" : step.kept_all ? `, ${number(step.prompt_tokens - step.shared_tokens)} of them new` : `; the history was rewritten after token ${number(step.shared_tokens)}`;
  const hidden = step.hidden_messages ? ` A context policy hid or changed ${plural(step.hidden_messages, "message")}.` : "";
  const details = h("details.prompt", {}, h("summary", {}, `What the model saw: ${plural(step.prompt_tokens, "token")}${change}`), hidden && h("p.hint", {}, hidden), body);
  whenOpened(details, body, async () => {
    const fetchFrom = (start) => ask("tokens", { ...where, step: index, part: "prompt", start });
    const prefix = [[0, index > 0 ? step.shared_tokens : 0]];
    const [first, kept] = await Promise.all([fetchFrom(0), step.kept_all ? prefix : ask("dropped", { ...where, step: index }).then((found) => found.kept, () => prefix)]);
    const isOld = (position) => kept.some(([start, length]) => position >= start && position < start + length);
    return [kept.some(([, length]) => length > 0) && h("p.hint", {}, "Pale: already seen in an earlier step."), tokenBlock(first, "prompt", "mask", 1, fetchFrom, isOld)];
  });
  return details;
}

/** Fills the body of a <details> when it is first opened. */
function whenOpened(details, body, fetchContent) {
  details.addEventListener("toggle", async () => {
    if (!details.open || body.childNodes.length) return;
    replace(body, "Reading…");
    try {
      replace(body, await fetchContent());
    } catch (error) {
      replace(body, error.message);
    }
  });
}

/** What a rewritten prompt lacks of the prompt and the answer before it, struck through. */
function leftOut(step, index, where) {
  const body = h("div.seen");
  const details = h("details.prompt.left-out", {}, h("summary", {}, "What was left out of it"), body);
  whenOpened(details, body, async () => {
    const found = await ask("dropped", { ...where, step: index });
    const list = h("div", {}, found.parts.map(droppedPart));
    let shown = tokensIn(found);
    const more = h("button.quiet", { hidden: shown >= found.total }, "Show more");
    more.addEventListener("click", async () => {
      const next = await ask("dropped", { ...where, step: index, start: shown });
      list.append(...next.parts.map(droppedPart));
      shown += tokensIn(next);
      more.hidden = shown >= found.total || !next.parts.length;
    });
    return [h("p.hint", {}, `${plural(found.total, "token")} of the last prompt and the answer to it are not in this prompt.`), list, more];
  });
  return details;
}

const tokensIn = (found) => found.parts.reduce((sum, part) => sum + part.ids.length, 0);

function droppedPart(part) {
  const text = part.texts ? part.texts.join("") : part.ids.map((id) => `#${id}`).join(" ");
  const origin = part.was_sampled ? "written by the model" : "given to the model";
  return h("div.dropped", {}, h("small", {}, `${plural(part.ids.length, "token")}, ${origin}; stood after token ${number(part.at)} of this prompt`), h("del.tokens", {}, text));
}

function stepFacts(step) {
  const versions = step.versions.map(([version]) => version);
  return [
    plural(step.sampled_tokens, "token"),
    `sampled in ${seconds(step.sampling)}`,
    step.waiting > 0.0005 && `environment ${seconds(step.waiting)}`,
    step.reward !== 0 && `reward ${signed(step.reward)}`,
    step.temperature !== null && step.temperature !== undefined && `temperature ${number(step.temperature)}`,
    step.top_p < 1 && `top-p ${number(step.top_p)}`,
    step.top_k > 0 && `top-k ${step.top_k}`,
    versions.length > 1 ? `policies ${versions.join(", ")}` : versions.length === 1 && `policy ${versions[0]}`,
    step.is_cut && "cut off by a token limit",
  ].filter(Boolean);
}

/** One step. `mode` is {view: "text" | "tokens", colouring, scale}; a compact step leaves out what the model saw. */
function stepBlock(step, index, where, mode, isCompact) {
  const label = step.summary === null ? `Step ${index + 1}` : `Summary (${step.summary})`;
  const role = step.role && h("span.chip.role", {}, step.role);
  const said =
    mode.view === "tokens"
      ? [tokenBlock(step.tokens, "response", mode.colouring, mode.scale, (start) => ask("tokens", { ...where, step: index, part: "response", start })), step.calls.map((call) => callCard(call, where))]
      : actionParts(step, where);
  const pictures = pictureRow(step.pictures, where.run);
  const reply = pictures ? bubble("env", "environment", step.feedback.length > 0 && longText(step.feedback, where), pictures) : step.feedback.length > 0 && (step.calls.length ? h("details", {}, h("summary", {}, "Reply of the environment, in full"), longText(step.feedback, where)) : bubble("env", "environment", longText(step.feedback, where)));
  const info = step.info.length > 2 && h("details", {}, h("summary", {}, "Notes of the environment"), longText(step.info, where));
  return h("section.step", { id: `step-${index}` }, !isCompact && seenByModel(step, index, where), !isCompact && !step.kept_all && leftOut(step, index, where), bubble("agent", h("span", {}, h("b", {}, label), role, h("small", {}, stepFacts(step).slice(0, isCompact ? 1 : 99).join(" · "))), said), !isCompact || !step.calls.length ? reply : null, !isCompact && info);
}

export function conversation(page, run, mode, isCompact = false) {
  const where = { run, file: page.file, n: page.n };
  return h(
    "div.conversation",
    {},
    !isCompact && page.messages.map((message) => bubble(message.role === "system" ? "system" : "user", message.role, longText(message.text, where), pictureRow(message.pictures, run))),
    page.steps.map((step, index) => stepBlock(step, index, where, mode, isCompact)),
    page.unanswered > 0 && !isCompact && h("p.hint", {}, `The step limit left a prompt of ${plural(page.unanswered, "token")} unanswered.`),
    !isCompact && page.log?.length > 0 && h("details", {}, h("summary", {}, "log"), longText(page.log, where)),
    page.error && h("article.message.bad", {}, h("header", {}, "failure"), h("div.text", {}, page.error)),
  );
}

export const showStep = (index) => document.getElementById(`step-${index}`)?.scrollIntoView({ block: "center" });

/** The seconds of an episode from left to right: sampling, tools, and the rest. */
export function timeline(page) {
  const parts = page.steps.flatMap((step, index) => [
    { kind: "sampling", time: step.sampling, label: `step ${index + 1}${step.role && ` (${step.role})`}: sampling ${seconds(step.sampling)}`, step: index },
    { kind: "tools", time: step.waiting, label: `step ${index + 1}: ${step.calls.map((call) => call.name).join(", ") || "environment"} ${seconds(step.waiting)}`, step: index },
  ]);
  const known = parts.reduce((sum, part) => sum + part.time, 0);
  const rest = Math.max(0, page.seconds - known);
  if (rest > 0.01 * page.seconds) parts.push({ kind: "rest", time: rest, label: `other: ${seconds(rest)} (scoring, waiting for a place)` });
  const total = known + rest || 1;
  const bars = parts.filter((part) => part.time > 0).map((part) =>
    h(`button.part.${part.kind}`, {
      title: part.label,
      "aria-label": part.label,
      style: { "flex-grow": String(part.time / total) },
      onclick: () => {
        setParams({ s: part.step });
        showStep(part.step);
      },
    }),
  );
  const sum = (kind) => parts.filter((part) => part.kind === kind).reduce((all, part) => all + part.time, 0);
  const key = ["sampling", "tools", "rest"].filter((kind) => sum(kind) > 0).map((kind) => h("span", {}, h(`i.${kind}`), `${kind === "rest" ? "other" : kind} ${seconds(sum(kind))}`));
  return h("div.timeline", {}, h("div.track", { role: "group", "aria-label": "Time line" }, bars), h("div.legend", {}, key));
}
