// The page of a node. Everything on it comes from the API, and enters it as text, never as markup.

import {
  MISSING,
  clean,
  loss,
  milliseconds,
  quantity,
  rate,
  seconds,
  shortPeer,
  size,
} from "./formatting.js";

const API = "/api/v1/";
const EVERY = 2000; // milliseconds between two looks
const SAMPLES_EVERY = 10000;
const KEPT = "lowcomm-token";
const $ = (id) => document.getElementById(id);
const charts = {};
let status = null;
let samples = [];

class Refused extends Error {}

async function call(path, body) {
  const answer = await fetch(API + path, {
    method: body === undefined ? "GET" : "POST",
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEPT)}` },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const told = await answer.json();
  if (!answer.ok) throw new Refused(answer.status === 401 ? "" : told.error);
  return told;
}

// The key in the link works once; what comes of it lasts as long as this tab and the node.
async function enter() {
  const key = location.hash.slice(1);
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch(`${API}session`, { method: "POST", body: JSON.stringify({ key }) });
  const told = await answer.json();
  if (answer.ok) sessionStorage.setItem(KEPT, told.token);
}

function text(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

function row(cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const [content, kind] = Array.isArray(cell) ? cell : [cell, ""];
    const box = document.createElement("td");
    box.textContent = content;
    box.className = kind;
    line.append(box);
  }
  return line;
}

function note(content, columns) {
  const line = row([[content, "why"]]);
  line.firstChild.colSpan = columns;
  return line;
}

function showFigures(now) {
  const { trainer, exchanges } = now;
  const figures = [
    ["step", `${trainer.swarm_step ?? MISSING} of ${trainer.total_steps ?? MISSING}`],
    ["loss", loss(trainer.loss)],
    ["held-out loss", loss(trainer.val_loss_last)],
    ["tokens/s", quantity(trainer.tokens_per_second)],
    ["tokens", quantity(trainer.tokens)],
    ["other peers", String(now.peers)],
    ["exchanges applied", String(exchanges.completed)],
    ["failed", String(exchanges.failed)],
    ["sent", size(now.bytes_sent)],
    ["received", size(now.bytes_received)],
    ["memory", size(trainer.memory?.taken)],
    ["device", trainer.device ?? MISSING],
  ];
  const box = $("figures");
  if (box.childElementCount !== figures.length) {
    box.replaceChildren(
      ...figures.map(([name]) => {
        const pair = document.createElement("div");
        const [title, value] = [document.createElement("dt"), document.createElement("dd")];
        title.textContent = name;
        pair.append(title, value);
        return pair;
      }),
    );
  }
  figures.forEach(([, value], place) => text(box.children[place].lastChild, clean(value)));
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

function show(now) {
  status = now;
  const run = now.run;
  text($("run"), run ? clean(run.name) : "lowcomm node");
  const about = run ? [run.description, `${run.method}, run ${run.fingerprint}`] : [];
  text($("what"), about.filter(Boolean).map(clean).join(" · "));
  document.title = `${now.phase} · ${run ? clean(run.name) : "lowcomm"}`;
  text($("phase"), clean(now.waiting ? `${now.phase}: ${now.waiting}` : now.phase));
  const { swarm_step: step, total_steps: steps } = now.trainer;
  $("progress").value = steps ? (step ?? 0) / steps : 0;
  text($("pause"), now.pause ? "Resume" : "Pause");
  text($("release"), `${clean(now.release)} · ${now.peer_id}`);
  showFigures(now);
  showSaved(now);
  $("warnings-box").hidden = !now.warnings.length;
  const warnings = now.warnings.map(clean);
  if ($("warnings").dataset.told !== warnings.join("\n")) {
    $("warnings").dataset.told = warnings.join("\n");
    const items = warnings.map((warning) => {
      const item = document.createElement("li");
      item.textContent = warning;
      return item;
    });
    $("warnings").replaceChildren(...items);
  }
  showLimits(now.limits);
}

function showLimits(limits) {
  const any = (value, none) => (value === null ? none : rate(value));
  const { max_up: up, max_down: down, max_peers: peers } = limits;
  const fields = $("limits").elements;
  fields.max_up.title = `now: ${any(up, "no limit")}`;
  fields.max_down.title = `now: ${any(down, "no limit")}`;
  fields.max_peers.title = `now: ${peers}`;
  const told = [
    `up ${rate(limits.up)} of ${any(up, "any")}`,
    `down ${rate(limits.down)} of ${any(down, "any")}`,
    `${limits.peers} of ${peers} peers`,
  ];
  text($("limits-said"), $("limits-said").dataset.error ?? told.join(", "));
}

function whyNot(peer) {
  if (peer.left_out) return `left out: ${peer.held_against}`;
  return peer.route ? "" : (peer.route_reason ?? "");
}

function showPeers(peers) {
  const lines = peers.flatMap((peer) => {
    const why = whyNot(peer);
    const line = row([
      shortPeer(peer.peer_id),
      clean(peer.phase),
      String(peer.swarm_step),
      quantity(peer.tokens_per_second),
      clean(peer.route ?? MISSING),
      milliseconds(peer.round_trip),
      rate(peer.rate_up),
      rate(peer.rate_down),
      String(peer.completed),
      String(peer.failed),
      [peer.score.toFixed(2), peer.left_out ? "bad" : ""],
    ]);
    return why ? [line, note(clean(why), 11)] : [line];
  });
  $("peers").replaceChildren(...(lines.length ? lines : [note("no other peer is alive", 11)]));
}

function showExchanges(rounds) {
  const lines = rounds.toReversed().flatMap((one) => {
    const kind = one.outcome === "applied" ? "good" : one.outcome === "failed" ? "bad" : "";
    const line = row([
      new Date(1000 * one.time).toLocaleTimeString(),
      String(one.swarm_step),
      String(one.fragment),
      [one.outcome, kind],
      one.partners.map(shortPeer).join(" ") || MISSING,
      size(one.bytes_sent),
      size(one.bytes_received),
      seconds(one.seconds),
    ]);
    return one.reason ? [line, note(clean(one.reason), 8)] : [line];
  });
  $("exchanges").replaceChildren(...(lines.length ? lines : [note("none yet", 8)]));
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function points(against, lines) {
  const known = samples.filter((one) => one[against] !== null);
  const rising = known.filter((one, place) => !place || one[against] > known[place - 1][against]);
  const names = [against, ...lines.map(([name]) => name)];
  return names.map((name) => rising.map((one, place) => valueAt(name, one, rising[place - 1])));
}

// A loss on held-out text is a point where it was computed, and stays known until the next one.
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

function draw(id, against, lines) {
  const box = $(id);
  const data = points(against, lines);
  const look = `${against} ${colour("--ink")} ${box.clientWidth}`;
  if (charts[id]?.look === look) {
    charts[id].chart.setData(data);
    return;
  }
  charts[id]?.chart.destroy();
  const chart = new uPlot(chartOptions(box.clientWidth, against, lines), data, box);
  charts[id] = { look, chart };
}

function drawAll() {
  draw("loss", $("against").value, [
    ["loss", "training", "--one"],
    ["val_loss", "held-out", "--two"],
  ]);
  draw("speed", "time", [["tokens_per_second", "tokens/s", "--one"]]);
}

function whyNothing(error) {
  if (!(error instanceof Refused)) return "the node does not answer: looking again";
  return error.message || "not let in: `lowcomm-node web` prints a link";
}

async function look() {
  try {
    const asked = ["status", "peers", "rounds?limit=50"].map((path) => call(path));
    const [now, peers, rounds] = await Promise.all(asked);
    show(now);
    showPeers(peers);
    showExchanges(rounds);
  } catch (error) {
    text($("phase"), whyNothing(error));
  }
}

async function lookBack() {
  try {
    samples = await call("samples?most=1000");
    drawAll();
  } catch (error) {
    if (!(error instanceof Refused || error instanceof TypeError)) throw error;
  }
}

async function repeat(work, every) {
  for (;;) {
    if (!document.hidden) await work();
    await new Promise((done) => setTimeout(done, every));
  }
}

$("against").addEventListener("change", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", drawAll);
document.addEventListener("visibilitychange", () => document.hidden || look());

$("pause").addEventListener("click", async () => {
  await call(status?.pause ? "resume" : "pause", {});
  await look();
});
$("finish").addEventListener("click", () => $("sure").showModal());
$("sure").addEventListener("close", async () => {
  if ($("sure").returnValue === "finish") await call("finish", {});
});
$("limits").addEventListener("submit", async (event) => {
  event.preventDefault();
  const changes = Object.fromEntries([...new FormData(event.target)].filter(([, value]) => value));
  delete $("limits-said").dataset.error;
  try {
    await call("limits", changes);
    event.target.reset();
  } catch (error) {
    $("limits-said").dataset.error = error.message;
  }
  await look();
});
$("write").addEventListener("submit", async (event) => {
  event.preventDefault();
  const told = new FormData(event.target);
  text($("written"), "writing …");
  try {
    const seed = Math.floor(1e9 * Math.random());
    const body = { prompt: told.get("prompt"), tokens: Number(told.get("tokens")), seed };
    text($("written"), (await call("generate", body)).text);
  } catch (error) {
    text($("written"), error.message);
  }
});

await enter();
repeat(look, EVERY);
repeat(lookBack, SAMPLES_EVERY);
