// The first screen: one word and its reason, how far the run is, and what must come before it.

import { clean, clock, loss, quantity, share, size, span } from "./formatting.js";

const BUSY = ["starting", "joining", "syncing", "restarting"];
const GAP = 900; // seconds between two samples beyond which the node did not run

// Kind of sign, and its word.
export function signOf(now) {
  if (now.phase === "paused") {
    const until = now.pause?.until;
    return ["paused", until ? `Paused until ${clock(until)}` : "Paused"];
  }
  if (now.phase === "training") return ["training", "Training"];
  if (now.phase === "serving") return ["training", "Serving text"];
  if (BUSY.includes(now.phase)) return ["waiting", "Waiting"];
  const words = { finishing: "Finishing", finished: "Finished", left: "Stopped" };
  return ["finished", words[now.phase] ?? clean(now.phase)];
}

function peersOf(now) {
  if (!now.shards) return `${now.peers} other ${now.peers === 1 ? "peer" : "peers"}`;
  return `about ${now.swarm_peers.toLocaleString("en")} other peers (from ${now.shards} shards)`;
}

export function reasonOf(now) {
  const text = clean(now.waiting ?? "");
  if (text) return text[0].toUpperCase() + text.slice(1);
  if (now.phase !== "training") return "";
  const ago = now.exchanges.since_applied;
  const last = ago === null ? "no exchange yet" : `the last exchange was ${span(ago)} ago`;
  return `With ${peersOf(now)}; ${last}`;
}

export function doneOf(trainer) {
  const { swarm_step: step, total_steps: steps } = trainer;
  if (!steps) return "no run yet";
  const far = (step ?? 0).toLocaleString("en");
  return `step ${far} of ${steps.toLocaleString("en")} · ${share((step ?? 0) / steps)}`;
}

export function leftOf(now) {
  const left = now.trainer.remaining;
  return now.phase === "training" && left !== null ? `${span(left)} left` : "";
}

// Counts begin anew with each start of the node.
export function sum(samples, name) {
  let total = 0;
  samples.forEach((one, place) => {
    const before = place ? samples[place - 1][name] : one[name];
    total += one[name] >= before ? one[name] - before : one[name];
  });
  return total;
}

export function gaveOf(samples) {
  let seconds = 0;
  samples.slice(1).forEach((one, place) => {
    const passed = one.time - samples[place].time;
    if (one.phase === "training" && passed < GAP) seconds += passed;
  });
  return `${span(seconds)}, ${size(sum(samples, "bytes_sent"))} sent`;
}

// What the swarm learned, and what this node gave for it.
export function learnedOf(now, samples) {
  const { val_loss_first: first, val_loss_last: last, tokens, steps } = now.trainer;
  const began = samples.find((one) => one.val_loss !== null)?.val_loss ?? first;
  const fell = last === null ? "" : `The held-out loss fell from ${loss(began)} to ${loss(last)}. `;
  const gave = `${quantity(tokens)} tokens in ${(steps ?? 0).toLocaleString("en")} steps`;
  return `${fell}You gave ${gave}, ${gaveOf(samples)}.`;
}

export function metOf(counts) {
  const told = [`${counts.completed} exchanges`];
  if (counts.failed) told.push(`${counts.failed} failed`);
  return told.join(", ");
}

export function countsOf(counts) {
  const words = [
    [counts.completed, "applied"],
    [counts.no_partner, "without a partner"],
    [counts.failed, "failed"],
    [counts.in_doubt, "unconfirmed"],
    [counts.realigned, "resynced"],
  ];
  return words
    .filter(([count]) => count)
    .map(([count, word]) => `${count} ${word}`)
    .join(", ");
}

// How far all peers have read the text, over all its parts.
export function readOf(parts) {
  const tokens = parts.reduce((sum, part) => sum + part.tokens, 0);
  const read = (part) => part.tokens * (part.epoch + part.pieces_read / part.pieces);
  const epochs = parts.reduce((sum, part) => sum + read(part), 0) / tokens;
  return tokens ? `${epochs.toFixed(2)} epochs read by all` : "";
}

export function deviceOf(trainer) {
  const names = trainer.device === null ? [""] : clean(trainer.device).split(",");
  const several = names.length > 1 ? ` x ${names.length}` : "";
  const kind = names[0].split(":")[0].toUpperCase() + several;
  const size = trainer.parameters === null ? "" : `${quantity(trainer.parameters)} parameters`;
  const duty = (trainer.duty ?? 1) < 1 ? `at ${share(trainer.duty)} duty` : "";
  const lenders = (trainer.lenders ?? []).map(
    (one) => (one.away ? `${clean(one.name)} is away` : `with ${clean(one.name)}`),
  );
  return [[kind, duty].filter(Boolean).join(" "), size, ...lenders].filter(Boolean).join(", ");
}

// What comes before the first step: name, whether it is done, and more about it.
function steps(now) {
  const { trainer, phase } = now;
  const text = trainer.tokenizing;
  const later = ["syncing", "training", "finishing", "finished"].includes(phase);
  const percent = text && text.total ? share(text.done / text.total) : "";
  return [
    ["the swarm", now.swarm?.state === "connected" || now.run !== null, ""],
    ["the run", now.run !== null, now.run ? clean(now.run.name) : ""],
    ["the text", trainer.device !== null || (text && text.done >= text.total), percent],
    ["the trainer", trainer.device !== null, ""],
    ["the state of the swarm", later && phase !== "syncing", ""],
    ["the first step", (trainer.steps ?? 0) > 0 && phase === "training", ""],
  ];
}

const reached = new Map(); // when each was first seen done, in seconds since the node started

export function isStarting(now) {
  return BUSY.includes(now.phase);
}

export function showChecklist(list, now) {
  const all = steps(now);
  const first = all.findIndex(([, done]) => !done);
  const lines = all.map(([name, done, more], place) => {
    // A page that is opened later does not know when.
    if (done && !reached.has(name)) reached.set(name, list.dataset.seen ? now.uptime : null);
    const line = document.createElement("li");
    line.className = done ? "done" : place === first ? "doing" : "";
    const when = done ? reached.get(name) : null;
    const told = [more, when === null ? "" : `after ${span(when)}`].filter(Boolean).join(", ");
    line.textContent = told ? `${name}: ${told}` : name;
    return line;
  });
  list.dataset.seen = "yes";
  list.replaceChildren(...lines);
}
