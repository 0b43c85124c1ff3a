// Talks to the node: its token, calls, and the stream of events.

const API = "/api/v1/";
const KEPT = "lowcomm-browser";
const BY_LINK = "not let in, or the node was started again: `lowcomm-node web` prints a link";
const AGAIN = 2000; // milliseconds between two tries
const SILENCE = 40000; // milliseconds; the node says something every 15 seconds

export class Refused extends Error {}
export class NotLetIn extends Refused {}

function mine() {
  return sessionStorage.getItem(KEPT);
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
  if (answer.ok) sessionStorage.setItem(KEPT, (await answer.json()).token);
}

export async function call(path, body) {
  const headers = { Authorization: `Bearer ${mine()}` };
  const answer =
    body === undefined ? await fetch(API + path, { headers }) : await post(path, body, headers);
  const told = await answer.json();
  if (answer.status === 401) throw new NotLetIn(BY_LINK);
  if (!answer.ok) throw new Refused(told.error);
  return told;
}

// Events of the node: `heard(kind, data)` for each, `trouble(error)` whenever the stream breaks.
// EventSource could not send the token in a header.
export async function follow(heard, trouble) {
  for (;;) {
    const ended = new AbortController();
    const hidden = () => document.hidden && ended.abort();
    document.addEventListener("visibilitychange", hidden);
    try {
      await shown();
      const headers = { Accept: "text/event-stream", Authorization: `Bearer ${mine()}` };
      const answer = await fetch(`${API}events`, { headers, signal: ended.signal });
      if (answer.status === 401) throw new NotLetIn(BY_LINK);
      if (!answer.ok) throw new Refused((await answer.json()).error);
      for await (const [kind, data] of messages(answer.body, ended)) heard(kind, data);
      throw new TypeError("the stream ended");
    } catch (error) {
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
      if (field.event) yield [field.event, JSON.parse(field.data)];
    }
  }
}
