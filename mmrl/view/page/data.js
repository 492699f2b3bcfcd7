// Documents, elements and the state of the page. Everything else is built on these three.
//
// What models and datasets wrote is untrusted. It reaches the page only through `el`, which makes text nodes, so it is
// never parsed as HTML; URLs are only made from the ids of pictures.
"use strict";

const page = JSON.parse(document.getElementById("data:page").textContent);
const MOST_DOCUMENTS = 10; // of steps in memory; one with tokens takes some 50 MB
const documents = new Map(); // key -> promise of the document, the latest used last
const arrivals = new Map(); // key -> function that takes the document out of a script of the folder

// Called by each data/<key>.js of an exported folder.
function mmrlData(key, content) {
  const arrive = arrivals.get(key);
  if (arrive) arrive(content);
}

// Returns a promise of the document. `fresh` reads it again, for what grows while the run goes on.
function load(key, fresh = false) {
  let promise = fresh ? null : documents.get(key);
  if (!promise) promise = { single: loadElement, folder: loadScript, live: loadFromServer }[page.mode](key);
  documents.delete(key);
  documents.set(key, promise);
  promise.catch(() => documents.delete(key));
  const oldest = [...documents.keys()].filter((name) => !/^index$|metrics$/.test(name));
  if (oldest.length > MOST_DOCUMENTS) documents.delete(oldest[0]);
  return promise;
}

async function loadElement(key) {
  const holder = document.getElementById(`data:${key}`);
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
  if (!/^media\/[A-Za-z0-9_-]+\.webp$/.test(source || "")) return null;
  if (page.mode === "folder") return source;
  if (page.mode === "live") return `${source}?token=${encodeURIComponent(page.token)}`;
  const holder = document.getElementById(`data:${source.replace(/\.webp$/, "")}`);
  const url = holder ? JSON.parse(holder.textContent).url : "";
  return url.startsWith("data:image/") ? url : null;
}

// Makes an element: el("div.box", { title: "x" }, child, ...). Properties may be left out; they are style (an object),
// dataset, on<event> (a function), everything else an attribute; null and false set none. Children are nodes, text,
// arrays of these, or nothing.
function el(name, ...given) {
  return fill((tag) => document.createElement(tag), name, given);
}

function svg(name, ...given) {
  return fill((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag), name, given);
}

function fill(create, name, given) {
  const [tag, ...classes] = name.split(".");
  const element = create(tag);
  element.classList.add(...classes);
  const properties = given[0] && Object.getPrototypeOf(given[0]) === Object.prototype ? given.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    else if (key === "dataset") Object.assign(element.dataset, value);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : key === "title" ? visible(value) : value);
  }
  add(element, given);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

// The state, all of it text, so that the part of the URL after # restores everything. A default is not written there.
const DEFAULTS = {
  view: "run", run: "", step: "", group: "",
  metrics: "", find: "", smooth: "", log: "", overlay: "1",
  q: "", task: "", id: "", min: "", max: "", adv: "", inf: "", finish: "", flip: "", status: "", sort: "",
  color: "", marks: "1", table: "", folded: "1",
  sample: "", a: "", b: "", flips: "",
  bench: "", only: "", bq: "",
  cq: "", diff: "",
};
let state = { ...DEFAULTS };

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
}

// Changes the state and the URL. `push` makes an entry in the browser's history, for what one would go back from.
function setState(changes, push = false) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const hash = `#${new URLSearchParams(kept)}`;
  if (hash === (location.hash || "#")) return;
  if (push) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

function linkTo(changes) {
  const kept = Object.entries({ ...state, ...changes }).filter(([name, value]) => value !== DEFAULTS[name]);
  return `#${new URLSearchParams(kept)}`;
}
