// Lines over steps, tokens or time: `samples` are rows as /api/v1/samples has them.

import { MISSING, loss, quantity } from "./formatting.js";

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

function chartOptions(width, against, lines) {
  const line = colour("--line");
  const axis = { stroke: colour("--quiet"), grid: { stroke: line, width: 1 } };
  const along = against === "tokens" ? { values: (_, marks) => marks.map(quantity) } : {};
  const up = { size: 60, values: (_, marks) => marks.map(shownMark) };
  const series = lines.map(([, label, tint]) => {
    return { label, stroke: colour(tint), width: 2, spanGaps: true, value: shownValue };
  });
  return {
    width,
    height: 200,
    scales: { x: { time: against === "time" } },
    axes: [
      { ...axis, ...along },
      { ...axis, ...up },
    ],
    series: [{ label: against === "swarm_step" ? "step" : against }, ...series],
  };
}

// Draw into a box; `lines`: name in the samples, label, colour.
export function draw(box, samples, against, lines) {
  const data = points(samples, against, lines);
  box.dataset.points = data[0].length;
  const look = `${against} ${colour("--ink")} ${box.clientWidth}`;
  const known = charts[box.id];
  if (known?.look === look) {
    known.chart.setData(data);
    return;
  }
  known?.chart.destroy();
  const chart = new uPlot(chartOptions(box.clientWidth, against, lines), data, box);
  charts[box.id] = { look, chart };
}
