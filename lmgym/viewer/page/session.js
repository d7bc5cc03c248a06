// A session as a tree: a line for each turn in its order, and beside it where it goes on.

import {counted, count, h} from "./dom.js";

// The lines, of an answer that has a tree; turnChosen(turn) is called for the one that is chosen.
export function sessionElement(answer, turnChosen) {
  const tree = answer.session;
  if (!tree?.length) return null;
  const sampled = new Map();
  for (const row of answer.rows) for (const turn of row.turn) sampled.set(turn, (sampled.get(turn) ?? 0) + 1);
  const lines = tree.map((turn, place) => {
    const {reward, stop} = answer.turns[turn.turn] ?? {};
    const facts = [count(sampled.get(turn.turn) ?? 0, "token"), stop && stop !== "eos" ? `ended by ${stop}` : "", reward ? `reward ${Number(reward.toPrecision(4))}` : ""].filter(Boolean).join(", ");
    return h("li", {},
      h("span", {class: "lanes", "aria-hidden": "true"}, laneCells(tree, place)),
      h("button", {class: "plain", onclick: () => turnChosen(turn.turn)}, `turn ${counted(turn.turn)}`),
      h("span", {class: "quiet"}, [turn.reason, facts].filter(Boolean).join(" · ")));
  });
  const forks = tree.filter((turn) => turn.reason).length;
  return h("details", {class: "session", open: true},
    h("summary", {}, h("b", {}, "session"), ` ${count(tree.length, "turn")}, ${count(forks, "fork")}: each turn trains once, and all that stands before it is prompt`),
    h("ol", {}, lines));
}

// Of one line, what each lane shows: a dot, and lines up, down and across.
function laneCells(tree, place) {
  const cells = Array.from({length: 1 + Math.max(...tree.map((turn) => turn.lane))}, () => new Set());
  cells[tree[place].lane].add("dot");
  tree.forEach((turn, child) => {
    if (turn.parent === null) return;
    const parent = turn.parent; // turns are numbered by their lines
    if (parent < place && place <= child) cells[turn.lane].add("up");
    if (parent <= place && place < child) cells[turn.lane].add("down");
    if (parent !== place) return;
    const [left, right] = [turn.lane, tree[parent].lane].sort((one, other) => one - other);
    for (let lane = left; lane <= right; lane += 1) {
      if (lane > left) cells[lane].add("west");
      if (lane < right) cells[lane].add("east");
    }
  });
  return cells.map((kinds, lane) => h("i", {class: [...kinds].join(" "), style: {"--own": `var(--c${lane % 6})`}}));
}
