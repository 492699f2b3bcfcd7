// Text and numbers for people. Invisible characters are shown. Offsets into a text count UTF-16 units, as slice does.
"use strict";

// Controls but tab and line feed, marks and overrides of direction, what has no width, line separators, tags.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]", "gu",
);

function visible(text) {
  return String(text).replace(INVISIBLE, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// Returns [start, end] of each match in a text.
function findMatches(text, pattern) {
  const found = [];
  if (!pattern || !text) return found;
  for (const match of text.matchAll(pattern)) {
    if (match[0]) found.push([match.index, match.index + match[0].length]);
    if (found.length === 1000) break;
  }
  return found;
}

// Returns the pattern of a search box, /.../ or plain text; null if it is empty or malformed.
function searchPattern(query) {
  if (!query) return null;
  const written = query.match(/^\/(.+)\/([ims]*)$/);
  try {
    if (written) return new RegExp(written[1], [...new Set(`gu${written[2]}`)].join(""));
  } catch {
    return null;
  }
  return new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
}

function matches(pattern, text) {
  if (!pattern || !text) return false;
  pattern.lastIndex = 0;
  return pattern.test(text);
}

function isNumber(value) {
  return typeof value === "number" && !Number.isNaN(value);
}

const MINUS = "\u2212";

// Returns a number with at most `digits` significant ones; an en dash if there is none.
function number(value, digits = 3) {
  if (Number.isNaN(value ?? NaN)) return "\u2013";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e6 || size < 1e-3) text = value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  else if (Number.isInteger(value)) text = String(value);
  else text = String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
  return text.replaceAll("-", MINUS);
}

function signed(value, digits = 2) {
  if (!isNumber(value)) return "\u2013";
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : (value > 0 ? "+" : MINUS) + text;
}

function count(quantity, noun) {
  return `${quantity.toLocaleString("en")} ${noun}${quantity === 1 ? "" : "s"}`;
}

function seconds(value) {
  const minutes = Math.floor(value / 60);
  return `${minutes}:${(value - 60 * minutes).toFixed(1).padStart(4, "0")}`;
}

function mean(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function spread(values) {
  const known = values.filter(isNumber);
  return known.length ? Math.max(...known) - Math.min(...known) : null;
}

function wait(milliseconds, action) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}
