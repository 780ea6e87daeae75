// How a prompt was reused, as a bar with a line of text.

import { element } from "./page.js";

export const TIERS = [
  ["cells", "KV pool"],
  ["ram", "RAM"],
  ["disk", "disk"],
  ["remote", "remote"],
  ["computed", "computed"],
];

/** Sentences for the values of `cache.miss`. */
export const WHY = {
  cold: "the rest had not been computed before",
  diverged: "the text departs from what was cached",
  changed: "an earlier reply of the conversation was changed",
  evicted: "it was cached, but has been evicted",
  salted: "nothing was cached in this namespace",
  off: "cache_prompt is off",
  unsupported: "prefixes of this model are not reused",
  no_checkpoint: "no checkpoint was left at that place",
  self_test_pending: "the self-test of reuse has not run yet",
  self_test_failed: "the self-test of reuse has failed",
};

export const why = (miss) => (miss ? (WHY[miss] ?? miss.replaceAll("_", " ")) : "");

export function reuseBar(cache, timings) {
  const total = TIERS.reduce((sum, [name]) => sum + (cache[name] ?? 0), 0);
  const bar = element("div", { className: "reuse", role: "img" });
  const words = [];
  for (const [name, label] of TIERS) {
    const n = cache[name] ?? 0;
    if (!n) continue;
    const part = element("span", { className: name, title: `${n} tokens: ${label}` });
    part.style.flexGrow = n;
    bar.append(part);
    words.push(`${n.toLocaleString("en")} ${label}`);
  }
  bar.setAttribute("aria-label", `Prompt of ${total} tokens: ${words.join(", ")}`);
  const line = [`${total.toLocaleString("en")} prompt tokens: ${words.join(", ")}`];
  if (timings.ttft_ms !== undefined) line.push(`TTFT ${Math.round(timings.ttft_ms)} ms`);
  if (timings.predicted_per_second) line.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings.draft_n) line.push(`${timings.draft_n_accepted} of ${timings.draft_n} drafted tokens accepted`);
  const note = element("p", { className: "note" }, line.join(" · "));
  if (cache.miss) {
    const place = (cache.diverged_at ?? -1) >= 0 ? ` (from character ${cache.diverged_at.toLocaleString("en")} on)` : "";
    note.append(" · ", element("span", { className: "why" }, `no more was reused: ${why(cache.miss)}${place}`));
  }
  return element("div", { className: "stats" }, bar, note);
}
