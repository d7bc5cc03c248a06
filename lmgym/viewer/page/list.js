// A list of any length: only the rows that can be seen are elements.

import {clamp, h} from "./dom.js";

const SPARE = 6; // rows above and below what can be seen

// row(number) makes an element of a fixed height (in CSS pixels); open(number) is called by a click or the keyboard;
// seen(first, last) when the rows that can be seen have changed.
export function virtualList({height, row, open, seen, label}) {
  const inside = h("div", {class: "rows"});
  const node = h("div", {class: "list", tabindex: 0, role: "listbox", "aria-label": label}, inside);
  let count = 0;
  let selected = 0;
  let drawn = "";

  function draw(force) {
    const first = clamp(Math.floor(node.scrollTop / height) - SPARE, 0, Math.max(0, count - 1));
    const last = Math.min(count, Math.ceil((node.scrollTop + node.clientHeight) / height) + SPARE);
    const now = `${first} ${last}`;
    if (now === drawn && !force) return;
    drawn = now;
    inside.style.height = `${count * height}px`;
    const elements = [];
    for (let place = first; place < last; place += 1) {
      const element = row(place);
      element.classList.add("row");
      element.style.setProperty("top", `${place * height}px`);
      element.style.setProperty("height", `${height}px`);
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", String(place === selected));
      elements.push(element);
    }
    inside.replaceChildren(...elements);
    seen?.(first, last);
  }

  function select(place) {
    selected = clamp(place, 0, Math.max(0, count - 1));
    const top = selected * height;
    if (top < node.scrollTop) node.scrollTop = top;
    if (top + height > node.scrollTop + node.clientHeight) node.scrollTop = top + height - node.clientHeight;
    draw(true);
  }

  node.addEventListener("scroll", () => draw(false));
  node.addEventListener("click", (event) => { // by its height: the row may have been drawn anew since the button went down
    const place = Math.floor((event.clientY - inside.getBoundingClientRect().top) / height);
    if (event.target.closest("a") || place < 0 || place >= count) return;
    select(place);
    open(place);
  });
  new ResizeObserver(() => draw(true)).observe(node);
  return {
    node,
    show: (amount) => { count = amount; selected = clamp(selected, 0, Math.max(0, count - 1)); draw(true); },
    redraw: () => draw(true),
    place: () => ({selected, top: node.scrollTop}),
    restore: (place) => { if (place) { selected = place.selected; draw(true); node.scrollTop = place.top; draw(true); } },
    keys: {
      j: () => select(selected + 1),
      k: () => select(selected - 1),
      l: () => count && open(selected),
      Enter: () => count && open(selected),
      Home: () => select(0),
      End: () => select(count - 1),
      PageDown: () => select(selected + Math.floor(node.clientHeight / height)),
      PageUp: () => select(selected - Math.floor(node.clientHeight / height)),
    },
  };
}
