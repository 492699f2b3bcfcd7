// The numbers of a step's tokens, from the .npz file that the run wrote: a ZIP archive of NumPy arrays.
"use strict";

const TOKEN_ARRAYS = {
  offset: BigInt64Array, end: Int32Array, token_id: Int32Array, author: Uint8Array, clipped: Int8Array,
  recorded_logprob: Float32Array, logprob: Float32Array, ratio: Float32Array, entropy: Float32Array,
  advantage: Float32Array,
};
const DTYPES = new Map([
  [BigInt64Array, "<i8"], [Int32Array, "<i4"], [Uint8Array, "|u1"], [Int8Array, "|i1"], [Float32Array, "<f4"],
]);

// Gives each rollout of a step its tokens: an array for each number, of which NaN is unknown.
async function addTokens({ tokens, groups }) {
  const arrays = await readArrays(await load(tokens));
  const offsets = [...arrays.offset].map(Number);
  const total = offsets.at(-1);
  const fits = Object.keys(TOKEN_ARRAYS).every((name) => name === "offset" || arrays[name].length === total);
  if (!fits || offsets[0] !== 0 || offsets.some((offset, line) => offset > (offsets[line + 1] ?? total))) {
    throw new Error("the arrays do not fit together");
  }
  for (const rollout of groups.flatMap((group) => group.rollouts)) {
    const [begin, end] = offsets.slice(rollout.line, rollout.line + 2);
    if (!(end > begin)) continue;
    const slices = Object.entries(arrays).map(([name, values]) => [name, values.subarray(begin, end)]);
    rollout.tokens = Object.fromEntries(slices);
    rollout.tokens.end = endsInScript(rollout.tokens.end, rollout.response);
  }
}

// The file counts characters; a string of JavaScript has two units for those beyond U+FFFF.
function endsInScript(ends, text) {
  if (!/[\ud800-\udbff]/.test(text)) return ends;
  const places = [0];
  for (const character of text) places.push(places.at(-1) + character.length);
  return ends.map((end) => places[Math.min(end, places.length - 1)] ?? -1);
}

// Returns the arrays of a .npz file by name.
async function readArrays(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
  const view = new DataView(bytes.buffer);
  const short = (place) => view.getUint16(place, true);
  const long = (place) => view.getUint32(place, true);
  const arrays = {};
  // The last 22 bytes say where the list of entries is, and each entry where its file is.
  const last = bytes.length - 22;
  let entry = long(last + 16);
  for (let left = short(last + 10); left > 0; left -= 1) {
    const name = text.slice(entry + 46, entry + 46 + short(entry + 28)).replace(/\.npy$/, "");
    const local = long(entry + 42);
    const begin = local + 30 + short(local + 26) + short(local + 28);
    const packed = bytes.subarray(begin, begin + long(entry + 20));
    if (TOKEN_ARRAYS[name]) arrays[name] = toArray(await inflate(packed), TOKEN_ARRAYS[name]);
    entry += 46 + short(entry + 28) + short(entry + 30) + short(entry + 32);
  }
  return arrays;
}

async function inflate(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

// Returns the numbers of a .npy file, of which a header says the type.
function toArray(buffer, Numbers) {
  const begin = 10 + new DataView(buffer).getUint16(8, true);
  const header = String.fromCharCode(...new Uint8Array(buffer, 10, begin - 10));
  if (!header.includes(`'${DTYPES.get(Numbers)}'`)) throw new Error(`an array has another type, ${header}`);
  return new Numbers(buffer.slice(begin));
}
