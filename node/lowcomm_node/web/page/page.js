// The page of a node. Everything on it comes from the API, and enters it as text, never as markup.

import { NotLetIn, Refused, call, enter, follow } from "./api.js";
import { drawAround } from "./around.js";
import { draw } from "./charts.js";
import { clean, rate, share, shortPeer, size } from "./formatting.js";
import {
  fill,
  showExchanges,
  showFragments,
  showPeers,
  showRemedy,
  showShares,
  showWarnings,
} from "./tables.js";
import { drawTimeline } from "./timeline.js";

const MOST_SAMPLES = 1000;
const MOST_EXCHANGES = 500;
const LISTED = 50;
const BREAK = 25; // seconds between two samples, of which one comes every ten
const $ = (id) => document.getElementById(id);
let status = null;
let peers = [];
let samples = [];
let exchanges = [];
let catalogue = {}; // what each code means, and what to do
let hasEnded = false; // in order, as the node said itself

function text(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

// What all-reduce of fp32 gradients would have sent in a ring, at every step of this node. Steps
// and bytes are both those of the samples.
function showSaved(now) {
  const peers = now.peers + 1;
  const told = samples.filter((one) => one.steps !== null);
  const steps = told.length ? told.at(-1).steps - told[0].steps : 0;
  const inRing = 2 * 4 * (now.trainer.parameters ?? 0) * steps * ((peers - 1) / peers);
  const sent = sum(told, "bytes_sent");
  const times = (inRing / sent).toFixed(0);
  const words =
    `${size(sent)} sent in ${steps} steps; all-reduce at every step would have sent ` +
    `${size(inRing)}, ${times} times as much`;
  text($("saved"), inRing > 0 && sent ? words : "");
}

// Counts begin anew with each start of the node.
function sum(list, name) {
  let total = 0;
  list.forEach((one, place) => {
    const before = place ? list[place - 1][name] : one[name];
    total += one[name] >= before ? one[name] - before : one[name];
  });
  return total;
}

// How much of the time shown the node did not train, and why, most of it first.
function showIdle() {
  const spent = new Map();
  let all = 0;
  samples.slice(1).forEach((one, place) => {
    const seconds = one.time - samples[place].time;
    all += seconds;
    if (one.phase === "training") return;
    const why = clean(one.waiting ? `${one.phase}, ${one.waiting}` : one.phase);
    spent.set(why, (spent.get(why) ?? 0) + seconds);
  });
  const told = [...spent].sort(([, a], [, b]) => b - a).slice(0, 3);
  const listed = told.map(([why, seconds]) => `${share(seconds / all)} ${why}`).join("; ");
  text($("idle"), listed ? `Not training: ${listed}` : "");
}

// Exchanges under way.
function showRunning(running) {
  const told = running.map((one) => {
    const done = `${size(one.bytes_sent + one.bytes_received)} of ${size(one.bytes_expected)}`;
    const peers = one.partners.map(shortPeer).join(" ") || "nobody yet";
    return `fragment ${one.fragment} with ${peers}: ${clean(one.stage)}, ${done}`;
  });
  text($("running"), told.length ? `Under way: ${told.join("; ")}` : "");
}

function show(now) {
  status = now;
  const run = now.run;
  text($("run"), run ? clean(run.name) : "lowcomm node");
  const about = run ? [run.description, `${run.method}, run ${run.fingerprint}`] : [];
  text($("what"), about.filter(Boolean).map(clean).join(" · "));
  document.title = `${now.phase} · ${run ? clean(run.name) : "lowcomm"}`;
  text($("phase"), clean(now.waiting ? `${now.phase}: ${now.waiting}` : now.phase));
  showRemedy($("remedy"), catalogue.waits?.[now.waiting_code]?.remedy);
  const { swarm_step: step, total_steps: steps } = now.trainer;
  $("progress").value = steps ? (step ?? 0) / steps : 0;
  text($("pause"), now.pause ? "Resume" : "Pause");
  $("pause-for").hidden = now.pause !== null;
  text($("release"), `${clean(now.release)} · ${now.peer_id}`);
  fill(now);
  showSaved(now);
  showRunning(now.exchanges_running);
  showShares($("shares"), now.trainer);
  const remedies = now.warning_codes.map((code) => catalogue.warnings?.[code]?.remedy);
  showWarnings($("warnings-box"), $("warnings"), now.warnings, remedies);
  showLimits(now.limits);
  const hours = now.schedule ? `trains ${clean(now.schedule)}` : "trains at any time";
  text($("hours-said"), $("hours-said").dataset.error ?? hours);
}

function showLimits(limits) {
  const any = (value, none) => (value === null ? none : rate(value));
  const { max_up: up, max_down: down, max_peers: most } = limits;
  const fields = $("limits").elements;
  fields.max_up.title = `now: ${any(up, "no limit")}`;
  fields.max_down.title = `now: ${any(down, "no limit")}`;
  fields.max_peers.title = `now: ${most}`;
  const told = [
    `up ${rate(limits.up)} of ${any(up, "any")}`,
    `down ${rate(limits.down)} of ${any(down, "any")}`,
    `${limits.peers} of ${most} peers`,
  ];
  text($("limits-said"), $("limits-said").dataset.error ?? told.join(", "));
}

// What changes with every exchange, and with the clock.
function showPast() {
  const now = Date.now() / 1000;
  showExchanges($("exchanges"), exchanges, LISTED, catalogue.exchanges);
  showFragments($("fragments"), exchanges, status?.trainer.swarm_step ?? null, now);
  showPeers($("peers"), peers, exchanges, catalogue.exchanges);
  drawAround($("around"), peers);
  drawTimeline($("timeline"), exchanges, Number($("span").value), now);
}

function drawAll() {
  draw($("loss"), samples, $("against").value, [
    ["loss", "training", "--one"],
    ["val_loss", "held-out", "--two"],
    ["claimed_loss", "held-out, claimed by others", "--three"],
  ]);
  draw($("speed"), samples, "time", [["tokens_per_second", "tokens/s", "--one"]]);
  showIdle();
  if (status) showSaved(status);
}

function addSamples(more) {
  const known = new Set(samples.map((one) => one.time));
  samples.push(...more.filter((one) => !known.has(one.time)));
  samples.sort((a, b) => a.time - b.time);
  // Every second one of an open page's older half goes: the newest stay as they are.
  if (samples.length > 2 * MOST_SAMPLES) {
    samples = samples.filter((_, place) => place % 2 || place > MOST_SAMPLES);
  }
}

function addExchanges(more) {
  const key = (one) => `${one.time} ${one.fragment} ${one.round}`;
  const known = new Set(exchanges.map(key));
  exchanges.push(...more.filter((one) => !known.has(key(one))));
  exchanges.sort((a, b) => a.time - b.time);
  exchanges.splice(0, exchanges.length - MOST_EXCHANGES);
}

async function lookBack(since = 0) {
  const [told, past, messages] = await Promise.all([
    call(`samples?since=${since}&most=${MOST_SAMPLES}`),
    call(`exchanges?limit=${MOST_EXCHANGES}`),
    call("messages"),
  ]);
  catalogue = messages;
  if (status) show(status);
  addSamples(told);
  addExchanges(past);
  drawAll();
  showPast();
}

// Only a node that answers can be steered.
function offer(isThere) {
  for (const element of document.querySelectorAll("[data-steers]")) element.hidden = !isThere;
}

function heard(kind, data) {
  $("line").hidden = true;
  hasEnded = kind === "end";
  $("end").hidden = !hasEnded;
  offer(!hasEnded);
  if (kind === "end") {
    peers = data.peers;
    show(data.status);
    text($("end"), data.text.split("\n").map(clean).join("\n"));
  } else if (kind === "state") {
    peers = data.peers;
    show(data.status);
    showPast();
    document.body.dataset.states = Number(document.body.dataset.states ?? 0) + 1;
  } else if (kind === "notice") {
    if (data.event.startsWith("exchange.")) addExchanges([data]);
  } else if (kind === "sample") {
    const last = samples.at(-1)?.time ?? data.time;
    // What was written down while the page was away.
    if (data.time - last > BREAK) lookBack(Math.floor(last)).catch(trouble);
    addSamples([data]);
    drawAll();
  } else if (kind === "reset") {
    lookBack().catch(trouble);
  }
}

function isSilence(error) {
  return error instanceof TypeError || error.name === "AbortError";
}

function whyNothing(error) {
  if (error instanceof NotLetIn || error instanceof Refused) return error.message;
  if (isSilence(error)) {
    return "the node does not answer: what is shown is its last word, and the page looks again";
  }
  throw error;
}

function trouble(error) {
  if (hasEnded && isSilence(error)) return; // which is no news
  offer(false);
  text($("line"), whyNothing(error));
  $("line").hidden = false;
}

// Carry out what a person asked for; what the node refuses is told beside the button.
async function ask(output, work) {
  delete output.dataset.error;
  try {
    return await work();
  } catch (error) {
    output.dataset.error = whyNothing(error);
    text(output, output.dataset.error);
    return null;
  }
}

$("against").addEventListener("change", drawAll);
$("span").addEventListener("change", showPast);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => {
  drawAll();
  showPast();
});

$("pause").addEventListener("click", async () => {
  const length = $("pause-length").value;
  const body = { seconds: length ? Number(length) : null };
  try {
    await (status?.pause ? call("resume", {}) : call("pause", body));
  } catch (error) {
    trouble(error);
  }
});
$("finish").addEventListener("click", () => $("sure").showModal());
$("sure").addEventListener("close", async () => {
  if ($("sure").returnValue === "finish") await call("finish", {}).catch(trouble);
});
$("limits").addEventListener("submit", async (event) => {
  event.preventDefault();
  const changes = Object.fromEntries([...new FormData(event.target)].filter(([, value]) => value));
  const limits = await ask($("limits-said"), () => call("limits", changes));
  if (limits === null) return;
  event.target.reset();
  showLimits(limits);
});
$("hours").addEventListener("submit", async (event) => {
  event.preventDefault();
  const hours = new FormData(event.target).get("hours");
  if ((await ask($("hours-said"), () => call("schedule", { hours }))) !== null)
    event.target.reset();
});
$("export").addEventListener("submit", async (event) => {
  event.preventDefault();
  text($("exported"), "exporting …");
  const to = new FormData(event.target).get("to");
  const told = await ask($("exported"), () => call("export", { to }));
  if (told === null) return;
  const missing = told.missing ? ` (${told.missing})` : "";
  text($("exported"), clean(`step ${told.step} is in ${told.path}${missing}`));
});
$("write").addEventListener("submit", async (event) => {
  event.preventDefault();
  const told = new FormData(event.target);
  text($("written"), "writing …");
  const seed = Math.floor(1e9 * Math.random());
  const body = { prompt: told.get("prompt"), tokens: Number(told.get("tokens")), seed };
  const found = await ask($("written"), () => call("generate", body));
  if (found !== null) text($("written"), found);
});

try {
  await enter();
} catch (error) {
  trouble(error);
}
follow(heard, trouble);
