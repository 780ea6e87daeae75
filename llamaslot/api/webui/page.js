// The page's frame: views, the API key, requests to the server, and the stream of /events.

import { startCache } from "./cache.js";
import { startChat } from "./chat.js";

export const $ = (id) => document.getElementById(id);
export const count = (n) => Math.round(n).toLocaleString("en");

/** Return an element with properties and children; text is never parsed as HTML. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function say(text) {
  $("status").textContent = text;
}

/** Return a path with the chosen model, where the server has several. */
function withModel(path) {
  const name = $("models").value;
  return name ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(name)}` : path;
}

/** Return the response of the server to a request; throws its error message. */
export async function ask(path, { body, method, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { headers, signal, method: method ?? (body ? "POST" : "GET") };
  if (body) options.body = JSON.stringify(body);
  const response = await fetch(withModel(path), options);
  if (!response.ok) {
    const error = (await response.json().catch(() => ({}))).error ?? {};
    if (response.status === 401) $("access").open = true;
    const message = error.message ?? `${response.status} ${response.statusText}`;
    throw Object.assign(new Error(message), { status: response.status });
  }
  return response;
}

/** Yield the name and the data of each server-sent event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) yield { name, data: data.join("\n") };
    }
  }
}

const TASKS = { embedding: "embeds texts and does not chat", rerank: "scores documents and does not chat" };
let models = [];

/** Return what the chosen model does instead of chatting; empty for one that chats. */
function otherTask() {
  const chosen = models.find((each) => each.name === $("models").value) ?? models[0];
  return TASKS[chosen?.capabilities[0]] ?? "";
}

function show() {
  const task = otherTask();
  const isCache = task !== "" || location.hash === "#/cache";
  $("task").textContent = task;
  $("to-chat").hidden = task !== "";
  $("chat").hidden = isCache;
  $("cache").hidden = !isCache;
  for (const [id, isCurrent] of [["to-chat", !isCache], ["to-cache", isCache]]) {
    if (isCurrent) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  cache.show(isCache);
}

async function showModel() {
  for (;;) {
    try {
      const reply = await (await ask("v1/models")).json();
      models = reply.models;
      // A server that may have several says which are loaded.
      const several = reply.data.some((each) => each.status);
      const names = reply.data.map((each) => each.id);
      $("models").hidden = !several;
      $("models").replaceChildren(...(several ? names : []).map((name) => element("option", {}, name)));
      $("model").textContent = several ? "" : names.join(", ");
      say("");
      return show();
    } catch (error) {
      say(error.message);
      // A model that is loading, an engine that is restarting.
      if (error.status !== 503) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("access").open = false;
  showModel();
  cache.restart();
});

$("models").addEventListener("change", () => {
  show();
  cache.restart();
});

const cache = startCache();
startChat();
addEventListener("hashchange", show);
show();
showModel();
