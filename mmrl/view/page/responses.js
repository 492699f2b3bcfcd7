// One response: its text by author and token, its badges, and the table of its rewards.
"use strict";

const MOST_CHARACTERS = 20_000; // of a text at first; the rest comes on demand
const LONG_TEXT = 900; // characters above which a response is clamped in height
const LONG_THINKING = 400; // characters above which thinking is folded at first
const AUTHORS = ["policy", "demonstration", "forced", "environment", "demonstration_prefix"];

// The numbers that can colour tokens. `share` maps a number to -1..1; its sign picks the colour, its size the strength.
const TOKEN_COLOURS = {
  recorded_logprob: { name: "Log-prob of the sampler", share: (value) => value / 5, ends: ["\u22125 nats", "0"] },
  logprob: { name: "Log-prob of the learner", share: (value) => value / 5, ends: ["\u22125 nats", "0"] },
  ratio: { name: "Importance ratio", share: (value) => Math.log(value) / Math.log(1.5), ends: ["0.67", "1", "1.5"] },
  entropy: { name: "Entropy", share: (value) => value / 1.5, ends: ["0", "1.5 nats"] },
  advantage: { name: "Advantage", share: (value, scale) => value / (scale.advantage || 1) },
  clipped: { name: "Clipped", share: (value) => [0, -1, 1][value] ?? NaN, ends: ["lower bound", "no", "upper bound"] },
};
function shade(share) {
  const strength = (0.62 * Math.min(1, Math.abs(share))).toFixed(3);
  return `rgb(${share < 0 ? "229 96 46" : "52 120 240"} / ${strength})`;
}

function tokenLegend(scale) {
  const kind = TOKEN_COLOURS[state.color];
  if (!kind) return null;
  const bound = number(scale.advantage || 1, 2);
  const ends = kind.ends || [`\u2212${bound}`, "0", `+${bound}`];
  const shades = ends.length > 2 ? [-1, 0, 1] : ends[0] === "0" ? [0, 1] : [-1, 0];
  const background = `linear-gradient(90deg, ${shades.map(shade).join(", ")})`;
  return el(
    "div.scale", { role: "img", "aria-label": `${kind.name}: ${ends.join(", ")}` },
    el("span.ramp", { style: { background } }), el("span.ends", ends.map((end) => el("span", end))),
  );
}

// The text of a response. `options`: pattern (of a search), tokens (coloured), scale, span (that was read).
function responseText(rollout, options) {
  const body = el("div.text");
  const { thinking, response } = rollout;
  const isLong = thinking && thinking[1] - thinking[0] > LONG_THINKING;
  let folded = Boolean(isLong && state.folded === "1" && !options.pattern);
  let limit = Math.min(response.length, MOST_CHARACTERS);
  const draw = () => {
    show(body, textPieces(rollout, limit, { ...options, folded, fold }));
    if (!response) body.append(empty("(an empty response)"));
    const left = response.length - limit;
    if (left) body.append(button(".more", `Show more (${count(left, "character")} left)`, lengthen));
  };
  const fold = () => {
    folded = !folded;
    draw();
  };
  const lengthen = () => {
    limit = Math.min(response.length, limit + 10 * MOST_CHARACTERS);
    draw();
  };
  draw();
  return body;
}

// Returns an element for each segment. Its pieces lie between all offsets at which something changes.
function textPieces(rollout, limit, options) {
  const { segments } = rollout;
  const found = findMatches(rollout.response, options.pattern);
  const tokens = options.tokens && rollout.tokens ? tokenPlaces(rollout.tokens) : null;
  const ranges = [rollout.thinking, rollout.answer_chars, options.span, ...found, tokens && tokens.ends];
  const cuts = new Set([0, limit, ...segments.flatMap(({ chars }) => chars), ...ranges.filter(Boolean).flat()]);
  const ordered = [...cuts].filter((cut) => cut <= limit).sort((one, other) => one - other);
  let crops = 0;
  return segments.filter(({ chars }) => chars[0] < limit || chars[0] === chars[1]).map((segment) => {
    const [begin, end] = segment.chars;
    if (segment.crop) crops += 1;
    const part = segmentElement(segment, crops);
    const inside = ordered.filter((cut) => cut >= begin && cut <= end);
    addPieces(part, inside, rollout, { ...options, found, places: tokens });
    if (segment.shows) part.append(el("div.shows", mediaElement(segment.shows, 0, [])));
    return part;
  });
}

function addPieces(part, cuts, rollout, options) {
  const { thinking, answer_chars: answer, response } = rollout;
  for (let place = 0; place + 1 < cuts.length; place++) {
    const [start, end] = [cuts[place], cuts[place + 1]];
    const within = (range) => range && start >= range[0] && start < range[1];
    if (within(thinking)) {
      if (start === thinking[0]) part.append(foldButton(thinking, options));
      if (options.folded) continue;
    }
    const token = options.places ? options.places.at(start) : -1;
    const names = [
      within(thinking) && "thinking", within(answer) && "answer", within(options.span) && "read",
      options.found.some(within) && "found", token >= 0 && "token",
    ].filter(Boolean);
    const piece = response.slice(start, end);
    const element = names.length ? el(["span", ...names].join("."), piece) : visible(piece);
    if (token >= 0) colourToken(element, rollout, token, options.scale);
    part.append(element);
  }
}

function foldButton([start, end], { folded, fold }) {
  const label = folded ? `thinking, ${count(end - start, "character")}` : "fold";
  return button(".fold", label, fold, { "aria-expanded": String(!folded) });
}

function colourToken(element, { tokens }, token, scale) {
  const share = TOKEN_COLOURS[state.color].share(tokens[state.color][token], scale);
  if (Number.isFinite(share) && share !== 0) element.style.background = shade(share);
  // The loss leaves these out.
  if (tokens.author[token] > 1) element.classList.add("untrained");
  element.dataset.token = token;
}

// Where tokens begin and end in the text. A token whose end is unknown has no text.
function tokenPlaces(tokens) {
  const starts = new Map();
  const ends = [];
  let begin = 0;
  tokens.end.forEach((end, token) => {
    if (end <= begin) return;
    starts.set(begin, token);
    ends.push(begin, end);
    begin = end;
  });
  let latest = -1;
  const at = (place) => {
    latest = starts.get(place) ?? latest;
    return latest >= 0 && place < tokens.end[latest] ? latest : -1;
  };
  return { ends, at };
}

function segmentElement({ author, crop }, crops) {
  const known = AUTHORS.includes(author) ? author : "policy";
  const label = known === "policy" ? "" : crop ? `${known}, crop ${crops}` : known;
  return el(`${known === "environment" ? "div" : "span"}.segment.${known}`, label && el("span.author", label));
}

function tokenTip({ tokens }, token) {
  const rows = Object.entries(TOKEN_COLOURS).map(([key, { name }]) => [name, number(tokens[key][token], 4)]);
  rows[5][1] = { 0: "no", 1: "at the lower bound", 2: "at the upper bound" }[tokens.clipped[token]] || "\u2013";
  rows.push(["Author", AUTHORS[tokens.author[token]]]);
  const list = rows.map(([name, value]) => [el("dt", name), el("dd", value)]);
  return [el("div.tip-head", `token ${token}`, el("b", `id ${tokens.token_id[token]}`)), el("dl", list)];
}

// Each term's value, and its part of the total.
function rewardTable(rollout) {
  const rows = Object.entries(rollout.terms).map(([name, term]) => {
    const off = term.counts === false;
    return el(
      off ? "tr.off" : "tr", rowHead(name, off && badge("does not count", "quiet", "Its condition is not met.")),
      [term.value, term.transformed, term.weight].map((value) => el("td", number(value))),
      el("td", signed(term.contribution, 3)),
      el("td.reason", term.failure && badge(term.failure, "bad"), cut(term.reason || "", 2000)),
    );
  });
  const advantage = isNumber(rollout.advantage) && `advantage ${signed(rollout.advantage, 3)}`;
  const blank = el("td", { colspan: 3 });
  rows.push(el("tr.total", rowHead("Total"), blank, el("td", number(rollout.total)), el("td.reason", advantage)));
  return table("rewards", ["Term", "Value", "Transformed", "Weight", "Adds", "Reason"], rows);
}

// Action and reward of each turn in an environment.
function turnTable({ turns = [] }) {
  const rows = turns.map(({ action, state, valid, end, earned, advantage }, place) => el(
    "tr", [place + 1, cut(action || "", 300), state, number(earned), signed(advantage, 3), valid ? end : "invalid"]
      .map((cell) => el("td", cell)),
  ));
  return rows[0] && table("rewards.turns", ["Turn", "Action", "State", "Earned", "Advantage", ""], rows);
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most)}\u2026` : text;
}

// A response as a row of a card. `options`, beside those of its text: matched (by filters), side.
function responseElement(rollout, options) {
  const { total, advantage, response, terms, badges } = rollout;
  const row = el("section.response", { dataset: { rollout: `${options.side || ""}${rollout.rollout}` } });
  row.classList.toggle("unmatched", options.matched === false);
  const place = el("div");
  const toggle = (open) => {
    show(place, open && rewardTable(rollout));
    summary.setAttribute("aria-expanded", String(open));
  };
  const values = Object.entries(terms).map(([name, term]) => el("span", name, el("b", number(term.value))));
  const title = "How the total came about (r: for all)";
  const summary = button(".terms", values, () => toggle(!place.firstChild), { "aria-expanded": "false", title });
  if (state.table === "1") toggle(true);
  const dot = el("i", { style: { background: rewardColour(total, options.scale.low, options.scale.high) } });
  const sign = advantage > 0 ? "up" : advantage < 0 ? "down" : "";
  row.append(
    el(
      "div.score", el("span.sum", { title: "Total reward" }, dot, number(total)),
      isNumber(advantage) && el(`span.advantage.${sign}`, { title: "Advantage" }, signed(advantage)),
      rollout.trained && el("span.learned", { title: "Its tokens had a gradient." }, "trained"),
    ),
    el(
      "div",
      el("header", el("span.who", `Response ${rollout.rollout}`), badges.map((one) => badge(...one)), el("span.grow"),
        isNumber(rollout.tokens_n) && el("span.who", count(rollout.tokens_n, "token"))),
      turnTable(rollout),
      responseText(rollout, options),
      el("footer",
        rollout.answer && el("span.read-as", "answer ", el("b", cut(rollout.answer, 200))),
        values.length > 0 && summary),
      place,
    ),
  );
  if (response.length > LONG_TEXT || response.split("\n").length > 14) clamp(row);
  return row;
}

function clamp(row) {
  row.classList.add("clamped");
  const more = button(".more", "Show the whole response", () => {
    row.classList.remove("clamped");
    more.remove();
  });
  row.querySelector(".text").after(more);
}
