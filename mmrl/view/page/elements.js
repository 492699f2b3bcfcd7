// Elements and the controls that are made of them.
//
// Text of models and datasets is untrusted. `el` makes text nodes of it, so it is never parsed as HTML.
"use strict";

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
  element.classList.add(...classes.filter(Boolean));
  const properties = given[0] && Object.getPrototypeOf(given[0]) === Object.prototype ? given.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if ((value ?? false) === false) continue;
    if (key === "style") for (const [part, setting] of Object.entries(value)) element.style.setProperty(part, setting);
    else if (key === "dataset") Object.assign(element.dataset, value);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : key === "title" ? visible(value) : value);
  }
  for (const child of given.flat(Infinity)) {
    if (child instanceof Node) element.append(child);
    else if (child || child === 0) element.append(visible(child));
  }
  return element;
}

function show(host, ...children) {
  host.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

function button(name, label, action, properties) {
  return el(`button${name}`, { ...properties, onclick: action }, label);
}

// Controls put what is typed or chosen into the part of the state called `name`, and then call `changed`.
function setter(name, changed, read = ({ value }) => value) {
  return ({ target }) => {
    setState({ [name]: read(target) });
    changed();
  };
}

function textBox(name, label, changed, properties) {
  const oninput = wait(150, setter(name, changed));
  const common = { type: "search", id: `f-${name}`, placeholder: label, "aria-label": label, oninput };
  const box = el("input", { ...common, ...properties });
  box.value = state[name];
  return box;
}

function checkBox(name, label, changed, properties) {
  const onchange = setter(name, changed, ({ checked }) => (checked ? "1" : "0"));
  const box = el("input", { type: "checkbox", id: `f-${name}`, onchange });
  box.checked = state[name] === "1";
  return el("label.check", properties || {}, box, label);
}

function choice(name, label, options, changed) {
  const list = options.map(([value, text]) => el("option", { value }, text));
  const select = el("select", { id: `f-${name}`, onchange: setter(name, changed) }, list);
  select.value = state[name];
  return el("label.choice", el("span", label), select);
}

function table(name, heads, rows) {
  const head = el("thead", el("tr", heads.map((text) => el("th", { scope: "col" }, text))));
  return el("div.scroll", el(`table.${name}`, head, el("tbody", rows)));
}

function rowHead(...children) {
  return el("th", { scope: "row" }, ...children);
}

function badge(text, kind = "", title = null) {
  return el(`span.badge.${kind}`, { title }, text);
}

function section(id, title, hint, ...content) {
  const heading = el("div.block-head", el("h2", { id: `${id}-title` }, title), hint && el("p.hint", hint));
  return el("section.block", { id, "aria-labelledby": `${id}-title` }, heading, content);
}

function empty(text) {
  return el("p.empty", text);
}

function problem(error) {
  return el("p.notice", error.message);
}

function showPaged(list, items, make, most = 40) {
  const place = list.querySelectorAll(":scope > article").length;
  list.append(...items.slice(place, place + most).map(make));
  const left = items.length - place - most;
  if (left <= 0) return;
  const more = button(".more", `Show more (${left.toLocaleString("en")} left)`, () => {
    more.remove();
    showPaged(list, items, make, most);
  });
  list.append(more);
}
