"use strict";
// Packed parts by name: from scripts of this page, or from the server of a live report.

const MAX_UNPACKED = 48;

const store = {
  isLive: !document.getElementById("manifest"),
  unpacked: new Map(),

  async manifest() {
    if (!this.isLive) return JSON.parse(byId("manifest").textContent);
    const answer = await fetch("manifest", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  },

  /** Read and unpack a part; the most recently used ones are cached. */
  read(name) {
    const known = this.unpacked.get(name);
    this.unpacked.delete(name);
    const part = known ?? this.load(name).then(unpack);
    this.unpacked.set(name, part);
    part.catch(() => this.unpacked.delete(name));
    if (this.unpacked.size > MAX_UNPACKED) this.unpacked.delete(this.unpacked.keys().next().value);
    return part;
  },

  async load(name) {
    if (!this.isLive) return fromBase64(byId(name).textContent);
    const answer = await fetch(`blob/${name}`);
    if (!answer.ok) throw new Error("the report was updated, and this part is gone");
    return new Uint8Array(await answer.arrayBuffer());
  },
};
