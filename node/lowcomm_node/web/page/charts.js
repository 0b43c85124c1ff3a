// Lines over steps, tokens or time: `samples` are rows as /api/v1/samples has them.

import { MISSING, loss, quantity } from "./formatting.js";
import { shape } from "./timeline.js";

const charts = {};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function points(samples, against, lines) {
  const known = samples.filter((one) => one[against] !== null);
  const rising = [];
  for (const one of known) {
    if (!rising.length || one[against] > rising.at(-1)[against]) rising.push(one);
  }
  const names = [against, ...lines.map(([name]) => name)];
  return names.map((name) => rising.map((one, place) => valueAt(name, one, rising[place - 1])));
}

// A held-out loss stands until the next evaluation: it is drawn where it was measured.
function valueAt(name, one, before) {
  return name === "val_loss" && before?.val_loss === one.val_loss ? null : one[name];
}

function shownMark(mark) {
  return mark >= 1000 ? quantity(mark) : String(mark);
}

function shownValue(_, value) {
  if (value === null) return MISSING;
  return value >= 1000 ? quantity(value) : loss(value);
}

const ALONG = { swarm_step: "swarm step", tokens: "tokens of this node", time: "" };

// `lines`: name in the samples, label, colour, and how it is drawn: thin, strong or points.
function chartOptions(box, against, lines, { up, end }) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 } };
  const series = lines.map(([, label, tint, drawn]) => {
    const points = drawn === "points";
    return {
      label,
      stroke: colour(tint),
      width: drawn === "strong" ? 3 : 1.5,
      spanGaps: true,
      value: shownValue,
      ...(points ? { paths: () => null, points: { show: true, size: 5, fill: colour(tint) } } : {}),
    };
  });
  const range = (_, low, high) => [low, Math.max(high, end ?? high)];
  return {
    width: box.clientWidth,
    height: Math.max(200, box.clientHeight - 32),
    scales: { x: { time: against === "time", ...(end ? { range } : {}) } },
    axes: [
      {
        ...axis,
        label: ALONG[against],
        labelSize: ALONG[against] ? 18 : 0,
        labelFont: "12px system-ui",
        ...(against === "time" ? {} : { size: 32 }),
        ...(against === "tokens" ? { values: (_, marks) => marks.map(quantity) } : {}),
      },
      {
        ...axis,
        label: up,
        labelSize: 18,
        labelFont: "12px system-ui",
        size: 52,
        values: (_, marks) => marks.map(shownMark),
      },
    ],
    series: [{ label: against === "swarm_step" ? "step" : against }, ...series],
  };
}

// Draw into a box; `more`: title of the upper axis, and where the lower one ends.
export function draw(box, samples, against, lines, more) {
  if (!box.clientWidth) return; // it is folded
  const data = points(samples, against, lines);
  box.dataset.points = data[0].length;
  const look = `${against} ${colour("--ink")} ${box.clientWidth} ${more.end}`;
  const known = charts[box.id];
  if (known?.look === look) {
    known.chart.setData(data);
    return;
  }
  known?.chart.destroy();
  const chart = new uPlot(chartOptions(box, against, lines, more), data, box);
  charts[box.id] = { look, chart };
}

const SPARK = [120, 28];

// A small curve of one figure, without axes.
export function spark(box, values) {
  const known = values.filter((one) => one !== null && one !== undefined);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [width, height] = SPARK;
  const place = (one, at) => {
    const x = (at / Math.max(1, known.length - 1)) * width;
    const y = height - 2 - ((one - low) / (high - low || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  };
  const points = known.length > 1 ? known.map(place).join(" ") : "";
  if (box.dataset.drawn === points) return;
  box.dataset.drawn = points;
  const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  picture.append(shape("polyline", { points }));
  box.replaceChildren(picture);
}
