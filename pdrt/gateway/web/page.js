// The page at /: polls /status and draws what it says. Nothing is kept between polls.
import { api, needsKey, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { bucketsOf, drawHistogram } from "./histograms.js";
import { drawMap, legend } from "./map.js";
import { roomsInFlight, drawRooms } from "./rooms.js";

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 10000; // a tab nobody looks at should not wake every worker each second
const byId = (id) => document.getElementById(id);

function drawReady(status) {
  const badge = byId("ready");
  badge.textContent = status.ready ? "ready" : "not ready";
  badge.className = `badge ${status.ready ? "good" : "bad"}`;
  const { model, version } = status.gateway;
  byId("model").textContent = `${model} · gateway ${version}`;
  document.title = status.ready ? "pdrt" : "pdrt: not ready";
  drawReasons(status.reasons);
}

function drawReasons(reasons) {
  byId("reasons").replaceChildren(...reasons.map((reason) => {
    const item = document.createElement("li");
    item.textContent = reason;
    return item;
  }));
}

function drawUnreachable(error) {
  const badge = byId("ready");
  byId("key").hidden = !needsKey(error);
  badge.textContent = needsKey(error) ? "API key needed" : "not reachable";
  badge.className = "badge bad";
  drawReasons(needsKey(error) ? [] : [error.message]);
}

async function poll() {
  try {
    const status = await api("status");
    byId("key").hidden = true;
    drawReady(status);
    const rooms = roomsInFlight(status.workers);
    drawMap(byId("map"), status.workers, rooms);
    drawRooms(byId("rooms"), rooms);
    for (const name of ["ttft", "itl"]) {
      const buckets = bucketsOf(status.gateway.totals.histograms[`${name}_seconds`]);
      drawHistogram(byId(name), byId(`${name}-figures`), buckets);
    }
  } catch (error) {
    drawUnreachable(error);
  }
  setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(new FormData(event.target).get("key"));
});
byId("legend").replaceChildren(...legend());
startChat(byId("messages"), byId("ask"));
poll();
