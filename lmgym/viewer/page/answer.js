// An answer under the microscope: its tokens coloured by a number, and all numbers of the token that is looked at.

import {allColumns, colourNames, shading} from "./colours.js";
import {count, counted, h, link, promptText, scoreText, short, textBlock} from "./dom.js";
import {formulasButton} from "./formulas.js";
import {notesForm} from "./notes.js";
import {sessionElement} from "./session.js";
import {get} from "./source.js";
import {readingElements, rowElements} from "./tokens.js";
import {inFull, inShort} from "./why.js";

const STRONGEST = 0.55; // of a colour, so that text can be read on it

export async function answerView({run, parts, query, go, setQuery}) {
  const [kind, stage, step, index, ...split] = parts;
  const address = parts.join("/");
  const answer = await get(`runs/${run.number}/answers/${address}`, true);
  const rows = answer.rows.map((row, place) => allColumns(row, answer.explanation?.rows[place]));
  const turns = answer.turns.map((turn, place) => ({...turn, seconds: answer.seconds?.environment?.[place]}));
  const actions = answer.rows.map((row) => new Map(row.actions.map((place, action) => [place, action])));
  const names = colourNames(rows);
  const colour = h("select", {"aria-label": "colour tokens by", onchange: paint}, h("option", {value: ""}, "no colour"), names.map((name) => h("option", {value: name}, name)));
  const legend = h("span", {class: "legend"});
  const startOf = (row) => answer.session?.find((turn) => turn.turn === row.turn[0]) ?? null;
  const text = h("div", {class: "microscope"}, answer.rows.flatMap((row, place) => rowElements(row, place, turns, startOf(row))));
  const panel = h("aside", {class: "panel", "aria-live": "polite"});
  const sampled = [...text.querySelectorAll(".token")].filter((element) => actionOf(element) !== undefined);
  const reading = h("div", {class: "microscope", hidden: true});
  const toggle = formulasButton(() => read(reading.hidden));
  const colours = h("span", {class: "bar"}, h("label", {}, "colour ", colour), legend);
  let pinned = null; // the element that was chosen

  colour.value = names.includes(query.get("colour")) ? query.get("colour") : names[0] ?? "";
  sampled.forEach((element) => element.classList.add("sampled"));

  function actionOf(element) {
    return element.dataset.row === undefined ? undefined : actions[element.dataset.row].get(Number(element.dataset.place));
  }

  function paint() {
    setQuery({colour: colour.value === names[0] ? "" : colour.value});
    const name = colour.value;
    const shades = name ? shading(name, rows) : {title: "", shade: () => ["heat", 0], legend: []};
    for (const element of sampled) {
      const value = rows[element.dataset.row][name]?.[actionOf(element)] ?? null;
      const [way, share] = value === null ? ["heat", 0] : shades.shade(value);
      element.classList.remove("heat", "up", "down", "unknown");
      element.classList.add(value === null && name ? "unknown" : way);
      element.style.setProperty("--share", `${Math.round(share * STRONGEST)}%`);
    }
    legend.replaceChildren(...shades.legend.map(([words, way, share]) => h("i", {class: way, style: {"--share": `${Math.round(share * STRONGEST)}%`}}, words)), h("span", {class: "quiet"}, shades.title));
  }

  function look(element) {
    const row = Number(element.dataset.row);
    const place = Number(element.dataset.place);
    const action = actionOf(element);
    const piece = answer.rows[row].pieces[place];
    const heading = [
      h("h2", {}, h("code", {dir: "auto"}, JSON.stringify(piece)), h("button", {class: "close", "aria-label": "close", onclick: close}, "×")),
      h("p", {class: "quiet"}, `token ${place + 1} of ${answer.rows[row].ids.length}, id ${answer.rows[row].ids[place]}${answer.rows[row].special.includes(place) ? ", a control token" : ""}`),
    ];
    if (action === undefined) {
      panel.replaceChildren(...heading, h("p", {}, "The loss does not see it: it was given, not sampled."));
    } else {
      const known = names.map((name) => [name, rows[row][name]]).filter(([, values]) => typeof values?.[action] === "number");
      panel.replaceChildren(...heading, h("p", {}, inShort(answer, row, action)), h("dl", {class: "numbers"}, known.map(([name, values]) => [h("dt", {}, name), h("dd", {}, short(values[action]))])), ...inFull(answer, row, action));
    }
    panel.classList.add("open");
  }

  function pin(element) {
    pinned?.classList.remove("pinned");
    pinned = element;
    if (!element) return;
    element.classList.add("pinned");
    for (let fold = element.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    element.scrollIntoView({block: getComputedStyle(panel).position === "fixed" ? "center" : "nearest"});
    setQuery({token: `${element.dataset.row}.${element.dataset.place}`});
    look(element);
  }

  function close() {
    pinned?.classList.remove("pinned");
    pinned = null;
    panel.classList.remove("open");
    setQuery({token: ""});
    overview();
  }

  // The text to be read in place of the exact tokens. It is made when it is first asked for.
  function read(on) {
    if (on && !reading.hasChildNodes()) reading.append(...answer.rows.flatMap((row) => readingElements(row, turns, startOf(row))));
    reading.hidden = !on;
    text.hidden = colours.hidden = on;
    toggle.setAttribute("aria-pressed", String(on));
    setQuery({formulas: on ? "1" : ""});
    if (!pinned) overview();
  }

  function showTurn(turn) {
    const part = (reading.hidden ? text : reading).querySelector(`[data-turn="${turn}"]`);
    if (!part) return;
    part.open = true;
    part.scrollIntoView({block: "start", behavior: "smooth"});
    part.querySelector("summary").focus({preventScroll: true});
  }

  function step_(by) {
    read(false);
    const place = pinned ? sampled.indexOf(pinned) : by > 0 ? -1 : sampled.length;
    const next = sampled[Math.max(0, Math.min(sampled.length - 1, place + by))];
    if (next) pin(next);
  }

  function overview() {
    const hint = reading.hidden ? "Point at a token for its numbers; click to keep them, or use ← and →." : "Formulas are drawn for reading. “formulas” or m leads back to the exact tokens.";
    panel.replaceChildren(h("p", {class: "quiet"}, hint), ...facts(answer));
  }

  text.addEventListener("pointerover", (event) => {
    const element = event.target.closest(".token");
    if (element?.dataset.place !== undefined && !pinned && event.pointerType === "mouse") look(element);
  });
  text.addEventListener("click", (event) => {
    const element = event.target.closest(".token");
    if (element?.dataset.place !== undefined) pin(element === pinned ? null : element);
  });

  const parent = kind === "train" ? `#/run/${run.number}/group/${stage}/${step}/${answer.group}` : `#/run/${run.number}/prompt/${split.join("/")}/${encodeURIComponent(answer.example.id)}`;
  const mates = answer.mates ?? [];
  const to = (mate) => `#/run/${run.number}/answer/${kind}/${stage}/${step}/${mate}${split.length ? "/" + split.join("/") : ""}`;
  const along = (by) => { const next = mates[mates.indexOf(answer.index) + by]; if (next !== undefined) go(to(next) + (reading.hidden ? "" : "?formulas=1")); };
  const node = h("section", {class: "answer-view"},
    h("div", {},
      h("h1", {}, `answer ${index} `, h("span", {class: "quiet"}, kind === "train" ? ["of ", link(parent, `group ${answer.group}`), ", ", link(`#/run/${run.number}/step/${stage}/${step}`, `step ${counted(step)}`)] : `evaluation after step ${step}, ${split.join("/")}`)),
      h("p", {class: "facts"}, h("span", {}, "score ", h("b", {}, scoreText(answer.score))), Object.entries(answer.reward_components).map(([name, value]) => h("span", {}, `${name} `, h("b", {}, short(value)))),
        answer.selected === false ? h("span", {class: "flag"}, `not trained on${answer.reason ? ": " + answer.reason : ""}`) : null, answer.error ? h("span", {class: "flag"}, "error") : null),
      answer.error ? textBlock(answer.error, {class: "reason"}) : null,
      answer.tokenizer ? null : h("p", {class: "warning"}, "This run has no tokenizer.json, so tokens stand as their ids."),
      mates.length > 1 ? h("p", {class: "mates"}, "group: ", mates.map((mate) => (mate === answer.index ? h("b", {}, `${mate} `) : [link(to(mate), String(mate)), " "]))) : null,
      sessionElement(answer, showTurn),
      h("div", {class: "bar"}, toggle, colours),
      text, reading, conversation(answer), notesForm(run, address)),
    panel);
  paint();
  overview();
  if (query.get("formulas")) read(true);
  const [row, place] = (query.get("token") ?? "").split(".");
  const first = place && text.querySelector(`.token[data-row="${Number(row)}"][data-place="${Number(place)}"]`);
  return {
    title: `answer ${index}`, node, parent,
    shownFirst: () => first && pin(first),
    keys: {
      j: () => along(1), k: () => along(-1), ArrowRight: () => step_(1), ArrowLeft: () => step_(-1), l: () => step_(1), "/": () => { read(false); colour.focus(); }, Escape: close,
      c: () => { read(false); colour.selectedIndex = (colour.selectedIndex + 1) % colour.options.length; paint(); },
      m: () => read(reading.hidden),
      n: () => node.querySelector(".notes textarea")?.focus(),
    },
    help: [["j k", "next, previous answer of the group"], ["→ ← l", "next, previous token"], ["c", "next colour"], ["m", "formulas, or the exact tokens"], ["n", "write a note"]],
  };
}

function facts(answer) {
  const known = [
    ["example", answer.example.id], ["version of the weights", versions(answer)], ["algorithm", answer.algorithm], ["baseline", answer.baseline],
    ["ended by itself", answer.terminated ? "yes" : "no"], ["turns", answer.turns.length], ...seconds(answer),
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const references = answer.example.references ?? [];
  const meta = answer.example.meta && Object.keys(answer.example.meta).length ? JSON.stringify(answer.example.meta, null, 1) : "";
  return [
    h("dl", {class: "numbers"}, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "number" ? short(value) : String(value))])),
    references.length ? [h("h2", {}, count(references.length, "reference")), references.map((reference) => textBlock(reference))] : null,
    meta ? h("details", {}, h("summary", {}, "meta"), textBlock(meta)) : null,
  ].flat(Infinity).filter(Boolean);
}

// The updates that the weights had had that sampled it: of an answer in chunks the first and the last number.
function versions(answer) {
  const known = answer.rows.flatMap((row) => row.columns.version ?? []);
  return known.length ? `${Math.min(...known)} to ${Math.max(...known)}` : answer.version;
}

// What a clock has said: of each part the sum over the turns, and of each reward.
function seconds(answer) {
  const {rewards, ...parts} = answer.seconds ?? {};
  const whole = Object.entries(parts).map(([name, own]) => [`seconds of ${name}`, own.reduce((total, one) => total + (one ?? 0), 0)]);
  return [...whole, ...Object.entries(rewards ?? {}).map(([name, own]) => [`seconds of the reward ${name}`, own])];
}

// The conversation as messages, where there is one.
function conversation(answer) {
  const messages = answer.messages?.length ? answer.messages : null;
  if (!messages) return h("details", {class: "prompt-box"}, h("summary", {}, "the prompt as the task wrote it"), textBlock(promptText(answer.example.prompt)));
  return h("details", {class: "prompt-box"}, h("summary", {}, `the conversation, ${count(messages.length, "message")}`),
    messages.map((message) => h("div", {class: "message"}, h("b", {}, String(message.role)), textBlock(typeof message.content === "string" ? message.content : JSON.stringify(message, null, 1)))));
}
