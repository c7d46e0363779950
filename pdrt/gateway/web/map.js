// Prefill workers left, decode workers right, a line for every pair; pages as bars by owner.
const OWNERS = ["sequence", "lease", "room", "cache", "quarantined", "free"];
const MEANING = {
  sequence: "sequence (decoding)",
  lease: "lease (being written by a prefill worker)",
  room: "room (being computed and sent)",
  cache: "prefix cache",
  quarantined: "quarantined (its writer has not drained)",
  free: "free",
};
const SVG = "http://www.w3.org/2000/svg";

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export const short = (worker) => (worker ?? "").slice(0, 8);

export function legend() {
  return OWNERS.map((owner) => {
    const swatch = element("i");
    swatch.style.background = `var(--${owner})`;
    return element("li", "", swatch, MEANING[owner]);
  });
}

// Quarantined pages are leases' pages: shown apart, not twice.
function pagesByOwner(status) {
  const pages = { ...status.pages };
  const quarantined = status.quarantined_pages ?? 0;
  if (quarantined) pages.lease -= quarantined;
  return { ...pages, quarantined };
}

function pagesBar(status) {
  const bar = element("div", "pages");
  const pages = pagesByOwner(status);
  for (const owner of OWNERS) {
    const part = element("i");
    part.dataset.owner = owner;
    part.style.background = `var(--${owner})`;
    part.style.flexGrow = pages[owner] ?? 0;
    part.title = `${MEANING[owner]}: ${pages[owner] ?? 0}`;
    bar.append(part);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", OWNERS.map((o) => `${o} ${pages[o] ?? 0}`).join(", "));
  return bar;
}

function card(worker) {
  const { status, state } = worker;
  const isGood = state === "live" && worker.healthy;
  const mood = element("span", isGood ? "good" : "bad", worker.healthy ? state : "not healthy");
  const name = element("code", "", short(worker.worker));
  name.title = worker.worker;
  const made = element("div", `worker ${state}`, element("div", "top", name, mood));
  made.dataset.worker = worker.worker;
  if (status) {
    const cached = status.pages.cache ?? 0;
    const used = status.pages_total - (status.pages.free ?? 0) - cached;
    made.append(pagesBar(status));
    made.append(element("div", "facts",
      `${status.running} running · ${status.queued} queued · pages: ${used} in use, ${cached} cached, `
      + `${status.pages_total} in all`));
  }
  for (const reason of worker.reasons) made.append(element("div", "facts bad", reason));
  return made;
}

// Lines are drawn between what is on the screen, so after the cards are.
function drawLines(map, workers, rooms) {
  const lines = document.createElementNS(SVG, "svg");
  lines.setAttribute("aria-hidden", "true");
  const at = map.getBoundingClientRect();
  const place = (worker) => map.querySelector(`[data-worker="${worker}"]`)?.getBoundingClientRect();
  const byEndpoint = new Map(workers.filter((w) => w.endpoint).map((w) => [w.endpoint, w.worker]));
  const busy = new Set(rooms.map((room) => `${room.prefill} ${room.decode}`));
  for (const decode of workers.filter((w) => w.role === "decode" && w.state !== "lost")) {
    for (const prefill of decode.paired.map((endpoint) => byEndpoint.get(endpoint))) {
      const from = place(prefill);
      const to = place(decode.worker);
      if (!from || !to || from.right > to.left) continue; // stacked on a narrow screen
      const [x1, y1] = [from.right - at.left, from.top + from.height / 2 - at.top];
      const [x2, y2] = [to.left - at.left, to.top + to.height / 2 - at.top];
      const bend = (x1 + x2) / 2;
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", `M${x1} ${y1} C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`);
      path.dataset.pair = `${prefill} ${decode.worker}`;
      if (busy.has(path.dataset.pair)) path.classList.add("busy");
      lines.append(path);
    }
  }
  map.prepend(lines);
}

export function drawMap(map, workers, rooms) {
  const column = (role, title) => {
    const cards = workers.filter((worker) => worker.role === role).map(card);
    if (!cards.length) cards.push(element("div", "worker facts bad", `no ${role} worker`));
    return element("div", "role", element("h3", "", title), ...cards);
  };
  map.replaceChildren(column("prefill", "prefill"), column("decode", "decode"));
  drawLines(map, workers, rooms);
}
