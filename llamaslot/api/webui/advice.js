// Advice: what made prompts be computed again, and what other sizes of the tiers would bring. Fed by /cache/advice.

import { $, ask, count, element } from "./page.js";

const EVERY_MS = 10_000;
const GIB = 2 ** 30;

const percent = (rate) => `${(100 * rate).toFixed(1)}%`;

let isShown = false;
let timer = null;

async function read() {
  try {
    const advice = await (await ask("cache/advice")).json();
    showClients(advice.clients);
    showSizes(advice);
  } catch (error) {
    $("advice-info").textContent = error.message;
  }
  // Another call may have set it meanwhile.
  clearTimeout(timer);
  if (isShown) timer = setTimeout(read, EVERY_MS);
}

function showClients(clients) {
  $("advice-info").textContent = clients.length ? "" : "No prompt has been computed again that could have been reused.";
  const open = new Set([...$("advice").querySelectorAll("details[open]")].map((each) => each.dataset.key));
  const items = clients.flatMap((client) => client.places.map((place) => placeView(client, place, open)));
  $("advice").replaceChildren(...items);
}

function placeView(client, place, open) {
  const key = `${client.client}/${place.culprit}/${place.role}`;
  const where = [
    ...(place.where ? [place.where] : []),
    ...(place.offset >= 0 ? [`at character ${count(place.offset)}`] : []),
  ].join(", ");
  const head = element(
    "summary",
    {},
    element("strong", {}, place.meaning),
    ` ${where}: ${count(place.tokens)} tokens computed again in ${count(place.requests)} requests`,
  );
  const view = element("details", { open: open.has(key) }, head, element("p", {}, place.fix));
  view.dataset.key = key;
  if (place.old !== undefined) {
    const texts = [["Before it", place.before], ["Earlier prompt", place.old], ["Latest prompt", place.new]];
    for (const [name, text] of texts) view.append(element("h3", {}, name), element("pre", { tabIndex: 0 }, text));
  }
  const asked = `${count(client.computed_tokens)} of ${count(client.prompt_tokens)} prompt tokens computed`;
  view.append(element("p", { className: "note" }, `Client ${client.client}: ${asked}; latest request ${place.last_request_id}`));
  return view;
}

function showSizes({ hit_rate, ram, disk }) {
  const rows = [["RAM", ram], ["Disk", disk]].flatMap(([name, sizes]) =>
    sizes.map((each) => {
      const size = `${(each.bytes / GIB).toLocaleString("en", { maximumFractionDigits: 1 })} GiB`;
      const cells = [name, each.is_current ? `${size} (now)` : size, percent(each.hit_rate)];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
    }),
  );
  $("sizes").hidden = !rows.length;
  $("sizes").tBodies[0].replaceChildren(...rows);
  $("hit-rate").textContent = `${percent(hit_rate)} of all prompt tokens were reused since the start.`;
}

/** Ask for advice while the view of the cache is shown. */
export function showAdvice(is) {
  isShown = is;
  clearTimeout(timer);
  if (is) read();
}
