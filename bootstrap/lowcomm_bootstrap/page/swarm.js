// The page of a swarm: asks for swarms.json every few seconds and shows its figures. All words come
// from strangers, so they become text, never markup.

import { drawAround, pulse } from "./around.js";
import { clean, quantity, share, span } from "./formatting.js";

const EVERY = 15_000;
const CHARTS = [
  ["held_out_loss", ""],
  ["peers", "peers"],
  ["tokens_per_second", "tokens a second"],
  ["exchanges_per_minute", "exchanges a minute"],
];
const shown = new Map();
let tag = null;

const count = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plainCount = new Intl.NumberFormat("en");
const plain = (value, digits = 3) => (value === null ? "none yet" : value.toFixed(digits));

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function say(run, name, text) {
  const place = run.querySelector(`[data-text="${name}"]`);
  if (place.textContent !== text) place.textContent = text;
}

function people(count) {
  return count === 1 ? "1 person trains" : `${count} people train`;
}

function lead(view) {
  const model = `a ${quantity(view.parameters)}-parameter model`;
  const doing = view.training ? `${people(view.training)} ${model} now` : `Nobody trains ${model} now`;
  return `${doing}. Together they gave ${count.format(view.tokens)} tokens.`;
}

function peersOf(view) {
  if (!view.sampled) return `${view.peers}, ${view.proved} proved`;
  return `about ${plainCount.format(view.peers)}; figures are of ${view.sampled}`;
}

function figures(view) {
  const claimed = view.held_out_loss_of === 1;
  return [
    ["held-out loss", plain(view.held_out_loss), claimed],
    ["tokens a second", count.format(view.tokens_per_second), view.training === 1],
    ["exchanges a minute", plain(view.exchanges_per_minute, 1)],
    ["peers", peersOf(view)],
  ];
}

function about(view) {
  const model = Object.entries(view.model).map(([name, value]) => `${name} ${value}`);
  return `${view.run}: ${view.method}; ${view.admission} to join; ${model.join(", ")}`;
}

function list(run, view) {
  const rows = figures(view).map(([name, value, claim]) => {
    const row = element("div");
    row.append(element("dt", name), element("dd", value, claim ? "claim" : ""));
    return row;
  });
  run.querySelector(".figures").replaceChildren(...rows);
}

function leaders(run, view) {
  const rows = view.leaders.map((peer) => {
    const row = element("tr");
    const name = element("td");
    name.append(element("bdi", peer.name || "no name"));
    row.append(
      name,
      element("td", peer.peer.slice(-6)),
      element("td", count.format(peer.tokens)),
      element("td", count.format(peer.tokens_per_second)),
      element("td", String(peer.exchanges)),
      element("td", peer.phase),
      element("td", peer.proved ? "yes" : "no"),
    );
    return row;
  });
  run.querySelector("tbody").replaceChildren(...rows);
}

// Anybody can sign any words, so each stands under the name of its peer.
function samples(run, view) {
  const box = run.querySelector(".samples");
  const quotes = view.samples.map((one) => {
    const made = element("figure");
    const by = element("figcaption", "written by ", "quiet");
    const who = one.name ? `${clean(one.name)}'s node` : `node ${one.peer.slice(-6)}`;
    by.append(element("bdi", who), ` at step ${plainCount.format(one.step)}, unverified`);
    made.append(element("blockquote", clean(one.text)), by);
    return made;
  });
  box.replaceChildren(box.firstElementChild, ...quotes);
  box.hidden = quotes.length === 0;
}

// Peers that have exchanged since the last look light up.
function around(entry, view) {
  const peers = view.leaders.map((peer) => {
    return { peer_id: peer.peer, name: peer.name, tokens: peer.tokens, route: "direct" };
  });
  drawAround(entry.run.querySelector(".around"), null, peers);
  const busy = view.leaders.filter((peer) => peer.exchanges > (entry.counts.get(peer.peer) ?? 1e9));
  pulse(
    entry.run.querySelector(".around"),
    busy.map((peer) => peer.peer),
  );
  entry.counts = new Map(view.leaders.map((peer) => [peer.peer, peer.exchanges]));
}

function chartBox(title) {
  const box = element("div");
  box.append(element("h3", title));
  return box;
}

function chart(box, times, values, isLarge) {
  const colour = getComputedStyle(document.body).getPropertyValue(isLarge ? "--two" : "--one");
  const ink = getComputedStyle(document.body).getPropertyValue("--quiet");
  const axis = { stroke: ink, grid: { stroke: ink, width: 0.2 }, ticks: { show: false } };
  const options = {
    width: Math.max(240, box.clientWidth),
    height: isLarge ? 280 : 150,
    legend: { show: isLarge },
    cursor: { show: isLarge },
    axes: [axis, { ...axis, size: 56 }],
    series: [
      {},
      { label: "held-out loss", stroke: colour, width: isLarge ? 3 : 1.5, spanGaps: true },
    ],
  };
  return new uPlot(options, [times, values], box);
}

function draw(entry, view, names) {
  const columns = names.map((_, k) => view.history.map((point) => point[k]));
  const of = (name) => columns[names.indexOf(name)];
  if (entry.charts) {
    CHARTS.forEach(([name], k) => entry.charts[k].setData([of("time"), of(name)]));
  } else if (view.history.length > 1) {
    // All boxes first: each chart takes the width that its box then has.
    const boxes = CHARTS.slice(1).map(([, title]) => chartBox(title));
    entry.run.querySelector(".charts").append(...boxes);
    boxes.unshift(entry.run.querySelector(".loss"));
    entry.charts = CHARTS.map(([name], k) => chart(boxes[k], of("time"), of(name), k === 0));
  }
}

function enter(view) {
  const run = document.getElementById("run").content.firstElementChild.cloneNode(true);
  const [button, fingerprint] = [run.querySelector("button"), view.run.split("@")[1]];
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(run.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  run.querySelector(".badge").src = `badge/${fingerprint}.svg`;
  run.querySelector(".badge").alt = `badge of ${view.run}, for a README`;
  document.getElementById("runs").append(run);
  const entry = { run, charts: null, counts: new Map() };
  shown.set(view.run, entry);
  return entry;
}

function show(told) {
  for (const view of told.runs) {
    const entry = shown.get(view.run) ?? enter(view);
    say(entry.run, "name", clean(view.run.split("@")[0]));
    say(entry.run, "lead", lead(view));
    const done = Math.min(1, view.swarm_step / view.steps);
    say(entry.run, "done", `step ${view.swarm_step} of ${view.steps} · ${share(done)}`);
    const left = view.seconds_left;
    say(entry.run, "left", left === null ? "" : `about ${span(left)} left`);
    say(entry.run, "description", view.description);
    say(entry.run, "about", about(view));
    say(entry.run, "join", view.join ?? "this server has no address that can be reached");
    const releases = Object.entries(view.releases).map(([name, peers]) => `${name}: ${peers}`);
    say(entry.run, "releases", `releases of lowcomm: ${releases.join(", ") || "none"}`);
    entry.run.querySelector("progress").value = done;
    list(entry.run, view);
    samples(entry.run, view);
    leaders(entry.run, view);
    around(entry, view);
    draw(entry, view, told.figures);
  }
  const kept = new Set(told.runs.map((view) => view.run));
  for (const [name, entry] of shown) {
    if (!kept.has(name)) {
      entry.run.remove();
      shown.delete(name);
    }
  }
  const runs = told.runs.length === 1 ? "1 run" : `${told.runs.length} runs`;
  return `${runs}, as of ${new Date(1000 * told.made).toLocaleTimeString()}`;
}

async function look() {
  const line = document.getElementById("line");
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch("api/v1/swarms.json", { headers, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      line.textContent = show(await answer.json());
    } else if (answer.status !== 304) {
      line.textContent = `the server answers ${answer.status}; tried again`;
    }
  } catch (error) {
    console.error(error);
    line.textContent = "the server does not answer; tried again";
  }
  setTimeout(look, EVERY);
}

look();
