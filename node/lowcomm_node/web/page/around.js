// The swarm as dots on a ring: this node and its peers, by what they claim; a line flashes when two
// exchange. The table beside it says the same.

import { clean, quantity, shortPeer } from "./formatting.js";
import { shape } from "./timeline.js";

const SIZE = 320;
const MIDDLE = SIZE / 2;
const RING = 105;
const SHOWN = 60;
const NAMED = 24; // more names would lie over each other
const FLASH = 1200; // milliseconds
const places = new Map();
let picture = null;

export function nameOf(peer) {
  return clean(peer.name || shortPeer(peer.peer_id)).slice(0, 16);
}

function kind(peer) {
  if (peer.own) return "own";
  if (!peer.route) return "unreached";
  return peer.route.split(" ")[0] === "relay" ? "relayed" : "reached";
}

// `own`: this node, as a peer; null for a page that belongs to none.
export function drawAround(box, own, peers) {
  const all = [...(own ? [{ ...own, own: true }] : []), ...peers].slice(0, SHOWN);
  all.sort((a, b) => (a.peer_id < b.peer_id ? -1 : 1));
  const most = Math.max(1, ...all.map((one) => one.tokens ?? 0));
  const words = `${all.length} peers; the table beside lists them`;
  const look = JSON.stringify(all.map((one) => [one.peer_id, nameOf(one), kind(one), one.tokens]));
  if (box.dataset.look === look) return;
  box.dataset.look = look;
  picture = shape("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": words });
  picture.append(shape("circle", { class: "ring", cx: MIDDLE, cy: MIDDLE, r: RING }));
  places.clear();
  all.forEach((peer, place) => {
    const turn = (2 * Math.PI * place) / all.length - Math.PI / 2;
    const [across, down] = [Math.cos(turn), Math.sin(turn)];
    const [cx, cy] = [MIDDLE + RING * across, MIDDLE + RING * down];
    places.set(peer.peer_id, [cx, cy]);
    const r = 5 + 9 * Math.sqrt((peer.tokens ?? 0) / most);
    const dot = shape("circle", { class: `peer ${kind(peer)}`, cx, cy, r });
    dot.dataset.peer = peer.peer_id;
    const told = `${nameOf(peer)}: ${quantity(peer.tokens)} tokens`;
    dot.append(shape("title", {}, told));
    picture.append(dot);
    if (all.length > NAMED) return;
    const anchor = Math.abs(across) < 0.3 ? "middle" : across < 0 ? "end" : "start";
    const [x, y] = [MIDDLE + (RING + 18) * across, MIDDLE + (RING + 18) * down + 4];
    const name = peer.own ? "you" : nameOf(peer).slice(0, 8);
    picture.append(shape("text", { x, y, "text-anchor": anchor }, name));
  });
  box.replaceChildren(picture);
  box.dataset.shown = all.length;
}

// Show that these have exchanged with somebody.
export function pulse(box, peers) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const dot of box.querySelectorAll("[data-peer]")) {
    if (peers.includes(dot.dataset.peer)) dot.animate([{ opacity: 0.2 }, { opacity: 1 }], FLASH);
  }
}

// Show that these have exchanged just now.
export function flash(peers) {
  if (picture === null || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const known = peers.map((peer) => places.get(peer)).filter(Boolean);
  for (const [place, [x1, y1]] of known.entries()) {
    for (const [x2, y2] of known.slice(place + 1)) {
      const line = shape("line", { class: "flash", x1, y1, x2, y2 });
      picture.append(line);
      const fading = line.animate([{ opacity: 1 }, { opacity: 0 }], FLASH);
      fading.onfinish = () => line.remove();
    }
  }
  picture.parentNode.dataset.flashes = Number(picture.parentNode.dataset.flashes ?? 0) + 1;
}
