// Rows of the page's tables. All text enters as text, never as markup.

import { nameOf } from "./around.js";
import {
  FORMATS,
  MISSING,
  clean,
  count,
  quantity,
  seconds,
  share,
  shortPeer,
  size,
  small,
} from "./formatting.js";

function text(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

// A cell: content, class, and for a figure of `status` or `peers` its path and value.
function cell(told) {
  const { content, kind = "", figure, value } = typeof told === "string" ? { content: told } : told;
  const box = document.createElement("td");
  box.textContent = content;
  box.className = kind;
  if (figure) {
    box.dataset.figure = figure;
    box.dataset.value = JSON.stringify(value);
  }
  return box;
}

function row(cells) {
  const line = document.createElement("tr");
  line.append(...cells.map(cell));
  return line;
}

// `remedy`: nothing where there is nothing to do.
function note(content, columns, remedy) {
  const line = row([{ content, kind: "why" }]);
  line.firstChild.colSpan = columns;
  if (remedy && !remedy.startsWith("Nothing")) {
    const box = document.createElement("div");
    showRemedy(box, remedy);
    line.firstChild.append(box);
  }
  return line;
}

function whyNot(peer) {
  if (peer.left_out) return `left out: ${peer.held_against}`;
  const told = [
    peer.route ? "" : peer.route_reason,
    peer.last_reason && `last: ${peer.last_reason}`,
  ];
  return told.filter(Boolean).join("; ");
}

// The distance that the last merge told: of a group it is that of all members.
function distances(exchanges) {
  const found = new Map();
  for (const one of exchanges) {
    if (one.worst_block !== null) one.partners.forEach((peer) => found.set(peer, one.worst_block));
  }
  return found;
}

const OF_A_PEER = [
  ["phase", "clean"],
  ["swarm_step", "count"],
  ["tokens", "quantity"],
  ["tokens_per_second", "quantity"],
  ["val_loss", "loss"],
  ["route", "clean"],
  ["round_trip", "milliseconds"],
  ["rate_up", "rate"],
  ["rate_down", "rate"],
  ["completed", "count"],
  ["refused", "count"],
  ["failed", "count"],
];

// `codes`: what each code of an exchange means, and what to do.
export function showPeers(box, peers, exchanges, codes) {
  const apart = distances(exchanges);
  const lines = peers.flatMap((peer) => {
    const figure = (name, format) => ({
      content: FORMATS[format](peer[name]),
      figure: `${peer.peer_id}.${name}`,
      value: peer[name],
    });
    const cells = OF_A_PEER.map(([name, format]) => figure(name, format));
    const score = { ...figure("score", "count"), kind: peer.left_out ? "bad" : "" };
    const name = peer.name ? `${nameOf(peer)} (${shortPeer(peer.peer_id)})` : shortPeer(peer.peer_id);
    const line = row([name, ...cells, small(apart.get(peer.peer_id)), score]);
    const why = whyNot(peer);
    return why ? [line, note(clean(why), 15, codes?.[peer.last_code]?.remedy)] : [line];
  });
  box.replaceChildren(...(lines.length ? lines : [note("no other peer is alive", 15)]));
}

// How far each part of the run's packed text is read.
export function showText(box, parts) {
  const lines = parts.flatMap((part) => {
    const line = row([
      clean(part.name),
      share(part.share),
      quantity(part.tokens),
      count(part.epoch + 1),
      share(part.pieces_read / part.pieces),
      share(part.own_pieces / part.pieces),
      count(part.held),
      count(part.missing),
      size(part.bytes_fetched),
      size(part.bytes_given),
    ]);
    return part.waiting ? [line, note(clean(part.waiting), 10)] : [line];
  });
  box.replaceChildren(...lines);
}

function reasons(one) {
  const told = one.reason ? [clean(one.reason)] : [];
  for (const [peer, why] of Object.entries(one.left_out ?? {})) {
    told.push(`without ${shortPeer(peer)}: ${clean(why)}`);
  }
  return told.join("; ");
}

const BUSY = ["busy", "crossed", "too-soon", "full", "no-partner"];

function whyAlone(one) {
  if (one.outcome !== "no-partner") return "";
  return BUSY.includes(one.code) ? "no partner: others were busy" : clean(one.reason);
}

// Those without a partner for the same reason count together.
function folded(exchanges) {
  const rows = [];
  for (const one of exchanges) {
    const last = rows.at(-1);
    if (whyAlone(one) && last && whyAlone(last[0]) === whyAlone(one)) last.push(one);
    else rows.push([one]);
  }
  return rows;
}

export function showExchanges(box, exchanges, most, codes) {
  const kinds = { applied: "good", failed: "held" }; // red is for what needs the owner
  const lines = folded(exchanges.toReversed())
    .slice(0, most)
    .flatMap((entries) => {
      const [one] = entries;
      const when = new Date(1000 * one.time).toLocaleTimeString();
      if (one.outcome === "no-partner") {
        const many = entries.length > 1 ? `${entries.length} x ` : "";
        return [note(`${when}  ${many}${whyAlone(one)}`, 11)];
      }
      const line = row([
        when,
        count(one.swarm_step),
        count(one.fragment),
        { content: clean(one.outcome), kind: kinds[one.outcome] ?? "" },
        one.partners.map(shortPeer).join(" ") || MISSING,
        size(one.bytes_sent),
        size(one.bytes_received),
        seconds(one.seconds),
        ...["captured", "sent", "received"].map((name) => seconds(one.moments?.[name])),
      ]);
      const why = reasons(one);
      return why ? [line, note(why, 11, codes?.[one.code]?.remedy)] : [line];
    });
  box.replaceChildren(...(lines.length ? lines : [note("none yet", 11)]));
}

export function showFragments(box, exchanges, step, now) {
  const merged = new Map();
  const failed = new Map();
  for (const one of exchanges) {
    if (one.outcome === "applied") {
      merged.set(one.fragment, one);
      failed.set(one.fragment, 0);
    } else failed.set(one.fragment, (failed.get(one.fragment) ?? 0) + 1);
  }
  const lines = [...failed.keys()]
    .sort((a, b) => a - b)
    .map((fragment) => {
      const last = merged.get(fragment);
      return row([
        count(fragment),
        last ? `${seconds(Math.max(0, now - last.time))} ago` : MISSING,
        last && step !== null ? count(Math.max(0, step - last.swarm_step)) : MISSING,
        last ? last.partners.map(shortPeer).join(" ") : MISSING,
        last ? size(last.bytes_sent) : MISSING,
        small(last?.worst_block),
        count(failed.get(fragment)),
      ]);
    });
  box.replaceChildren(...(lines.length ? lines : [note("none was exchanged yet", 7)]));
}

// What the trainer did since it started: steps, and what it waited for between them.
export function showShares(box, trainer) {
  const told = Object.entries(trainer.waited ?? {}).sort(([, a], [, b]) => b - a);
  const all = (trainer.computing ?? 0) + told.reduce((sum, [, spent]) => sum + spent, 0);
  const lines = all ? [["inner steps", trainer.computing], ...told] : [];
  box.replaceChildren(
    ...lines.map(([name, spent]) => {
      const line = document.createElement("div");
      const [title, value, bar] = ["dt", "dd", "dd"].map((kind) => document.createElement(kind));
      const meter = document.createElement("meter");
      title.textContent = clean(name);
      value.textContent = `${FORMATS.share(spent / all)} (${seconds(spent)})`;
      meter.value = spent / all;
      meter.ariaLabel = `share of ${clean(name)}`;
      bar.append(meter);
      line.append(title, value, bar);
      return line;
    }),
  );
}

// What to do, as the catalogue says; commands and options in it stand between backticks.
export function showRemedy(box, remedy) {
  box.hidden = !remedy;
  if (box.dataset.told === (remedy ?? "")) return;
  box.dataset.told = remedy ?? "";
  const parts = (remedy ?? "").split("`").map((part, place) => {
    if (place % 2 === 0) return part;
    const command = document.createElement("code");
    command.textContent = part;
    return command;
  });
  box.replaceChildren("What to do: ", ...parts);
}

// `remedies`: of the warnings, in their order, as far as they are known.
export function showWarnings(box, list, warnings, remedies) {
  box.hidden = !warnings.length;
  text(box.querySelector("span"), `(${warnings.length})`);
  const told = JSON.stringify([warnings, remedies]);
  if (list.dataset.told === told) return;
  list.dataset.told = told;
  list.replaceChildren(
    ...warnings.map((warning, place) => {
      const [item, remedy] = ["li", "p"].map((kind) => document.createElement(kind));
      remedy.className = "quiet";
      showRemedy(remedy, remedies[place]);
      item.append(clean(warning), remedy);
      return item;
    }),
  );
}
