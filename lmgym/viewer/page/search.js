// Looking for answers through all steps: numbers and a regular expression, in the background.

import {count, counted, h, link, number, say} from "./dom.js";
import {HELP, parseFilters} from "./filter.js";
import {virtualList} from "./list.js";
import {get, isFile, leftOut, post, remove} from "./source.js";

const PAUSE = 400; // ms between two looks at a search

export async function searchView({run, query, go, setQuery}) {
  const title = "search";
  if (isFile) return {title, parent: "#/", node: h("section", {}, h("h1", {}, title), h("p", {}, `A file cannot search; \`lmgym view\` can. ${leftOut}`))};
  const pattern = h("input", {type: "search", class: "grow", placeholder: "regular expression over the answers", "aria-label": "regular expression", value: query.get("pattern") ?? ""});
  const filter = h("input", {type: "search", class: "grow", placeholder: "filter: " + HELP, "aria-label": "filter", title: HELP, value: query.get("filter") ?? ""});
  const seconds = h("input", {type: "number", min: 1, max: 600, value: query.get("seconds") ?? 60, "aria-label": "seconds"});
  const start = h("button", {type: "submit"}, "Search");
  const stop = h("button", {type: "button", hidden: true, onclick: cancel}, "Cancel");
  const said = h("p", {class: "quiet", role: "status"});
  const list = virtualList({height: 54, row: element, open, label: "answers that were found"});
  let found = [];
  let key = null;
  let timer = 0;

  function element(place) {
    const own = found[place];
    const text = own.found ? [own.found[0], h("mark", {}, own.found[1]), own.found[2]] : [own.kept ? "" : "its tokens were not kept"];
    return h("div", {class: "group-row short"}, h("span", {class: "id"}, `${counted(own.stage)}/${counted(own.step)}`), h("span", {class: "prompt", dir: "auto"}, text), h("b", {class: "n"}, number(own.score)), h("span", {class: "prompt"}, `answer ${own.index}, ${count(own.length, "token")}`));
  }

  function open(place) {
    const own = found[place];
    const at = own.kept ? `answer/train/${own.stage}/${own.step}/${own.index}` : `group/${own.stage}/${own.step}/${own.group}`;
    go(`#/run/${run.number}/${at}`);
  }

  async function begin(event) {
    event?.preventDefault();
    await cancel();
    setQuery({pattern: pattern.value, filter: filter.value.trim(), seconds: seconds.value === "60" ? "" : seconds.value});
    try {
      const tree = await post("searches", {run: run.number, pattern: pattern.value, filters: parseFilters(filter.value), seconds: Number(seconds.value)});
      key = tree.key;
      stop.hidden = false;
      said.classList.remove("warning");
      look(tree);
    } catch (error) {
      say(said, error.message);
      said.classList.add("warning");
    }
  }

  function look(tree) {
    const more = tree.found.length !== found.length || !tree.found.length;
    found = tree.found;
    if (more) list.show(found.length); // else a click just now would miss its row
    const far = tree.steps ? `${tree.searched.toLocaleString("en")} of ${count(tree.steps, "step")} searched` : "looking";
    say(said, `${count(found.length, "answer")} found, ${far}${tree.sentence ? "; " + tree.sentence : ""}`);
    stop.hidden = tree.done;
    if (!tree.done) timer = setTimeout(async () => { if (key) look(await get(`searches/${key}`)); }, PAUSE);
  }

  async function cancel() {
    clearTimeout(timer);
    if (!key) return;
    const own = key;
    key = null;
    stop.hidden = true;
    said.textContent += "; cancelled";
    await remove(`searches/${own}`).catch(() => {});
  }

  if (pattern.value || filter.value) begin();
  return {
    title, parent: "#/", leave: cancel, place: list.place,
    node: h("section", {class: "filling"}, h("h1", {}, title), h("p", {class: "quiet"}, `Looks through the steps of ${run.name}, the newest first; `, link(`#/run/${run.number}/held-out`, "held-out answers"), " are not searched."),
      h("form", {class: "bar", onsubmit: begin}, pattern, filter, h("label", {}, seconds, " s"), start, stop), said, list.node),
    keys: {...list.keys, "/": () => pattern.focus()}, help: [["/", "regular expression"], ["j k l", "next, previous, open"]],
  };
}
