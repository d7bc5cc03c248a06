// The page: from an address (#/run/0/step/1/40) to a view, the keyboard, and what is new while a run trains.

import {aboutView} from "./about.js";
import {answerView} from "./answer.js";
import {curvesView, runsBar} from "./curves.js";
import {h, link, plain, say} from "./dom.js";
import {groupView} from "./group.js";
import {heldOutView, promptView} from "./heldout.js";
import {notesView} from "./notes.js";
import {pairView} from "./pair.js";
import {questionsView} from "./questions.js";
import {runsView} from "./runs.js";
import {searchView} from "./search.js";
import {get, isFile, leftOut, takeToken} from "./source.js";
import {stepView} from "./step.js";

const VIEWS = {"about": aboutView, "step": stepView, "group": groupView, "answer": answerView, "held-out": heldOutView, "prompt": promptView, "search": searchView, "notes": notesView, "ask": questionsView};
const LIVE = 2000; // ms between two looks for what is new
const KEYS = [["h", "back up"], ["/", "filter or search"], ["?", "this list"], ["Esc", "leave a field"]];

const top_ = document.getElementById("top");
const main = document.getElementById("view");
const places = new Map(); // where a view was left, by address
const live = h("span", {class: "live", role: "status"});
let runs = [];
let view = {};
let shownAddress = "";
let turn = 0; // of the newest call of show: an earlier one that is slower shows nothing

function go(address) {
  location.hash = address;
}

function split(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  return {parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query ?? "")};
}

// Keep what the user has chosen in a view in its address, without a new entry in the history.
function setQuery(changes) {
  const {query} = split(location.hash);
  for (const [key, value] of Object.entries(changes)) value ? query.set(key, value) : query.delete(key);
  const path = (location.hash || "#/").split("?")[0];
  const address = query.size ? `${path}?${query}` : path;
  if (address !== location.hash) history.replaceState(history.state, "", address);
  shownAddress = address;
}

async function show() {
  const mine = (turn += 1);
  if (shownAddress && view.place) places.set(shownAddress.split("?")[0], view.place());
  const address = location.hash;
  let parts = [];
  let next;
  try {
    const asked = split(address);
    parts = asked.parts;
    next = await made(asked.parts, asked.query, (changes) => mine === turn && setQuery(changes));
  } catch (error) {
    next = {title: "not found", parent: "#/", node: h("section", {}, h("h1", {}, "This cannot be shown"), h("p", {class: "warning"}, error.message), h("p", {}, link("#/", "to the curves")))};
  }
  if (mine !== turn) return;
  view.leave?.();
  view = next;
  shownAddress = location.hash === address ? address : location.hash;
  document.title = plain(`${view.title} · ${runs[Number(parts[1])]?.name ?? runs[0]?.name ?? ""} · lmgym`);
  main.replaceChildren(view.node);
  head(parts);
  window.scrollTo(0, 0);
  view.restore?.(places.get(address.split("?")[0]));
  view.shownFirst?.();
  main.dataset.shown = address.split("?")[0] || "#/";
}

async function made(parts, query, setQuery) {
  const [where, number, what, ...rest] = parts;
  if (where === "pair") return pairView({runs, parts: [number, what], go, query, setQuery});
  if (where === "runs") return runsView({runs, go});
  if (where !== "run") return curvesView({runs, go, query, setQuery});
  const run = runs[Number(number)];
  if (!run) throw new Error(`There is no run ${number}.`);
  if (!Object.hasOwn(VIEWS, what ?? "")) throw new Error(`There is no view “${what}”.`);
  return VIEWS[what]({run, runs, parts: rest, query, go, setQuery});
}

function head(parts) {
  const number = parts[0] === "run" ? Number(parts[1]) : 0;
  const here = `#/run/${number}`;
  const tab = (address, name, on) => h("a", {href: address, "aria-current": on ? "page" : null}, name);
  top_.replaceChildren(
    h("a", {class: "brand", href: runs.length > 1 ? "#/runs" : `${here}/about`}, "lmgym"),
    h("span", {class: "run-name", title: runs[number]?.folder}, parts[0] === "run" || runs.length === 1 ? runs[number]?.name ?? "" : ""),
    h("nav", {}, runs.length > 1 ? tab("#/runs", "runs", parts[0] === "runs") : null, tab(`${here}/about`, "overview", parts[2] === "about"), tab("#/", "curves", !parts.length), tab(`${here}/held-out`, "held-out", ["held-out", "prompt"].includes(parts[2])), tab(`${here}/search`, "search", parts[2] === "search"), tab(`${here}/notes`, "notes", parts[2] === "notes"), tab(`${here}/ask/why`, "questions", parts[2] === "ask"), runs.length > 1 ? tab("#/pair/0/1", "two runs", parts[0] === "pair") : null),
    live, h("button", {class: "plain", onclick: theme, title: "light or dark"}, "◐"), h("button", {class: "plain", onclick: help, title: "keys (?)"}, "?"));
  if (!parts.length) main.prepend(...[runsBar(runs), isFile ? h("p", {class: "warning"}, leftOut) : null].filter(Boolean));
}

function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("lmgym-theme", document.documentElement.dataset.theme); } catch { /* a file may have no storage */ }
}

function help() {
  const open = document.querySelector("dialog");
  if (open) { open.close(); return; }
  const keys = [...(view.help ?? []), ...KEYS];
  const dialog = h("dialog", {onclose: () => dialog.remove(), onclick: () => dialog.close()}, h("h2", {}, "keys"), h("dl", {class: "numbers"}, keys.map(([key, meaning]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)])));
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest?.("input, textarea, select");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
  const action = view.keys?.[event.key] ?? {"?": help, h: () => view.parent && go(view.parent), "/": () => go("#/run/0/search")}[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

let seen = null; // the state of the runs' files when they were last looked at
async function watch() {
  if (document.hidden && seen !== null) return;
  try {
    const states = await get("changes");
    const sizes = JSON.stringify(states.map((state) => state.sizes));
    const age = Math.min(...states.map((state) => state.age));
    live.textContent = age < 60 ? `written ${Math.round(age)} s ago` : "";
    const changed = seen !== null && sizes !== seen;
    seen = sizes;
    if (changed) await view.update?.();
  } catch (error) {
    say(live, error.message);
  }
}

try { document.documentElement.dataset.theme = localStorage.getItem("lmgym-theme") ?? ""; } catch { /* as above */ }
const first = takeToken() || !location.hash;
window.addEventListener("hashchange", () => (takeToken() ? location.reload() : show())); // another server's address was pasted
try {
  runs = await get("runs");
  if (!isFile) await watch(); // before the first view, so that nothing written since is missed
  if (first && !isFile) history.replaceState(null, "", runs.length > 1 ? "#/runs" : "#/run/0/about"); // where a reader begins
  await show();
  if (!isFile) setInterval(watch, LIVE);
} catch (error) {
  main.replaceChildren(h("p", {class: "warning"}, error.message));
}
