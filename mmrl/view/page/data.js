// The documents of the page and its state. URLs are made only from keys of documents and ids of pictures.
"use strict";

const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data:page").textContent);
const MOST_DOCUMENTS = 10; // of steps in memory
const documents = new Map(); // key -> promise of the document, the latest used last
const arrivals = new Map(); // key -> function that takes the document out of a script of the folder

// Called by each data/<key>.js of an exported folder.
function mmrlData(key, content) {
  arrivals.get(key)?.(content);
}

// Returns a promise of the document. `fresh` reads it again, because it grows while the run continues.
function load(key, fresh = false) {
  const read = { single: loadElement, folder: loadScript, live: loadFromServer }[page.mode];
  const promise = (!fresh && documents.get(key)) || read(key);
  documents.delete(key);
  documents.set(key, promise);
  promise.catch(() => documents.delete(key));
  const oldest = [...documents.keys()].filter((name) => !/^index$|metrics$/.test(name));
  if (oldest.length > MOST_DOCUMENTS) documents.delete(oldest[0]);
  return promise;
}

async function loadElement(key) {
  const holder = byId(`data:${key}`);
  if (!holder) throw new Error(`This page has no data named ${key}.`);
  return JSON.parse(holder.textContent);
}

function loadScript(key) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    const finish = (settle, value) => {
      arrivals.delete(key);
      script.remove();
      settle(value);
    };
    arrivals.set(key, (content) => finish(resolve, content));
    script.addEventListener("error", () => finish(reject, new Error(`data/${key}.js is missing or incomplete.`)));
    // A file that was cut off is an error of syntax: it loads, but does not call.
    script.addEventListener("load", () => {
      if (arrivals.has(key)) finish(reject, new Error(`data/${key}.js is incomplete.`));
    });
    script.src = `data/${key}.js`;
    document.head.append(script);
  });
}

async function loadFromServer(key) {
  const response = await fetch(`data/${key}.json?token=${encodeURIComponent(page.token)}`, { cache: "no-store" });
  if (!response.ok) throw new Error(`The server has no ${key} (${response.status}). Is mmrl view still running?`);
  return response.json();
}

// Returns the URL of a picture, or null if the id is not one that the page may load.
function mediaUrl(source) {
  if (!/^media\/[A-Za-z0-9_-]+\.jpg$/.test(source || "")) return null;
  if (page.mode === "folder") return source;
  if (page.mode === "live") return `${source}?token=${encodeURIComponent(page.token)}`;
  const holder = byId(`data:${source.replace(/\.jpg$/, "")}`);
  const url = holder ? JSON.parse(holder.textContent).url : "";
  return url.startsWith("data:image/") ? url : null;
}

// The state. The part of the URL after # restores all of it; a default is not written there.
const DEFAULTS = {
  view: "run", run: "", step: "", group: "",
  all: "", find: "", smooth: "", log: "", overlay: "1", stage: "",
  q: "", task: "", id: "", min: "", max: "", adv: "", inf: "", finish: "", flip: "", status: "", sort: "",
  color: "", marks: "1", table: "", folded: "1",
  sample: "", a: "", b: "", flips: "",
  bench: "", only: "", bq: "",
  cq: "", diff: "", theme: "",
};
let state = { ...DEFAULTS };

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
}

// Changes the state and the URL. `push` makes an entry in the browser's history.
function setState(changes, push = false) {
  Object.assign(state, changes);
  const hash = linkTo({});
  if (hash === (location.hash || "#")) return;
  if (push) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

function linkTo(changes) {
  const kept = Object.entries({ ...state, ...changes }).filter(([name, value]) => value !== DEFAULTS[name]);
  return `#${new URLSearchParams(kept)}`;
}
