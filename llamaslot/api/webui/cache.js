// The cache: gauges, slots over time, rates, the radix tree and requests. Fed by /events.

import { showAdvice } from "./advice.js";
import { $, ask, count, element, events, say } from "./page.js";
import { WHY, why } from "./reuse.js";

const WINDOW_S = 120;
const MAX_REQUESTS = 500;
const MAX_NODES = 2000;
const STATES = ["idle", "loading", "prefill", "decode", "waiting"];
const MIB = 2 ** 20;

const RATES = [
  ["Prompt tokens reused", "%", (now, before) => ratio(now.prompt_tokens, before.prompt_tokens)],
  ["Loaded from RAM", "tokens/s", (now, before, s) => (now.loaded_tokens - before.loaded_tokens) / s],
  ["Evicted, lost", "tokens/s", (now, before, s) => (now.evicted_tokens - before.evicted_tokens) / s],
  ["Written to disk", "MiB/s", (now, before, s) => (now.disk.written_bytes - before.disk.written_bytes) / MIB / s],
];

let samples = [];
let requests = [];
let prefixes = [];
let zoomedKey = null;
let isShown = false;
let stream = null;

function ratio(now, before) {
  const total = now.total - before.total;
  return total ? (100 * (now.matched - before.matched)) / total : NaN;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

// The stream

async function follow() {
  const mine = (stream = new AbortController());
  for (let pause = 500; !mine.signal.aborted; pause = Math.min(2 * pause, 8000)) {
    try {
      const response = await ask(`events?top=${MAX_NODES}`, { signal: mine.signal });
      say("");
      pause = 500;
      for await (const { name, data } of events(response)) take(name, JSON.parse(data));
      say("The server has closed the stream; connecting again.");
    } catch (error) {
      if (mine.signal.aborted) return;
      say(`${error.message}; trying again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function take(name, data) {
  if (name === "state") {
    samples.push(data);
    // A server that was started again counts from zero.
    if (samples.length > 1 && data.cache.prompt_tokens.total < samples.at(-2).cache.prompt_tokens.total) samples = [data];
    samples = samples.filter((each) => each.time > data.time - WINDOW_S);
    requestAnimationFrame(draw);
  } else if (name === "prefixes") {
    prefixes = data.prefixes;
    if (isShown) showTree();
  } else if (name === "request") {
    requests.unshift({ ...data.fields, ...data });
    requests.length = Math.min(requests.length, MAX_REQUESTS);
    showRequests();
  }
}

function draw() {
  if (!isShown || !samples.length) return;
  showGauges(samples.at(-1));
  drawLanes();
  showRates();
}

// Gauges

const gauges = {};

/** Show parts of a total; `tier` can be cleared. */
function gauge(title, parts, total, text, tier) {
  if (!gauges[title]) {
    const bar = element("div", { className: "reuse", role: "img" });
    const note = element("p", { className: "note" });
    const card = element("div", { className: "card" }, element("h3", {}, title), bar, note);
    if (tier) {
      const button = element("button", { type: "button", onclick: () => clear(`?tier=${tier}`) }, "Clear");
      button.setAttribute("aria-label", `Clear ${title}`);
      card.append(button);
    }
    gauges[title] = { bar, note };
    $("gauges").append(card);
  }
  const { bar, note } = gauges[title];
  note.textContent = text;
  bar.setAttribute("aria-label", `${title}: ${text}`);
  const free = total - parts.reduce((sum, [, n]) => sum + n, 0);
  const shares = [...parts, ["free", Math.max(free, 0), "free"]];
  bar.replaceChildren(
    ...shares.map(([name, n, label]) => {
      const part = element("span", { className: name, title: label });
      part.style.flexGrow = n;
      return part;
    }),
  );
}

/** Show a tier's bytes; `cleared` is its name for the button that clears it. */
function showTier(title, tier, color, cleared) {
  if (!tier.total_bytes) return;
  const text = `${(tier.used_bytes / MIB).toLocaleString("en", { maximumFractionDigits: 1 })} of ${count(tier.total_bytes / MIB)} MiB`;
  gauge(title, [[color, tier.used_bytes, text]], tier.total_bytes, text, cleared);
}

async function clear(which) {
  try {
    const done = await (await ask(`cache/clear${which}`, { method: "POST" })).json();
    const total = done.cleared_tokens + done.cleared_ram_tokens + done.cleared_disk_tokens;
    $("cleared").textContent = `${count(total)} tokens dropped`;
  } catch (error) {
    $("cleared").textContent = error.message;
  }
}

function showGauges({ cache, queued, slots }) {
  const { cells, ram, disk, checkpoints, sequences } = cache;
  const pool = `${count(cells.pinned)} in use, ${count(cells.idle)} idle, ${count(cells.free)} free of ${count(cells.total)} cells`;
  gauge("KV pool", [["cells", cells.pinned, "in use"], ["idle", cells.idle, "idle"]], cells.total, pool, "pool");
  showTier("RAM", ram, "ram", "ram");
  showTier("Disk", disk, "disk", "disk");
  showTier("Checkpoints", checkpoints, "ram");
  const running = slots.filter((each) => each.state !== "idle").length;
  const busy = `${running} of ${slots.length} slots run, ${queued} requests wait; ${sequences.used} of ${sequences.total} sequence ids in use`;
  gauge("Slots", [["cells", running, "running"]], slots.length, busy);
}

// Slots over time

function fitted(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width];
}

function drawLanes() {
  const last = samples.at(-1);
  const rowHeight = 18;
  const left = 64;
  const [context, width] = fitted($("lanes"), rowHeight * (last.slots.length + 1) + 4);
  const x = (time) => left + ((time - last.time + WINDOW_S) / WINDOW_S) * (width - left);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  last.slots.forEach(({ id }, row) => {
    const y = row * rowHeight + 2;
    context.fillStyle = color("text");
    context.fillText(`slot ${id}`, 0, y + rowHeight / 2 - 1);
    samples.forEach((sample, i) => {
      const slot = sample.slots[row];
      const end = samples[i + 1]?.time ?? last.time;
      if (!slot || end <= sample.time) return;
      context.fillStyle = color(slot.state);
      context.fillRect(x(sample.time), y, Math.max(x(end) - x(sample.time), 1), rowHeight - 4);
    });
  });
  const y = rowHeight * last.slots.length + 2;
  context.fillStyle = color("text");
  context.fillText("waiting", 0, y + rowHeight / 2 - 1);
  context.fillStyle = color("waiting");
  samples.forEach((sample, i) => {
    const end = samples[i + 1]?.time ?? last.time;
    // Full height for as many requests as there are slots.
    const height = (rowHeight - 4) * Math.min(sample.queued / last.slots.length, 1);
    context.fillRect(x(sample.time), y + rowHeight - 4 - height, Math.max(x(end) - x(sample.time), 1), height);
  });
  const states = last.slots.map((slot) => `slot ${slot.id} ${slot.state}`).join(", ");
  $("lanes").setAttribute("aria-label", `State of each slot over the last two minutes; now: ${states}`);
}

// Rates

function showRates() {
  const cards = RATES.map(([title, unit, of]) => {
    const values = samples.slice(1).map((now, i) => of(now.cache, samples[i].cache, now.time - samples[i].time));
    const known = values.filter((value) => Number.isFinite(value));
    const now = of(samples.at(-1).cache, samples[0].cache, samples.at(-1).time - samples[0].time);
    const text = Number.isFinite(now) ? `${now.toFixed(now < 10 ? 1 : 0)} ${unit}` : "no prompts yet";
    const canvas = element("canvas", { className: "spark" });
    const card = element("div", { className: "card" }, element("h3", {}, title), element("p", {}, text), canvas);
    return { card, canvas, values, most: Math.max(...known, 1e-9) };
  });
  $("rates").replaceChildren(...cards.map((each) => each.card));
  for (const { canvas, values, most } of cards) {
    const [context, width] = fitted(canvas, 32);
    context.strokeStyle = color("cells");
    context.lineWidth = 1.5;
    context.beginPath();
    values.forEach((value, i) => {
      if (Number.isFinite(value)) context.lineTo((i / Math.max(values.length - 1, 1)) * width, 30 - (28 * value) / most);
    });
    context.stroke();
  }
}

// The tree, as rows of boxes whose widths are their tokens

function showTree() {
  const nodes = prefixes.map((each, index) => ({ ...each, index, children: [] }));
  const tops = [];
  for (const node of nodes) (node.parent === null ? tops : nodes[node.parent].children).push(node);
  // A number is an index in this reply only; the path of sizes says which node was meant.
  const key = (node) => `${node.parent === null ? node.namespace : key(nodes[node.parent])}/${node.edge_tokens}`;
  const chosen = zoomedKey === null ? undefined : nodes.find((node) => key(node) === zoomedKey);
  if (!chosen) zoomedKey = null;
  const size = (node) => (node.size = node.edge_tokens + node.children.reduce((sum, each) => sum + size(each), 0));
  tops.forEach(size);
  const weight = (list) => list.reduce((sum, each) => sum + each.size, 0);
  const focused = document.activeElement?.dataset?.key;
  const view = [];
  let rows = 0;
  const place = (list, depth, start, width) => {
    const total = weight(list);
    let at = start;
    for (const node of list.sort((a, b) => b.size - a.size)) {
      const share = (width * node.size) / total;
      if (share > 0.1) {
        view.push(box(node, key(node), depth, at, share));
        place(node.children, depth + 1, at, share);
      }
      at += share;
    }
    rows = Math.max(rows, depth + 1);
  };
  place(chosen ? [chosen] : tops, 0, 0, 100);
  $("tree").style.height = `${rows * 26}px`;
  $("tree").replaceChildren(...view);
  view.find((each) => each.dataset.key === focused)?.focus();
  $("zoom-out").hidden = !chosen;
  const most = nodes.length === MAX_NODES ? ", those with the most hits" : "";
  $("tree-info").textContent = `${count(nodes.length)} prefixes of ${count(weight(tops))} tokens${most}`;
}

function box(node, key, depth, left, width) {
  const places = [
    ...(node.holders.length ? [`in sequences ${node.holders.join(", ")}`] : []),
    ...(node.ram_tokens ? [`${count(node.ram_tokens)} in RAM`] : []),
    ...(node.disk_tokens ? [`${count(node.disk_tokens)} on disk`] : []),
  ];
  const text =
    `${count(node.edge_tokens)} tokens (${count(node.tokens)} from the start), ${count(node.hits)} hits, ${places.join(", ")}` +
    `${node.pinned ? ", in use" : ""}${node.checkpoint ? ", with a checkpoint" : ""}, ${recency(node.last_used)}`;
  const made = element("button", { type: "button", title: node.text ? `${text}\n${node.text}` : text }, count(node.edge_tokens));
  made.className = node.pinned ? "cells" : node.holders.length ? "idle" : node.ram_tokens ? "ram" : "disk";
  made.setAttribute("aria-label", text);
  made.dataset.key = key;
  Object.assign(made.style, { left: `${left}%`, width: `${width}%`, top: `${depth * 26}px` });
  made.addEventListener("click", () => {
    zoomedKey = key;
    showTree();
  });
  return made;
}

const recency = (rank) => (rank ? `used earlier than ${count(rank)} others` : "used most recently");

// Requests

function showRequests() {
  if (!isShown) return;
  const miss = $("by-miss").value;
  const id = $("by-id").value.toLowerCase();
  const rows = requests
    .filter((each) => (!miss || each.prefix_miss === miss) && (!id || each.request_id.toLowerCase().includes(id)))
    .map((each) => {
      const percent = each.prompt_tokens ? Math.round((100 * each.prefix_cache_tokens) / each.prompt_tokens) : 0;
      const cells = [
        new Date(1000 * each.time).toLocaleTimeString(),
        each.request_id,
        each.slot ?? "",
        each.prompt_tokens ?? "",
        each.prompt_tokens ? `${each.prefix_cache_tokens} (${percent}%)` : "",
        each.ttft_ms ? `${Math.round(each.ttft_ms)} ms` : "",
        each.tokens_per_second?.toFixed(1) ?? "",
        each.finish_reason,
        why(each.prefix_miss),
      ];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))));
    });
  $("requests").tBodies[0].replaceChildren(...rows);
}

export function startCache() {
  for (const [name, text] of Object.entries(WHY)) $("by-miss").append(element("option", { value: name }, `${name}: ${text}`));
  for (const name of STATES) {
    $("lane-legend").append(element("li", {}, element("span", { className: name }), name));
  }
  $("by-miss").addEventListener("change", showRequests);
  $("by-id").addEventListener("input", showRequests);
  $("zoom-out").addEventListener("click", () => {
    zoomedKey = null;
    showTree();
  });
  $("clear").addEventListener("click", () => clear(""));
  addEventListener("resize", () => requestAnimationFrame(draw));
  const restart = () => {
    stream?.abort();
    showAdvice(isShown);
    samples = [];
    if (!isShown) return;
    follow();
  };
  return {
    restart,
    show(is) {
      if (is === isShown) return;
      isShown = is;
      restart();
      if (is) showRequests();
    },
  };
}
