// The peers around this node: the longer the round trip, the further out. Only what they tell.

import { clean, milliseconds, shortPeer } from "./formatting.js";
import { shape } from "./timeline.js";

const SIZE = 260;
const NEAR = 0.001; // seconds: in the innermost ring
const RINGS = [0.001, 0.01, 0.1, 1];
const SHOWN = 100;

function radius(roundTrip) {
  const rings = Math.log10(Math.max(NEAR, Math.min(1, roundTrip)) / NEAR);
  return 25 + (rings / 3) * (SIZE / 2 - 45);
}

function kind(peer) {
  if (!peer.route) return "unreached";
  return peer.route.split(" ")[0] === "relay" ? "relayed" : "reached";
}

// The same place for a peer at every look.
function angle(peer) {
  let mixed = 7;
  for (const letter of peer.peer_id) mixed = (31 * mixed + letter.codePointAt(0)) % 9973;
  return 2 * Math.PI * ((0.618034 * mixed) % 1);
}

export function drawAround(box, peers) {
  const shown = peers.slice(0, SHOWN);
  const counts = ["reached", "relayed", "unreached"].map(
    (name) => shown.filter((one) => kind(one) === name).length,
  );
  const [reached, relayed, unreached] = counts;
  const words =
    `${peers.length} peers: ${reached} reached, ${relayed} through relays, ` +
    `${unreached} without a route yet`;
  const picture = shape("svg", { width: SIZE, height: SIZE, role: "img", "aria-label": words });
  const middle = SIZE / 2;
  for (const ring of RINGS) {
    picture.append(shape("circle", { class: "ring", cx: middle, cy: middle, r: radius(ring) }));
    const place = { class: "mark", x: middle + 3, y: middle - radius(ring) - 2 };
    picture.append(shape("text", place, milliseconds(ring)));
  }
  picture.append(shape("circle", { class: "own", cx: middle, cy: middle, r: 6 }));
  for (const peer of shown) {
    const [far, turn] = [radius(peer.round_trip ?? 1), angle(peer)];
    const place = { cx: middle + far * Math.cos(turn), cy: middle + far * Math.sin(turn), r: 5 };
    const dot = shape("circle", { class: `peer ${kind(peer)}`, ...place });
    const route = peer.route ?? peer.route_reason ?? "no route yet";
    dot.append(
      shape(
        "title",
        {},
        `${shortPeer(peer.peer_id)}: ${clean(route)}, ${milliseconds(peer.round_trip)}`,
      ),
    );
    picture.append(dot);
  }
  box.replaceChildren(picture);
  box.dataset.shown = shown.length;
}
