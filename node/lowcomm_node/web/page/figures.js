// All figures of `status`, by group: label, path, format.

import { FORMATS } from "./formatting.js";

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
    ["name", "trainer.accelerator.name", "clean"],
    ["load", "trainer.accelerator.load", "share"],
    ["GPU memory in use", "trainer.accelerator.memory_taken", "size"],
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
    for (const [label, path, format] of rows) {
      const [line, name, value] = ["div", "dt", "dd"].map((kind) => document.createElement(kind));
      name.textContent = label;
      value.dataset.figure = path;
      value.dataset.format = format;
      line.append(name, value);
      list.append(line);
    }
    box.append(head, list);
  }
}

// Fill every element that names a figure of `status`, and keep its value beside the text.
export function fill(status) {
  for (const element of document.querySelectorAll("[data-figure][data-format]")) {
    const path = element.dataset.figure.split(".");
    const value = path.reduce((found, name) => found?.[name], status) ?? null;
    element.dataset.value = JSON.stringify(value);
    const text = FORMATS[element.dataset.format](value);
    if (element.textContent !== text) element.textContent = text;
  }
}
