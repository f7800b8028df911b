// The chat page. Texts of models and tools only ever become text nodes.
const $ = (id) => document.getElementById(id);
let messages = [];
let model = "";
let running = null;

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function add(parent, name, kind, text = "") {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  node.textContent = text;
  parent.append(node);
  return node;
}

function speech(who) {
  const article = add($("log"), "article");
  add(article, "b", "", who);
  return article;
}

function scroll() {
  $("log").scrollTop = $("log").scrollHeight;
}

// Yield the JSON of every server-sent event of a response.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

class Answer {
  constructor() {
    this.article = speech(model);
    this.text = "";
    this.node = null;
    this.thinking = null;
  }

  show(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const event = chunk.agent_r1;
    if (event) this.event(event);
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) {
      this.thinking ??= add(this.article, "div", "thinking");
      this.thinking.textContent += delta.reasoning_content;
    }
    if (delta.content) {
      this.node ??= add(this.article, "p");
      this.node.textContent += delta.content;
      this.text += delta.content;
    }
    const reason = chunk.choices?.[0]?.finish_reason;
    if (reason === "length") add(this.article, "div", "thinking", "(stopped: a limit on length or steps)");
    scroll();
  }

  event(event) {
    const lines = {
      tool_call: () => `${event.name}(${event.arguments})`,
      tool_result: () => `${event.name}: ${event.result}`,
      feedback: () => event.text,
    };
    if (!(event.type in lines)) return;
    add(this.article, "div", event.failed ? "tool error" : "tool", lines[event.type]());
    this.node = null; // what is said next comes below
    this.thinking = null;
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  add(speech("you"), "p", "", text);
  const answer = new Answer();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const body = JSON.stringify({ model, messages, stream: true });
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body, signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) answer.show(chunk);
    messages.push({ role: "assistant", content: answer.text });
  } catch (error) {
    messages.pop(); // a failed question is not remembered
    add(answer.article, "p", "error", error.name === "AbortError" ? "(stopped)" : error.message);
  } finally {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    scroll();
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
});

const about = await (await fetch("/health")).json();
model = about.model;
$("model").textContent = model;
document.title = `Chat with ${model}`;
$("mode").textContent = about.mode === "agent" ? "agent with its own tools" : "bare model";
$("key-row").hidden = (await fetch("/v1/models")).ok;
$("text").focus();
