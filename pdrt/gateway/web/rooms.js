// One row per room in flight: what the prefill worker says of it and what the decode worker does.
import { element, short } from "./map.js";

// Both sides' views of the same room, by its name; either may be missing for a moment.
export function roomsInFlight(workers) {
  const rooms = new Map();
  const get = (name) => {
    if (!rooms.has(name)) rooms.set(name, { room: name, decode: name.split("/")[0] });
    return rooms.get(name);
  };
  for (const worker of workers) {
    for (const lease of worker.status?.leases ?? []) {
      Object.assign(get(lease.room), { lease, prefill: lease.writer, decode: worker.worker });
    }
    for (const source of worker.status?.rooms ?? []) {
      Object.assign(get(source.room), { source, prefill: worker.worker });
    }
  }
  return [...rooms.values()];
}

export function phase({ lease, source }) {
  if (lease?.state === "revoking") return lease.quarantined ? "quarantined" : "revoking";
  return source?.phase ?? "handing over";
}

function row(room) {
  const name = element("code", "", `${short(room.room)}/${room.room.split("/")[1] ?? ""}`);
  const progress = element("progress");
  const tokens = room.source?.tokens ?? 0;
  progress.max = tokens || 1;
  progress.value = room.source?.computed ?? (tokens || 1);
  progress.title = room.source ? `${room.source.computed} of ${tokens} tokens computed` : "";
  const age = room.lease?.age_seconds ?? room.source?.age_seconds ?? 0;
  const pages = room.lease?.pages ?? room.source?.pages ?? 0;
  const cells = [name, `${short(room.prefill)} → ${short(room.decode)}`, phase(room), progress,
    String(pages), `${age.toFixed(1)} s`];
  return element("tr", "", ...cells.map((cell) => element("td", "", cell)));
}

export function drawRooms(body, rooms) {
  if (rooms.length) {
    body.replaceChildren(...rooms.map(row));
    return;
  }
  const cell = element("td", "quiet", "none: nothing is being handed over just now");
  cell.colSpan = 6;
  body.replaceChildren(element("tr", "", cell));
}
