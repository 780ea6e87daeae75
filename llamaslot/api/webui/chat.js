// Chats, kept in this browser. Each is a tree of messages: an edit or a new try is another branch.

import { $, ask, element, events, say } from "./page.js";
import { reuseBar } from "./reuse.js";

const STORE = "llamaslot.conversations";
const FIELDS = [
  ["temperature", "Temperature", { min: 0, step: 0.1 }],
  ["top_p", "Top P", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top K", { min: 0, step: 1 }],
  ["min_p", "Min P", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];

let conversations = [];
let current = null;
let running = null;
let shown = [];

const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("");

function load() {
  try {
    conversations = JSON.parse(localStorage.getItem(STORE)) ?? [];
  } catch {
    conversations = [];
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations));
  } catch {
    say("The browser has no space left: delete a conversation, or it is lost with this tab.");
  }
}

/** Return the messages from the first one to the current leaf. */
function path() {
  const messages = [];
  let id = current.leaf;
  while (id) {
    const message = current.messages[id];
    messages.unshift(message);
    id = message.parent;
  }
  return messages;
}

const siblings = (message) =>
  Object.values(current.messages).filter((each) => each.parent === message.parent);

function add(parent, role, content) {
  const message = { id: newId(), parent, role, content, made: Date.now() };
  current.messages[message.id] = message;
  current.leaf = message.id;
  return message;
}

/** Make the latest leaf below a message the current one. */
function goTo(message) {
  let leaf = message;
  for (;;) {
    const below = Object.values(current.messages).filter((each) => each.parent === leaf.id);
    if (!below.length) break;
    leaf = below.reduce((latest, each) => (each.made > latest.made ? each : latest));
  }
  current.leaf = leaf.id;
  save();
  showMessages();
}

function start(conversation) {
  current = conversation;
  $("system").value = current.system;
  for (const [name] of FIELDS) $(`field-${name}`).value = current.sampling[name] ?? "";
  showList();
  showMessages();
}

function startNew() {
  const conversation = { id: newId(), title: "New conversation", system: "", sampling: {}, messages: {}, leaf: null };
  conversations.unshift(conversation);
  start(conversation);
  $("text").focus();
}

function remove(conversation) {
  conversations = conversations.filter((each) => each !== conversation);
  save();
  if (!conversations.length) startNew();
  else if (conversation === current) start(conversations[0]);
  else showList();
}

function showList() {
  const items = conversations.map((each) => {
    const open = element("button", { className: "open", onclick: () => running || start(each) }, each.title);
    if (each === current) open.setAttribute("aria-current", "true");
    const drop = element("button", { className: "drop", onclick: () => running || remove(each) }, "×");
    drop.setAttribute("aria-label", `Delete ${each.title}`);
    return element("li", {}, open, drop);
  });
  $("conversations").replaceChildren(...items);
}

function showMessages() {
  shown = path().map(messageView);
  $("messages").replaceChildren(...shown.map((each) => each.root));
  $("messages").lastElementChild?.scrollIntoView({ block: "end" });
}

// HTML in a reply is shown as it was written: it is not ours.
marked.use({ renderer: { html: ({ text }) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;") } });

/** Return Markdown as elements without scripts, images or anything else that is loaded. */
function markdown(text) {
  const html = marked.parse(text, { gfm: true, breaks: true });
  const clean = DOMPurify.sanitize(html, {
    RETURN_DOM_FRAGMENT: true,
    USE_PROFILES: { html: true },
    FORBID_TAGS: ["img", "picture", "source", "video", "audio", "style", "form", "input", "button", "iframe", "object"],
    FORBID_ATTR: ["style", "class", "id", "name", "background", "srcset"],
  });
  for (const link of clean.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of clean.querySelectorAll("pre")) {
    const code = block.textContent;
    const copy = element("button", { className: "copy", type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    const frame = element("div", { className: "code" });
    block.replaceWith(frame);
    block.tabIndex = 0;
    frame.append(copy, block);
  }
  return clean;
}

function messageView(message) {
  const head = element("h2", {}, message.role === "user" ? "You" : "Model");
  const body = element("div", { className: "body" });
  const tools = element("div", { className: "tools" });
  const root = element("article", { className: message.role }, head, body, tools);
  const view = { root, body, message, update };

  function update() {
    const parts = [];
    if (message.reasoning) {
      const old = body.querySelector("details.reasoning");
      const folded = element("details", { className: "reasoning", open: old?.open ?? false });
      folded.append(element("summary", {}, "Reasoning"), element("div", {}, markdown(message.reasoning)));
      parts.push(folded);
    }
    if (message.role === "user") parts.push(element("p", { className: "plain" }, message.content));
    else if (message.content) parts.push(markdown(message.content));
    for (const call of message.calls ?? []) {
      const code = element("pre", { tabIndex: 0 }, call.arguments);
      parts.push(element("details", { className: "call" }, element("summary", {}, `Calls ${call.name}`), code));
    }
    if (message.error) parts.push(element("p", { className: "error" }, message.error));
    if (message.cache) parts.push(reuseBar(message.cache, message.timings ?? {}));
    body.replaceChildren(...parts);
  }

  function showTools() {
    const all = siblings(message);
    if (all.length > 1) {
      const at = all.indexOf(message);
      const step = (text, label, to) => {
        const button = element("button", { type: "button", disabled: !all[to], onclick: () => running || goTo(all[to]) });
        button.textContent = text;
        button.setAttribute("aria-label", label);
        return button;
      };
      tools.append(step("‹", "Previous branch", at - 1), `${at + 1} of ${all.length}`, step("›", "Next branch", at + 1));
    }
    if (message.role === "user") {
      tools.append(element("button", { type: "button", onclick: () => running || edit() }, "Edit and branch"));
    } else {
      tools.append(element("button", { type: "button", onclick: () => running || run(message.parent) }, "Try again"));
    }
  }

  function edit() {
    const box = element("textarea", { value: message.content, rows: 4 });
    box.setAttribute("aria-label", "Edited message");
    const send = element("button", {}, "Send as a branch");
    const leave = element("button", { type: "button", onclick: update }, "Cancel");
    const form = element("form", {}, box, send, leave);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = box.value.trim();
      if (text) run(add(message.parent, "user", text).id);
    });
    body.replaceChildren(form);
    box.focus();
  }

  update();
  showTools();
  return view;
}

function request() {
  const messages = path().map((each) => {
    const sent = { role: each.role, content: each.content };
    if (each.reasoning) sent.reasoning_content = each.reasoning;
    return sent;
  });
  if (current.system) messages.unshift({ role: "system", content: current.system });
  const sampling = Object.fromEntries(Object.entries(current.sampling).filter(([, value]) => value !== null));
  return { ...sampling, messages, stream: true, stream_options: { include_usage: true }, session_id: `page-${current.id}` };
}

/** Generate a reply to a message of the user. */
async function run(parent) {
  current.leaf = parent;
  const body = request();
  const message = add(parent, "assistant", "");
  showMessages();
  const view = shown[shown.length - 1];
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const started = performance.now();
  let isDue = false;
  const later = () => {
    // At most once a frame: long replies would be rendered anew for each token.
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      view.update();
      $("messages").lastElementChild?.scrollIntoView({ block: "end" });
    });
  };
  try {
    const response = await ask("v1/chat/completions", { body, signal: running.signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      take(message, JSON.parse(data), started);
      later();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
  } finally {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    if (current.title === "New conversation") current.title = path()[0].content.slice(0, 60);
    save();
    showList();
    showMessages();
  }
}

function take(message, chunk, started) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.cache) message.cache = chunk.cache;
  if (chunk.timings) message.timings = { ...message.timings, ...chunk.timings };
  const delta = chunk.choices?.[0]?.delta;
  if (!delta) return;
  const hasText = delta.content || delta.reasoning_content || delta.tool_calls;
  if (hasText && message.timings?.ttft_ms === undefined) {
    message.timings = { ...message.timings, ttft_ms: performance.now() - started };
  }
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  run(add(current.leaf, "user", text).id);
}

export function startChat() {
  for (const [name, label, limits] of FIELDS) {
    const input = element("input", { type: "number", id: `field-${name}`, placeholder: "default", ...limits });
    input.addEventListener("change", () => {
      current.sampling[name] = input.value === "" ? null : Number(input.value);
      save();
    });
    $("sampling").append(element("label", {}, `${label} `, input));
  }
  $("system").addEventListener("change", () => {
    current.system = $("system").value;
    save();
  });
  $("new").addEventListener("click", () => running || startNew());
  $("stop").addEventListener("click", () => running?.abort());
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  load();
  if (conversations.length) start(conversations[0]);
  else startNew();
}
