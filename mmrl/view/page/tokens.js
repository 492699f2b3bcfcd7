// The numbers of a step's tokens, from the .npz file of NumPy arrays that the run wrote.
"use strict";

const TOKEN_ARRAYS = {
  offset: BigInt64Array, end: Int32Array, token_id: Int32Array, author: Uint8Array, clipped: Int8Array,
  recorded_logprob: Float32Array, logprob: Float32Array, ratio: Float32Array, entropy: Float32Array,
  advantage: Float32Array,
};

// Gives each rollout of a step its tokens: an array for each number, of which NaN is unknown.
async function addTokens({ tokens, arrays, groups, problem: failure }) {
  if (failure) throw new Error(failure);
  const text = atob(await load(tokens));
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
  const columns = [];
  for (const [name, Numbers] of Object.entries(TOKEN_ARRAYS)) {
    columns.push([name, new Numbers(await inflate(bytes.subarray(...arrays[name])))]);
  }
  const offsets = [...columns[0][1]].map(Number);
  for (const rollout of groups.flatMap((group) => group.rollouts)) {
    const [begin, end] = offsets.slice(rollout.line, rollout.line + 2);
    if (!(end > begin)) continue;
    rollout.tokens = Object.fromEntries(columns.map(([name, values]) => [name, values.subarray(begin, end)]));
    const places = unitPlaces(rollout.response);
    if (places) rollout.tokens.end = rollout.tokens.end.map((end) => places[Math.min(end, places.length - 1)] ?? -1);
  }
}

// Returns the numbers of a compressed .npy file, which follow a header.
async function inflate(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const buffer = await new Response(stream).arrayBuffer();
  return buffer.slice(10 + new DataView(buffer).getUint16(8, true));
}

// Tokens end at characters; a string of JavaScript has two units for those beyond U+FFFF.
function unitPlaces(text) {
  if (!/[\ud800-\udbff]/.test(text)) return null;
  const places = [0];
  for (const character of text) places.push(places.at(-1) + character.length);
  return places;
}
