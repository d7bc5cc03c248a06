// Where the data comes from: the server of `lmgym view`, or the data block of a single file (--html).

const block = document.getElementById("data");
const embedded = block ? JSON.parse(block.textContent) : null;
const known = new Map(); // answers of the server that do not change
const MOST_KNOWN = 50; // of them

const TOKEN = "lmgym-token"; // in the storage of this origin, which other ports of the machine cannot read
let token = "";

export const isFile = embedded !== null;
export const leftOut = embedded?.left_out ?? "";

// The first address has #token=; it is kept, and leaves the address and the history. Returns whether there was one.
export function takeToken() {
  if (isFile || !location.hash.startsWith("#token=")) return false;
  token = location.hash.slice("#token=".length);
  try { localStorage.setItem(TOKEN, token); } catch { /* then only this tab knows it */ }
  history.replaceState(null, "", "#/");
  return true;
}

function knownToken() {
  try { return localStorage.getItem(TOKEN) || token; } catch { return token; }
}

// What lies at an address (addresses.py). `keep`: it does not change, so it is asked for once.
export async function get(address, keep = false) {
  if (embedded) {
    if (Object.hasOwn(embedded.data, address)) return embedded.data[address];
    throw new Error(`This is not in the file. ${leftOut}`);
  }
  if (known.has(address)) return known.get(address);
  const tree = await ask("GET", address);
  if (keep) {
    if (known.size >= MOST_KNOWN) known.clear();
    known.set(address, tree);
  }
  return tree;
}

export function post(address, body) {
  return ask("POST", address, body);
}

export function remove(address) {
  return ask("DELETE", address);
}

async function ask(method, address, body) {
  const path = address.split("/").map(encodeURIComponent).join("/");
  let answer;
  try {
    answer = await fetch("/data/" + path, {method, body: body && JSON.stringify(body), headers: {"x-lmgym-token": knownToken()}});
  } catch {
    throw new Error("The server does not answer; is `lmgym view` still running?");
  }
  const kind = answer.headers.get("content-type") ?? "";
  const tree = kind.startsWith("application/json") ? await answer.json() : {error: await answer.text()};
  if (!answer.ok) throw new Error(tree.error || `The server failed (${answer.status}).`);
  return tree;
}
