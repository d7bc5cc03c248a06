// Notes and tags on answers, kept in notes.jsonl of the run folder.

import {count, counted, h, link, number, say, textBlock} from "./dom.js";
import {get, isFile, post} from "./source.js";

const drafts = new Map(); // notes that were begun and not saved, by run and answer

window.addEventListener("beforeunload", (event) => { if (drafts.size) event.preventDefault(); });

// The form below an answer; `address` is the answer's, as "train/0/12/3".
export function notesForm(run, address) {
  const text = h("textarea", {rows: 2, placeholder: "a note (n)", "aria-label": "note"});
  const tags = h("input", {placeholder: "tags, separated by commas", "aria-label": "tags"});
  const said = h("span", {class: "quiet", role: "status"});
  const save = h("button", {type: "submit"}, "Save");
  const key = `${run.number}/${address}`;
  const form = h("form", {class: "notes", onsubmit: send, oninput: keep}, text, h("div", {class: "bar"}, tags, save, said));

  async function send(event) {
    event.preventDefault();
    save.disabled = true;
    try {
      await post(`runs/${run.number}/notes`, {answer: address, note: text.value, tags: tags.value.split(",")});
      drafts.delete(key);
      say(said, "saved in notes.jsonl");
    } catch (error) {
      say(said, error.message);
    }
    save.disabled = false;
  }

  function keep() {
    drafts.set(key, [text.value, tags.value]);
    say(said, "not saved yet");
  }

  if (drafts.has(key)) {
    [text.value, tags.value] = drafts.get(key);
    say(said, "not saved yet");
  }
  get(`runs/${run.number}/notes`).then((notes) => {
    if (drafts.has(key)) return;
    const own = notes.find((note) => addressOf(note) === address);
    text.value ||= own?.note ?? "";
    tags.value ||= (own?.tags ?? []).join(", ");
  }, (error) => { say(said, error.message); });
  if (isFile) {
    for (const field of [text, tags]) field.readOnly = true;
    save.hidden = true;
  }
  return form;
}

function addressOf(note) {
  return [note.kind, note.stage, note.step, note.index, note.split].filter((part) => part !== null && part !== undefined).join("/");
}

export async function notesView({run}) {
  let notes = await get(`runs/${run.number}/notes`);
  const items = h("div", {class: "timeline"});
  let selected = -1;

  function refresh() {
    items.replaceChildren(...notes.map((note) => h("article", {class: "moment"},
      h("header", {}, link(`#/run/${run.number}/answer/${addressOf(note)}`, `${note.kind === "train" ? `step ${counted(note.step)}` : `evaluation after step ${note.step}`} of stage ${counted(note.stage)}, answer ${note.index}`), h("b", {class: "score"}, number(note.score)), note.tags.map((tag) => h("span", {class: "flag"}, tag))),
      note.note ? textBlock(note.note) : null, textBlock(note.answer, {class: "answer"}))));
  }

  function move(by) {
    selected = Math.max(0, Math.min(notes.length - 1, selected + by));
    [...items.children].forEach((element, place) => element.classList.toggle("selected", place === selected));
    items.children[selected]?.scrollIntoView({block: "nearest"});
  }

  refresh();
  return {
    title: "notes", parent: "#/",
    node: h("section", {}, h("h1", {}, "notes"), h("p", {class: "quiet"}, notes.length ? `${count(notes.length, "note")} in notes.jsonl of ${run.name}` : "There are no notes yet; an answer's page has a form for one."), items),
    keys: {j: () => move(1), k: () => move(-1), l: () => items.children[selected]?.querySelector("a")?.click()}, help: [["j k l", "next, previous, open"]],
    update: async () => { notes = await get(`runs/${run.number}/notes`); refresh(); },
  };
}
