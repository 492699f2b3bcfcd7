// One response: its text by author and token, its badges, and the table of its rewards.
"use strict";

const MOST_CHARACTERS = 20_000; // of a text at first; what is beyond comes on demand
const LONG_TEXT = 900; // characters above which a response is clamped in height
const LONG_THINKING = 400; // characters above which thinking is folded at first
const AUTHORS = ["policy", "demonstration", "forced", "environment"];
const TRAINED_AUTHORS = new Set(["policy", "demonstration"]);
const TOOL_FAILURE = /The tool (did not answer|was stopped|failed|refuses|returned)|There is no tool |This is no call/;

// What tokens can be coloured by. `share` maps a number to -1..1; its sign picks the colour, its size the strength.
const TOKEN_COLOURS = {
  recorded: { name: "Log-prob of the sampler", share: (value) => value / 5, ends: [`${MINUS}5 nats`, "0"] },
  logprob: { name: "Log-prob of the learner", share: (value) => value / 5, ends: [`${MINUS}5 nats`, "0"] },
  ratio: { name: "Importance ratio", share: (value) => Math.log(value) / Math.log(1.5), ends: ["0.67", "1", "1.5"] },
  entropy: { name: "Entropy", share: (value) => value / 3, ends: ["0", "3 nats"] },
  advantage: { name: "Advantage", share: (value, scale) => value / (scale.advantage || 1), ends: null },
  clipped: { name: "Clipped", share: (value) => [0, -1, 1][value] ?? NaN, ends: ["lower bound", "no", "upper bound"] },
};
const LOW_RGB = "229 96 46";
const HIGH_RGB = "52 120 240";

function shade(share) {
  if (!Number.isFinite(share) || share === 0) return null;
  const strength = Math.min(1, Math.abs(share));
  return `rgb(${share < 0 ? LOW_RGB : HIGH_RGB} / ${(0.62 * strength).toFixed(3)})`;
}

function tokenLegend(scale) {
  const kind = TOKEN_COLOURS[state.color];
  if (!kind) return null;
  const low = `rgb(${LOW_RGB} / 0.62)`;
  const high = `rgb(${HIGH_RGB} / 0.62)`;
  const ramps = { recorded: `${low}, transparent`, logprob: `${low}, transparent`, entropy: `transparent, ${high}` };
  const bound = number(scale.advantage || 1, 2);
  const ends = kind.ends || [`${MINUS}${bound}`, "0", `+${bound}`];
  return el("div.scale", { role: "img", "aria-label": `${kind.name}: ${ends.join(", ")}` },
    el("span.ramp", { style: { background: `linear-gradient(90deg, ${ramps[state.color] || `${low}, transparent, ${high}`})` } }),
    el("span.ends", ends.map((end) => el("span", end))),
  );
}

function isTruncated(rollout) {
  return rollout.finish === "length";
}

// Returns "up" for wrong to right, "down" for right to wrong, "same", or null without a second look.
function flipOf(rollout) {
  if (rollout.first_correct === null || rollout.first_correct === undefined) return null;
  if (rollout.is_correct === null || rollout.is_correct === undefined) return null;
  if (rollout.first_correct === rollout.is_correct) return "same";
  return rollout.is_correct ? "up" : "down";
}

function toolFailed(rollout) {
  const isFailure = ({ author, chars }) => author === "environment" && chars && TOOL_FAILURE.test(rollout.response.slice(...chars));
  return rollout.segments.some(isFailure);
}

// Says in words what became of a rollout in training; null where there is no training.
function learningOf(rollout, kind) {
  const { status, reason, times } = rollout.selection || {};
  if (rollout.dropped) return { text: "dropped", why: "It could not be scored, and left its group." };
  if (kind !== "train" || !status) return null;
  if (status === "rejected") return { text: `rejected${reason ? `: ${reason}` : ""}`, why: "Dynamic sampling rejected its group." };
  if (status === "no_room") return { text: "no room", why: "The step had enough groups without it." };
  if (status === "replayed") {
    return { text: "replayed", why: `Drawn in an earlier step and trained on again${times ? `, ${count(times, "time")} so far` : ""}.`, trained: true };
  }
  if (!rollout.trained) return { text: `not trained${reason ? `: ${reason}` : ""}`, why: "No token of it was trained." };
  if (rollout.advantage === 0) return { text: "zero advantage", why: "Its policy loss has no gradient." };
  return { text: "trained", why: "Its tokens had a gradient.", trained: true };
}

function badge(text, kind, title) {
  return el("span", { class: `badge ${kind || ""}`, title: title || null }, text);
}

function responseBadges(rollout, kind) {
  const flips = {
    up: badge("wrong \u2192 right", "good", "Rethinking corrected it."),
    down: badge("right \u2192 wrong", "bad", "Rethinking spoiled it."),
    same: badge(rollout.is_correct ? "stayed right" : "stayed wrong", "", "Rethinking did not change the verdict."),
  };
  const learning = learningOf(rollout, kind);
  const selection = rollout.selection || {};
  return [
    learning && learning.text !== "trained" && badge(learning.text, learning.trained ? "info" : "quiet", learning.why),
    flips[flipOf(rollout)],
    isTruncated(rollout) && badge("truncated", "warn", "It was cut at max_new_tokens."),
    toolFailed(rollout) && badge("tool failed", "bad", "A tool refused, failed or could not read a call."),
    isNumber(rollout.same_text_as) && badge(`duplicate of ${rollout.same_text_as}`, "quiet", "The same text, token by token."),
    !isNumber(rollout.same_text_as) && isNumber(rollout.same_answer_as) && badge(`same answer as ${rollout.same_answer_as}`, "quiet"),
    isNumber(rollout.parent) && badge(`continues ${rollout.parent}`, "info", "A forced second look at this response."),
    rollout.age > 0 && badge(`${count(rollout.age, "step")} off-policy`, "warn", "Policy versions between sampling and learning."),
    selection.carried_over && badge("carried over", "info"),
    rollout.dropped && Object.entries(rollout.dropped).map(([term, why]) => badge(`${term}: ${why}`, "bad")),
  ].flat().filter(Boolean);
}

// Builds the text of a response. Its pieces lie between all offsets where something changes.
function responseText(rollout, options) {
  const text = rollout.response;
  const body = el("div.text");
  let limit = Math.min(text.length, MOST_CHARACTERS);
  const thinking = rollout.thinking;
  const long = thinking && thinking[1] - thinking[0] > LONG_THINKING;
  let folded = Boolean(thinking) && (options.folded ?? (long && state.folded === "1" && !options.pattern));
  const draw = () => {
    body.replaceChildren(...textPieces(rollout, text, limit, { ...options, folded, unfold }));
    if (limit < text.length) {
      const left = text.length - limit;
      body.append(el("button", { type: "button", class: "more", onclick: showMore }, `Show more (${count(left, "character")} left)`));
    }
  };
  const unfold = (event) => {
    event.stopPropagation();
    folded = !folded;
    draw();
  };
  const showMore = (event) => {
    event.stopPropagation();
    limit = Math.min(text.length, limit + 10 * MOST_CHARACTERS);
    draw();
  };
  draw();
  if (!text.length) body.append(el("span.empty", "(an empty response)"));
  return body;
}

function textPieces(rollout, text, limit, options) {
  const segments = coverText(rollout.segments, text.length);
  const found = findMatches(text, options.pattern);
  const tokens = options.tokens && rollout.tokens ? tokenStarts(tokensOf(rollout)) : null;
  const cuts = new Set([0, limit]);
  for (const range of [rollout.thinking, rollout.answer_chars, options.span, ...found]) if (range) range.forEach((cut) => cuts.add(cut));
  for (const segment of segments) segment.chars.forEach((cut) => cuts.add(cut));
  if (tokens) tokens.ends.forEach((end) => cuts.add(end));
  const ordered = [...cuts].filter((cut) => cut >= 0 && cut <= limit).sort((one, other) => one - other);
  const parts = [];
  let crops = 0;
  for (const segment of segments) {
    if (segment.chars[0] >= limit && segment.chars[1] > segment.chars[0]) break;
    if (segment.crop) crops += 1;
    const part = segmentElement(segment, crops);
    const inside = ordered.filter((cut) => cut >= segment.chars[0] && cut <= segment.chars[1]);
    addPieces(part, inside, rollout, text, { ...options, found, tokenized: tokens });
    if (segment.shows) part.append(shownElement(segment.shows));
    parts.push(part);
  }
  return parts;
}

function addPieces(part, cuts, rollout, text, options) {
  const within = (range, start) => range && start >= range[0] && start < range[1];
  for (let place = 0; place + 1 < cuts.length; place++) {
    const [start, end] = [cuts[place], cuts[place + 1]];
    if (within(rollout.thinking, start)) {
      if (start === rollout.thinking[0]) part.append(foldButton(rollout.thinking, options));
      if (options.folded) continue;
    }
    const names = [];
    if (within(rollout.thinking, start)) names.push("thinking");
    if (within(rollout.answer_chars, start)) names.push("answer");
    if (within(options.span, start)) names.push("read");
    if (options.found.some((range) => within(range, start))) names.push("found");
    const token = options.tokenized ? options.tokenized.at(start) : -1;
    if (token >= 0) names.push("token");
    const piece = text.slice(start, end);
    if (!names.length) {
      add(part, [piece]);
      continue;
    }
    const element = el("span", { class: names.join(" ") }, piece);
    if (token >= 0) colourToken(element, rollout, token, options.scale);
    part.append(element);
  }
}

function foldButton(range, options) {
  const label = options.folded ? `thinking, ${count(range[1] - range[0], "character")}` : "fold";
  return el("button", { type: "button", class: "fold", "aria-expanded": String(!options.folded), onclick: options.unfold }, label);
}

function colourToken(element, rollout, token, scale) {
  const tokens = tokensOf(rollout);
  const background = shade(TOKEN_COLOURS[state.color].share(tokens[state.color][token], scale));
  if (background) element.style.background = background;
  if (!TRAINED_AUTHORS.has(AUTHORS[tokens.author[token]])) element.classList.add("untrained");
  element.dataset.token = token;
}

const TOKEN_ARRAYS = {
  end: Int32Array, id: Int32Array, clipped: Int8Array,
  recorded: Float32Array, logprob: Float32Array, ratio: Float32Array, entropy: Float32Array, advantage: Float32Array,
};

// Returns the numbers of a rollout's tokens, decoded from base64 when they are first asked for; NaN is unknown.
function tokensOf(rollout) {
  const { tokens } = rollout;
  if (typeof tokens.end !== "string") return tokens;
  for (const [name, Numbers] of Object.entries(TOKEN_ARRAYS)) {
    const bytes = Uint8Array.from(atob(tokens[name]), (character) => character.charCodeAt(0));
    tokens[name] = new Numbers(bytes.buffer);
  }
  return tokens;
}

// Where tokens begin and end in the text. One whose end is unknown shows no text of its own.
function tokenStarts(tokens) {
  const starts = new Map();
  const ends = [];
  let begin = 0;
  tokens.end.forEach((end, index) => {
    if (end > begin) {
      starts.set(begin, index);
      ends.push(begin, end);
      begin = end;
    }
  });
  let latest = -1;
  let until = 0;
  const at = (place) => {
    if (starts.has(place)) {
      latest = starts.get(place);
      until = tokens.end[latest];
    }
    return place < until ? latest : -1;
  };
  return { ends, at };
}

// Segments that cover the text from its beginning to its end; text without an author counts as the policy's.
function coverText(segments, length) {
  const covered = [];
  let begin = 0;
  for (const segment of segments) {
    const [start, end] = segment.chars || [begin, begin];
    if (start > begin) covered.push({ author: "policy", chars: [begin, start] });
    covered.push({ ...segment, chars: [Math.max(begin, start), Math.max(begin, end)] });
    begin = Math.max(begin, end);
  }
  if (begin < length) covered.push({ author: "policy", chars: [begin, length] });
  return covered;
}

function segmentElement(segment, crops) {
  const known = AUTHORS.includes(segment.author) ? segment.author : "policy";
  const part = el(known === "environment" ? "div" : "span", { class: `segment ${known}` });
  const label = { forced: "forced", demonstration: "demonstration", environment: segment.crop ? `environment, crop ${crops}` : "environment" }[known];
  if (label) part.append(el("span.author", label));
  return part;
}

function shownElement(medium) {
  return el("div.shows", mediaElement(medium, 0, []));
}

const TOKEN_ROWS = [
  ["log-prob, sampler", "recorded"], ["log-prob, learner", "logprob"], ["ratio", "ratio"],
  ["entropy", "entropy"], ["advantage", "advantage"],
];

function tokenTip(rollout, token) {
  const tokens = tokensOf(rollout);
  const clipped = { 0: "no", 1: "at the lower bound", 2: "at the upper bound" }[tokens.clipped[token]];
  const rows = TOKEN_ROWS.map(([name, key]) => [name, number(tokens[key][token], 4)]);
  rows.push(["clipped", clipped || "\u2013"], ["author", AUTHORS[tokens.author[token]] || "\u2013"]);
  return [
    el("div.tip-head", `token ${token}`, el("b", `id ${tokens.id[token]}`)),
    el("dl", rows.map(([name, value]) => [el("dt", name), el("dd", value)])),
  ];
}

// The table of rewards: what each term gave, and what it added to the total.
function rewardTable(rollout) {
  const terms = Object.entries(rollout.terms || {});
  if (!terms.length) return el("p.empty", "This response has no rewards.");
  const heads = ["Term", "Value", "Transformed", "Weight", "Adds", "Reason"];
  const rows = terms.map(([name, term]) => el(
    "tr", { class: term.counts === false ? "off" : "" },
    el("th", { scope: "row" }, name, term.counts === false && badge("does not count", "quiet", "A condition of this term is not met.")),
    el("td", number(term.value)), el("td", number(term.transformed)), el("td", number(term.weight)),
    el("td", !isNumber(term.contribution) ? "\u2013" : signed(term.contribution, 3)),
    el("td.reason", term.failure && badge(term.failure, "bad"), cut(term.reason || "", 2000)),
  ));
  const total = el("tr.total", el("th", { scope: "row", colspan: 4 }, "Total"), el("td", number(rollout.total)),
    el("td.reason", !isNumber(rollout.advantage) ? "" : `advantage ${signed(rollout.advantage, 3)}`),
  );
  return el("div.scroll", el("table.rewards",
    el("thead", el("tr", heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", rows, total),
  ));
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most)}\u2026` : text;
}

// A response as a row of a card. `options`: kind of step, scale, pattern, tokens, matched, label.
function responseElement(rollout, options) {
  const chosen = rewardColour(rollout.total, options.scale.low, options.scale.high);
  const learning = learningOf(rollout, options.kind);
  const clamped = rollout.response.length > LONG_TEXT || rollout.response.split("\n").length > 14;
  const text = responseText(rollout, options);
  const row = el("section", {
    class: `response${options.matched === false ? " unmatched" : ""}${clamped && !options.open ? " clamped" : ""}`,
    dataset: { rollout: rollout.rollout }, "aria-label": `Response ${rollout.rollout}`,
  });
  const table = el("div.table");
  const toggle = (open) => {
    table.replaceChildren(...(open ? [rewardTable(rollout)] : []));
    button.setAttribute("aria-expanded", String(open));
  };
  const button = el("button", {
    type: "button", class: "terms", "aria-expanded": "false", title: "Show how the total came about (r: for all)",
    onclick: () => toggle(button.getAttribute("aria-expanded") !== "true"),
  }, Object.entries(rollout.terms || {}).map(([name, term]) => el("span", name, el("b", number(term.value)))));
  row.append(
    el("div.score",
      el("span.total", { title: "Total reward" }, el("i", { style: { background: chosen } }), number(rollout.total)),
      isNumber(rollout.advantage) && el("span", { class: `advantage ${rollout.advantage > 0 ? "up" : rollout.advantage < 0 ? "down" : ""}`, title: "Advantage" }, signed(rollout.advantage)),
      learning && learning.trained && el("span.learned", { title: learning.why }, "trained"),
    ),
    el("div.main",
      el("header",
        el("span.who", options.label || `Response ${rollout.rollout}`),
        responseBadges(rollout, options.kind),
        el("span.grow"),
        el("span.length", count(rollout.tokens_n ?? 0, "token")),
      ),
      text,
      clamped && !options.open && el("button", { type: "button", class: "more unclamp", onclick: (event) => {
        row.classList.remove("clamped");
        event.target.remove();
      } }, "Show the whole response"),
      el("footer", typeof rollout.answer === "string" && el("span.answer-text", { title: "The answer that was read" }, "answer ", el("b", cut(rollout.answer, 200))), button),
      table,
    ),
  );
  if (state.table === "1") toggle(true);
  return row;
}
