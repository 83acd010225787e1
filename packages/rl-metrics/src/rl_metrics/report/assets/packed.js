"use strict";
// Reads the format of packing.py: a JSON header and typed columns.

const KINDS = { f32: [4, Float32Array], f64: [8, Float64Array], i32: [4, Int32Array], u8: [1, Uint8Array] };

const LEAST_WHOLE = 2 ** 13;

/** Round a typed number like "f32" columns, as `rounded` in packing.py does, to compare with them. */
function asKept(value) {
  if (Math.abs(value) >= LEAST_WHOLE) return nearestWhole(value);
  const bits = new Uint32Array(Float32Array.of(value).buffer);
  bits[0] = (bits[0] + (1 << 9)) & ~((1 << 10) - 1);
  return new Float32Array(bits.buffer)[0];
}

/** Round half to even, as numpy's rint does. */
function nearestWhole(value) {
  const near = Math.round(value);
  return near - value === 0.5 && near % 2 ? near - 1 : near;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let place = 0; place < bytes.length; place++) bytes[place] = binary.charCodeAt(place);
  return bytes;
}

async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** {header, columns} of packed bytes; columns are typed arrays by name. */
async function unpack(packed) {
  const bytes = await gunzip(packed);
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const described = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const columns = {};
  let start = 4 + length;
  for (const { name, kind, count } of described.columns) {
    const [size, type] = KINDS[kind];
    const numbers = new Uint8Array(size * count);
    for (let plane = 0; plane < size; plane++) {
      const from = start + plane * count;
      for (let place = 0; place < count; place++) numbers[place * size + plane] = bytes[from + place];
    }
    columns[name] = new type(numbers.buffer);
    start += size * count;
  }
  return { header: described.header, columns };
}
