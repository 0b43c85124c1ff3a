// The page of a node. Everything on it comes from the API, and enters it as text, never as markup.

import { NotLetIn, Refused, call, enter, follow } from "./api.js";
import { drawAround, flash } from "./around.js";
import { draw, spark } from "./charts.js";
import { buildFigures, fill } from "./figures.js";
import { clean, rate, share, shortPeer, size } from "./formatting.js";
import {
  countsOf,
  deviceOf,
  doneOf,
  gaveOf,
  isStarting,
  learnedOf,
  leftOf,
  metOf,
  readOf,
  reasonOf,
  showChecklist,
  signOf,
  sum,
} from "./now.js";
import {
  showExchanges,
  showFragments,
  showPeers,
  showRemedy,
  showShares,
  showText,
  showWarnings,
} from "./tables.js";
import { drawTimeline } from "./timeline.js";

const MOST_SAMPLES = 1000;
const MOST_EXCHANGES = 500;
const LISTED = 50;
const SPARKS = 60; // samples of a small curve
const BREAK = 25; // seconds between two samples, of which one comes every ten
const MOST_SENT = 16000; // characters of a conversation that the node is asked about
const FLASHED = 5; // seconds after which an exchange is no news
const $ = (id) => document.getElementById(id);
let status = null;
let peers = [];
let samples = [];
let exchanges = [];
let catalogue = {}; // what each code means, and what to do
const talk = []; // texts of the conversation, the owner's and the model's in turn
let hasEnded = false; // in order, as the node said itself

function text(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

// What all-reduce of fp32 gradients would have sent in a ring, at every step of this node. Steps
// and bytes are both those of the samples.
function showSaved(now) {
  const peers = Math.max(now.peers, now.swarm_peers) + 1;
  const known = samples.filter((one) => one.steps !== null);
  const steps = known.length ? known.at(-1).steps - known[0].steps : 0;
  const inRing = 2 * 4 * (now.trainer.parameters ?? 0) * steps * ((peers - 1) / peers);
  const sent = sum(known, "bytes_sent");
  const times = (inRing / sent).toFixed(0);
  const words =
    `${size(sent)} sent in ${steps} steps: ${times} times less traffic than all-reduce at every ` +
    `step (${size(inRing)})`;
  text($("saved"), inRing > 0 && sent ? words : "");
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
  const most = [...spent].sort(([, a], [, b]) => b - a).slice(0, 3);
  const listed = most.map(([why, seconds]) => `${share(seconds / all)} ${why}`).join("; ");
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
  const [kind, word] = signOf(now);
  $("sign").className = `dot ${kind}`;
  text($("phase"), word);
  text($("reason"), reasonOf(now));
  document.title = `${word} · ${run ? clean(run.name) : "lowcomm"}`;
  const remedy = catalogue.waits?.[now.waiting_code]?.remedy ?? "";
  showRemedy($("remedy"), remedy.startsWith("Nothing") ? "" : remedy);
  const { swarm_step: step, total_steps: steps } = now.trainer;
  $("progress").value = steps ? (step ?? 0) / steps : 0;
  text($("done"), doneOf(now.trainer));
  text($("left"), leftOf(now));
  text($("device"), deviceOf(now.trainer));
  text($("met"), metOf(now.exchanges));
  text($("counts"), countsOf(now.exchanges));
  const starting = isStarting(now);
  $("start").hidden = !starting;
  if ($("learning").hidden !== starting) {
    $("learning").hidden = starting;
    drawAll();
  }
  if (starting) showChecklist($("checklist"), now);
  $("pauses").hidden = now.pause !== null;
  $("resume").hidden = now.pause === null;
  text($("release"), `${clean(now.release)} · ${now.peer_id}`);
  fill(now);
  showAsks(run?.chat);
  showEnd(now);
  showSaved(now);
  showRunning(now.exchanges_running);
  showShares($("shares"), now.trainer);
  $("texts").hidden = now.text.length === 0;
  text($("read"), now.phase === "serving" ? "" : readOf(now.text));
  showText($("parts"), now.text);
  const remedies = now.warning_codes.map((code) => catalogue.warnings?.[code]?.remedy);
  showWarnings($("warnings-box"), $("warnings"), now.warnings, remedies);
  showLimits(now.limits);
  const hours = now.schedule ? `trains ${clean(now.schedule)}` : "trains at any time";
  text($("hours-said"), $("hours-said").dataset.error ?? hours);
}

// The last words: also of a node that stays to serve the state of a run that is over.
function showEnd(now) {
  const isOver = hasEnded || now.phase === "finished";
  $("end").hidden = !isOver;
  if (!isOver) return;
  text($("learned"), learnedOf(now, samples));
  if (now.phase !== "finished" || $("sample").dataset.asked) return;
  $("sample").dataset.asked = "yes";
  const prompt = $("write").elements.prompt.value;
  const written = call("generate", { prompt, tokens: 60, seed: 0 });
  written.then(
    (found) => {
      text($("sample"), clean(prompt + found));
      $("sample").hidden = false;
    },
    () => {}, // it has left meanwhile
  );
}

// Where the run has a chat template, its model answers messages.
function showAsks(isChat) {
  const prompt = $("write").elements.prompt;
  if (isChat && prompt.value === prompt.defaultValue) prompt.value = "";
  prompt.required = Boolean(isChat);
  $("compares").hidden = !status.run?.adapts;
  text($("asks"), isChat ? "Message" : "Beginning");
  text($("write").querySelector("button"), isChat ? "Send" : "Write");
}

function showLimits(limits) {
  const limit = (value) => (value === null ? "no limit" : rate(value));
  const uses = {
    up: [limits.max_up === null ? "none" : limit(limits.max_up), rate(limits.up)],
    down: [limits.max_down === null ? "none" : limit(limits.max_down), rate(limits.down)],
    peers: [String(limits.max_peers), String(limits.peers)],
  };
  for (const [name, [most, now]] of Object.entries(uses)) {
    $("limits").elements[`max_${name}`].placeholder = most;
    text($("limits").querySelector(`[data-use=${name}]`), `now ${now}`);
  }
  text($("limits-said"), $("limits-said").dataset.error ?? "");
}

// What changes with every exchange, and with the clock.
function showPast() {
  const now = Date.now() / 1000;
  showExchanges($("exchanges"), exchanges, LISTED, catalogue.exchanges);
  showFragments($("fragments"), exchanges, status?.trainer.swarm_step ?? null, now);
  showPeers($("peers"), peers, exchanges, catalogue.exchanges);
  if (status) drawAround($("around"), { ...status, tokens: status.trainer.tokens }, peers);
  if ($("timeline").clientWidth) {
    drawTimeline($("timeline"), exchanges, Number($("span").value), now);
  }
}

function drawAll() {
  const against = $("against").value;
  const end = against === "swarm_step" ? (status?.trainer.total_steps ?? null) : null;
  const lines = [
    ["loss", "training", "--one", "thin"],
    ["val_loss", "held-out", "--two", "strong"],
    ["claimed_loss", "peers, unverified", "--three", "points"],
  ];
  draw($("loss"), samples, against, lines, { up: "nats a token, lower is better", end });
  const speed = [["tokens_per_second", "tokens/s", "--one", "thin"]];
  draw($("speed"), samples, "time", speed, { up: "tokens a second", end: null });
  const recent = samples.slice(-SPARKS);
  for (const box of document.querySelectorAll("[data-spark]")) {
    const all = box.dataset.spark === "val_loss" ? samples : recent;
    spark(
      box,
      all.map((one) => one[box.dataset.spark]),
    );
  }
  text($("gave"), gaveOf(samples));
  showIdle();
  if (!status) return;
  showSaved(status);
  showEnd(status);
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
  offer(!hasEnded);
  if (kind === "end") {
    peers = data.peers;
    show(data.status);
    $("farewell").hidden = false;
    text($("farewell"), data.text.split("\n").map(clean).join("\n"));
  } else if (kind === "state") {
    peers = data.peers;
    show(data.status);
    showPast();
    document.body.dataset.states = Number(document.body.dataset.states ?? 0) + 1;
  } else if (kind === "notice") {
    if (!data.event.startsWith("exchange.")) return;
    addExchanges([data]);
    if (data.event === "exchange.applied" && Date.now() / 1000 - data.time < FLASHED) {
      flash([status?.peer_id, ...data.partners]);
    }
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
    return "The node does not answer. Showing its last state; reconnecting";
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

async function order(path, body) {
  $("controls").open = false;
  await call(path, body).catch(trouble);
}

for (const button of document.querySelectorAll("[data-pause]")) {
  const length = button.dataset.pause;
  button.addEventListener("click", () => order("pause", { seconds: length ? Number(length) : null }));
}
$("resume").addEventListener("click", () => order("resume", {}));
for (const fold of document.querySelectorAll("details.fold")) {
  fold.addEventListener("toggle", () => {
    drawAll();
    showPast();
  });
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("controls").open = false;
});
$("finish").addEventListener("click", () => {
  $("controls").open = false;
  $("sure").showModal();
});
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

function addToTalk(who, said) {
  const entry = document.createElement("p");
  const name = document.createElement("strong");
  name.textContent = who;
  entry.append(name, ` ${said}`);
  $("talk").append(entry);
  $("talk").hidden = false;
}

// A message or an answer; the conversation that the model reads is a list of their texts.
function say(who, said) {
  addToTalk(who, said);
  talk.push(said);
  while (talk.length > 2 && JSON.stringify(talk).length > MOST_SENT) talk.splice(0, 2);
}

$("write").addEventListener("submit", async (event) => {
  event.preventDefault();
  const told = new FormData(event.target);
  const prompt = told.get("prompt");
  const chat = status?.run?.chat ? [...talk, prompt] : [];
  text($("written"), "writing …");
  const seed = Math.floor(1e9 * Math.random());
  const body = { prompt, tokens: Number(told.get("tokens")), seed, chat };
  const found = await ask($("written"), () => call("generate", body));
  if (found === null) return;
  const compared = Boolean(told.get("compare"));
  const before = compared
    ? await ask($("written"), () => call("generate", { ...body, before: true }))
    : null;
  if (compared && before === null) return;
  const both = compared ? `${found}\n\nBefore it was trained:\n${before}` : found;
  text($("written"), chat.length ? "" : both);
  if (!chat.length) return;
  say("You", prompt);
  if (compared) addToTalk("Before", before);
  say("Model", found);
  $("write").elements.prompt.value = "";
});

$("use").addEventListener("click", () => {
  $("model").open = true;
  $("write").querySelector("button").focus();
});
buildFigures($("groups"));
try {
  await enter();
} catch (error) {
  trouble(error);
}
follow(heard, trouble);
