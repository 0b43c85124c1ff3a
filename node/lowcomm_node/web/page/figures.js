// All figures of `status`, by group: label, path, format.

import { clean, FORMATS } from "./formatting.js";

const GROUPS = {
  Training: [
    ["swarm step", "trainer.swarm_step", "count"],
    ["of", "trainer.total_steps", "count"],
    ["own steps", "trainer.steps", "count"],
    ["time left", "trainer.remaining", "span"],
    ["training loss", "trainer.loss", "loss"],
    ["held-out loss", "trainer.val_loss_last", "loss"],
    ["held-out loss, median of peers (unverified)", "claims.val_loss", "loss"],
    ["peers in that median", "claims.told_by", "count"],
    ["learning rate", "trainer.learning_rate", "small"],
    ["parameters", "trainer.parameters", "quantity"],
    ["checkpoint at step", "checkpoint.step", "count"],
  ],
  Exchanges: [
    ["applied", "exchanges.completed", "count"],
    ["without a partner", "exchanges.no_partner", "count"],
    ["failed", "exchanges.failed", "count"],
    ["unconfirmed", "exchanges.in_doubt", "count"],
    ["resynced", "exchanges.realigned", "count"],
    ["refused offers", "exchanges.refused", "count"],
    ["silent peers", "silent_peers", "count"],
  ],
  Network: [
    ["sent", "bytes_sent", "size"],
    ["received", "bytes_received", "size"],
    ["sending", "limits.up", "rate"],
    ["receiving", "limits.down", "rate"],
    ["peers in the DHT", "dht_peers", "count"],
  ],
  Machine: [
    ["device", "trainer.device", "clean"],
    ["memory", "trainer.memory.taken", "size"],
    ["memory at most", "trainer.memory.most", "size"],
    ["up for", "uptime", "seconds"],
  ],
};

// Build the groups once; `fill` keeps them up to date.
export function buildFigures(box) {
  for (const [title, rows] of Object.entries(GROUPS)) {
    const [head, list] = ["h2", "dl"].map((kind) => document.createElement(kind));
    head.textContent = title;
    list.className = "figures";
    list.append(...rows.map((row) => lineOf(...row)));
    box.append(head, list);
  }
}

function lineOf(label, path, format) {
  const [line, name, value] = ["div", "dt", "dd"].map((kind) => document.createElement(kind));
  name.textContent = label;
  value.dataset.figure = path;
  value.dataset.format = format;
  line.append(name, value);
  return line;
}

// Fill every element that names a figure of `status`, and keep its value beside the text.
export function fill(status) {
  const last = document.querySelector('[data-figure="trainer.device"]').parentElement;
  for (const [number, one] of status.trainer.accelerators.entries()) {
    const path = `trainer.accelerators.${number}`;
    if (!document.querySelector(`[data-figure="${path}"]`)) {
      last.parentElement.append(lineOf(clean(one.device), path, "accelerator"));
    }
  }
  for (const element of document.querySelectorAll("[data-figure][data-format]")) {
    const path = element.dataset.figure.split(".");
    const value = path.reduce((found, name) => found?.[name], status) ?? null;
    element.dataset.value = JSON.stringify(value);
    const text = FORMATS[element.dataset.format](value);
    if (element.textContent !== text) element.textContent = text;
  }
}
