// Talks to the node: its token, calls, and the stream of events.

const API = "/api/v1/";
const KEPT = "lowcomm-browser";
const AGAIN = 2000; // milliseconds between two tries
const SILENCE = 40000; // milliseconds; the node says something every 15 seconds

let recognized = false; // whether what answers is our node

export class Refused extends Error {}
export class NotLetIn extends Refused {}
export class Stranger extends Error {}

function mine() {
  return JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
}

async function post(path, body, headers = {}) {
  return fetch(API + path, { method: "POST", headers, body: JSON.stringify(body) });
}

// The key in the link works once; what comes of it lasts as long as this tab and the node.
export async function enter() {
  const key = location.hash.slice(1);
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  const answer = await post("session", { key });
  if (answer.ok) sessionStorage.setItem(KEPT, JSON.stringify(await answer.json()));
}

export async function call(path, body) {
  if (!recognized) throw new Refused("the node does not answer: try again when it does");
  const headers = { Authorization: `Bearer ${mine()?.token}` };
  const answer =
    body === undefined ? await fetch(API + path, { headers }) : await post(path, body, headers);
  const told = await answer.json();
  if (answer.status === 401) throw new NotLetIn("not let in: `lowcomm-node web` prints a link");
  if (!answer.ok) throw new Refused(told.error);
  return told;
}

const hex = (bytes) =>
  [...new Uint8Array(bytes)].map((one) => one.toString(16).padStart(2, "0")).join("");

// Another program may have taken the port while the node was away: it must not see the token. Only
// our node knows its hash, and it answers for its own port alone.
async function recognize() {
  const known = mine();
  if (known === null) throw new NotLetIn("not let in: `lowcomm-node web` prints a link");
  const nonce = hex(crypto.getRandomValues(new Uint8Array(16)));
  const { proof } = await (await post("proof", { name: known.name, nonce })).json();
  if (proof === null)
    throw new NotLetIn("the node has been started anew: `lowcomm-node web` prints a link");
  const code = new TextEncoder();
  const hash = await crypto.subtle.digest("SHA-256", code.encode(known.token));
  const kind = { name: "HMAC", hash: "SHA-256" };
  const secret = await crypto.subtle.importKey("raw", hash, kind, false, ["sign"]);
  const signed = await crypto.subtle.sign("HMAC", secret, code.encode(`${nonce}:${location.port}`));
  if (hex(signed) !== proof) throw new Stranger();
}

// Events of the node: `heard(kind, data)` for each, `trouble(error)` whenever the stream breaks. It
// goes on behind the last number that came. EventSource could not send the token in a header.
export async function follow(heard, trouble) {
  let last = null;
  for (;;) {
    const ended = new AbortController();
    const hidden = () => document.hidden && ended.abort();
    document.addEventListener("visibilitychange", hidden);
    try {
      await shown();
      await recognize();
      recognized = true;
      const headers = { Accept: "text/event-stream", Authorization: `Bearer ${mine().token}` };
      if (last !== null) headers["Last-Event-ID"] = last;
      const answer = await fetch(`${API}events`, { headers, signal: ended.signal });
      if (!answer.ok) throw new Refused((await answer.json()).error);
      for await (const [id, kind, data] of messages(answer.body, ended)) {
        last = id ?? last;
        heard(kind, data);
      }
      throw new TypeError("the stream ended");
    } catch (error) {
      recognized = false;
      if (!document.hidden) trouble(error);
    } finally {
      document.removeEventListener("visibilitychange", hidden);
    }
    await new Promise((done) => setTimeout(done, AGAIN));
  }
}

function shown() {
  return new Promise((done) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

async function* messages(body, ended) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const silent = setTimeout(() => ended.abort(), SILENCE);
    const { done, value } = await reader.read();
    clearTimeout(silent);
    if (done) return;
    const blocks = (kept + value).split("\n\n");
    kept = blocks.pop();
    for (const block of blocks) {
      const field = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (field.event) yield [field.id ?? null, field.event, JSON.parse(field.data)];
    }
  }
}
