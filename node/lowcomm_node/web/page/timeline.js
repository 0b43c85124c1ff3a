// Exchanges as bars over time, one lane a fragment: captured, sent, received, merged.

import { clean, seconds, size } from "./formatting.js";

const SPACE = "http://www.w3.org/2000/svg";
const LANE = 18;
const MARGIN = 78;
const MARKS = 20;
const PARTS = [
  ["captured", "capturing"],
  ["sent", "sending"],
  ["received", "receiving"],
];

const LAST = { applied: "merging", "no-partner": "alone" };

export function shape(kind, attributes, content = "") {
  const one = document.createElementNS(SPACE, kind);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.textContent = content;
  return one;
}

// What came one after the other: each part ends at its moment, and the rest is the merge.
function parts(one) {
  const told = PARTS.filter(([name]) => name in one.moments).map(([name, kind]) => [
    one.moments[name],
    kind,
  ]);
  told.sort(([a], [b]) => a - b);
  const ends = [...told, [one.seconds, LAST[one.outcome] ?? "unfinished"]];
  return ends.map(([end, kind], place) => [place ? ends[place - 1][0] : 0, end, kind]);
}

function words(one) {
  const when = new Date(1000 * one.time).toLocaleTimeString();
  const told = [`${when}: fragment ${one.fragment}, ${one.outcome}, took ${seconds(one.seconds)}`];
  for (const [name] of PARTS) {
    if (name in one.moments) told.push(`${name} after ${seconds(one.moments[name])}`);
  }
  told.push(`${size(one.bytes_sent)} sent, ${size(one.bytes_received)} received`);
  if (one.reason) told.push(clean(one.reason));
  return told.join("\n");
}

function bar(one, along, top) {
  const group = shape("g", { class: `exchange ${one.outcome}` });
  const began = one.time - one.seconds;
  for (const [from, to, kind] of parts(one)) {
    const [left, right] = [along(began + from), along(began + to)];
    const width = Math.max(1.5, right - left);
    group.append(shape("rect", { class: kind, x: left, y: top + 3, width, height: LANE - 6 }));
  }
  if (one.outcome === "failed") {
    const [x, y] = [along(one.time), top + LANE / 2];
    group.append(shape("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }));
  }
  group.append(shape("title", {}, words(one)));
  return group;
}

// Draw those of the last so many seconds; `now` in Unix seconds.
export function drawTimeline(box, exchanges, span, now) {
  const from = now - span;
  const shown = exchanges.filter((one) => one.time > from);
  const lanes = [...new Set(shown.map((one) => one.fragment))].sort((a, b) => a - b);
  const width = Math.max(240, box.clientWidth);
  const height = Math.max(1, lanes.length) * LANE + MARKS;
  const along = (time) => MARGIN + Math.max(0, ((time - from) / span) * (width - MARGIN - 6));
  const failed = shown.filter((one) => one.outcome === "failed").length;
  const picture = shape("svg", {
    width,
    height,
    role: "img",
    "aria-label": `${shown.length} exchanges in the last ${seconds(span)}, ${failed} failed`,
  });
  lanes.forEach((fragment, lane) => {
    const top = lane * LANE;
    const place = { class: "lane", x: 0, y: top + LANE - 5 };
    picture.append(shape("text", place, `fragment ${fragment}`));
    for (const one of shown) {
      if (one.fragment === fragment) picture.append(bar(one, along, top));
    }
  });
  for (const part of [0, 0.5, 1]) {
    const x = along(from + part * span);
    const anchor = ["start", "middle", "end"][2 * part];
    const place = { class: "mark", x, y: height - 4, "text-anchor": anchor };
    const text = part === 1 ? "now" : `${seconds(span * (1 - part))} ago`;
    picture.append(shape("text", place, text));
  }
  box.replaceChildren(picture);
  box.dataset.shown = shown.length;
}
