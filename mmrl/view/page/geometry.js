// Pictures and video frames with gold and predicted boxes, points, spans and tool crops drawn over them as SVG.
"use strict";

const MOST_WIDTH = 460; // pixels of a picture in a card; a click shows it larger
const FRAME_WIDTH = 168;

// The colour of a reward: from red to blue, since green is the target's.
function rewardColour(value, low, high) {
  if (!isNumber(value)) return "var(--muted)";
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 1;
  return `color-mix(in oklab, var(--high) ${Math.round(100 * share)}%, var(--low))`;
}

// Returns what a card draws: gold marks, rollouts' marks in the colour of their reward, crops of tools.
// `side` distinguishes the rollouts of two steps in one card.
function collectMarks(group, scale, side = "") {
  const marks = group.marks.map((mark) => ({ ...mark, kind: "gold", owner: null }));
  for (const rollout of group.rollouts) {
    const owned = { owner: `${side}${rollout.rollout}`, stroke: rewardColour(rollout.total, scale.low, scale.high) };
    for (const mark of rollout.marks) marks.push({ ...mark, ...owned, kind: "predicted" });
    rollout.segments.filter(({ crop }) => crop).forEach(({ crop }, place) => {
      marks.push({ shape: "box", medium: 0, at: crop, label: String(place + 1), ...owned, kind: "crop" });
    });
  }
  return marks;
}

// Returns a picture or a strip of frames with its marks. If the size is unknown, any shape will do.
function mediaElement(given, place, marks) {
  const medium = given.width && given.height ? given : { ...given, width: 400, height: 300, original: null };
  const own = marks.filter((mark) => mark.medium === place);
  const flat = own.filter((mark) => mark.shape !== "span");
  const { frames } = medium;
  if (medium.kind !== "video") return el("figure.medium", frameElement(medium, frames[0], flat), mediaCaption(given));
  const isIn = (mark, number) => !isNumber(mark.second) || frameOf(mark, frames) === number;
  const strip = frames.map((frame, number) => el(
    "div.frame", frameElement(medium, frame, flat.filter((mark) => isIn(mark, number))),
    el("span.time", frame.second === null ? `frame ${number + 1}` : seconds(frame.second)),
  ));
  return el(
    "figure.medium", el("div.strip", { tabindex: 0, "aria-label": `Frames of ${medium.name}` }, strip),
    timeline(medium, own.filter((mark) => mark.shape === "span")), mediaCaption(given),
  );
}

// Returns the number of the frame that is nearest to a box of a track.
function frameOf({ second }, frames) {
  const distances = frames.map((frame) => Math.abs(frame.second - second));
  return distances.indexOf(Math.min(...distances));
}

function mediaCaption({ name, width, height, original, frames, kind }) {
  const [before, after] = [original || [], [width, height]].map((size) => size.join("\u00d7"));
  const size = !original || before === after ? after : `${before} \u2192 ${after}`;
  return el(
    "figcaption", el("span.name", name), width > 0 && el("span", size),
    kind === "video" && el("span", count(frames.length, "frame")),
  );
}

function frameElement(medium, frame, marks, large = false) {
  const url = frame && mediaUrl(frame.src);
  const picture = el("div.picture", { style: { "aspect-ratio": `${medium.width} / ${medium.height}` } });
  const missing = (why) => picture.prepend(el("div.missing", why));
  if (url) {
    const image = el("img", { src: url, alt: `${medium.name}, as the model saw it`, decoding: "async" });
    image.addEventListener("error", () => {
      image.remove();
      missing("The picture cannot be read");
    });
    picture.append(image);
  } else missing(medium.problem || "No picture was kept");
  picture.append(overlay(medium, marks));
  if (large) return picture;
  const width = medium.kind === "video" ? FRAME_WIDTH : Math.min(MOST_WIDTH, Math.max(medium.width, 240));
  picture.style.width = `${width}px`;
  picture.classList.toggle("enlarged", medium.width * 2 < width);
  picture.tabIndex = 0;
  picture.addEventListener("click", () => enlarge(medium, frame, marks));
  picture.addEventListener("keydown", ({ key }) => key === "Enter" && enlarge(medium, frame, marks));
  return picture;
}

function overlay({ width, height }, marks) {
  const box = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  // Gold first, so that thin predictions lie on top of it.
  const ordered = [...marks].sort((one, other) => (other.kind === "gold") - (one.kind === "gold"));
  return svg("svg.marks", box, ordered.map((mark) => markElement(mark, width, height)));
}

function ownerName({ owner }) {
  return owner === null ? "target" : `response ${owner}`;
}

function markElement(mark, width, height) {
  const [x, y] = [mark.at[0] * width, mark.at[1] * height];
  const size = Math.max(width, height);
  const arm = 0.025 * size;
  const [name, place] = mark.shape === "box"
    ? ["rect", { x, y, width: Math.max(0, mark.at[2] * width - x), height: Math.max(0, mark.at[3] * height - y) }]
    : ["path", { d: `M${x - arm} ${y - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}` }];
  const group = markGroup(mark, mark.label ? `${ownerName(mark)}: ${mark.label}` : ownerName(mark));
  group.append(svg(`${name}.halo`, place), svg(`${name}.shape`, { ...place, style: stroked("stroke", mark) }));
  if (mark.label) {
    const letter = 0.05 * size;
    const above = y > 1.3 * letter ? y - 0.3 * letter : y + letter;
    group.append(svg("text", { x: x + 0.2 * letter, y: above, "font-size": letter }, mark.label));
  }
  return group;
}

function markGroup(mark, title) {
  const dataset = mark.owner === null ? {} : { rollout: mark.owner };
  return svg(`g.mark.${mark.kind}`, { dataset }, svg("title", title));
}

function stroked(property, { stroke }) {
  return stroke ? { [property]: stroke } : {};
}

// Spans as bars over a time line: the target on top, then a row for each response.
function timeline({ frames }, spans) {
  if (!spans.length) return null;
  const times = frames.map((frame) => frame.second ?? 0);
  const end = Math.max(0.001, ...times, ...spans.map((mark) => mark.at[1]));
  const x = (second) => Math.max(0, (1000 * second) / end);
  const owners = [...new Set(spans.map((mark) => mark.owner))];
  const height = owners.length * 7 + 4;
  const box = { viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", style: { height: `${height}px` } };
  const ticks = times.map((time) => svg("line.tick", { x1: x(time), x2: x(time), y1: 0, y2: height }));
  const bars = spans.map((mark) => {
    const [from, to] = mark.at;
    const group = markGroup(mark, `${ownerName(mark)}: ${seconds(from)} \u2013 ${seconds(to)}`);
    const place = { x: x(from), y: owners.indexOf(mark.owner) * 7 + 3, width: Math.max(3, x(to) - x(from)), height: 5 };
    group.append(svg("rect.timebar", { ...place, rx: 2, style: stroked("fill", mark) }));
    return group;
  });
  const drawing = svg("svg.timeline.marks", box, ticks, bars);
  return el("div.times", drawing, el("div.ends", el("span", seconds(0)), el("span", seconds(end))));
}

function openDialog(name, label, ...content) {
  const dialog = el(`dialog.${name}`, { id: name, "aria-label": label, onclick: () => dialog.close() }, content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function enlarge(medium, frame, marks) {
  const picture = frameElement(medium, frame, marks, true);
  const scale = Math.min((0.92 * innerWidth) / medium.width, (0.86 * innerHeight) / medium.height);
  picture.style.width = `${Math.round(scale * medium.width)}px`;
  openDialog("large", medium.name, picture, mediaCaption(medium));
}
