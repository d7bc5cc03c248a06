// A chart of curves over the steps, drawn as SVG at the width that it has.

import {clamp, h, number, svg} from "./dom.js";

const HEIGHT = 170;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;

// series: [{name, colour (classes), x, y, low, high, points}]; a null in y is a gap. `points`: marks with whiskers, as of
// evaluations; else a line with its running mean. onOpen(series number, point number) is called by a click, onCursor(x)
// when the pointer moves.
export function chart({title, series, stages, onOpen, onCursor}) {
  const readout = h("span", {class: "readout"});
  const canvas = svg("svg", {height: HEIGHT, role: "img", "aria-label": title});
  const node = h("figure", {class: "chart"}, h("figcaption", {}, h("b", {}, title), readout), canvas);
  let scale = null; // of the drawing; none before the first one
  let looked = null; // where the cursor is

  function draw() {
    const width = canvas.clientWidth || node.clientWidth || 320;
    scale = scaleOf(series, width);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    canvas.replaceChildren(...axes(scale, stages), ...series.flatMap((own) => curve(own, scale)), svg("g", {class: "cursor"}));
    describe(looked);
  }

  function describe(x) {
    looked = x;
    if (!scale) return;
    const group = canvas.querySelector(".cursor");
    const near = x === null ? [] : series.map((own) => nearest(own, x));
    group.replaceChildren();
    readout.replaceChildren();
    if (x === null) {
      if (series.some((own) => own.name)) readout.append(...series.map((own) => h("span", {class: "name " + own.colour}, own.name)));
      return;
    }
    series.forEach((own, place) => {
      const point = near[place];
      if (point === null) return;
      const across = scale.x(own.x[point]);
      group.append(svg("line", {x1: across, x2: across, y1: TOP, y2: HEIGHT - BOTTOM}));
      group.append(svg("circle", {class: own.colour, cx: across, cy: scale.y(own.y[point]), r: 3.5}));
      const bounds = own.points && own.low?.[point] !== null && own.low?.[point] !== undefined;
      const interval = bounds ? ` [${number(own.low[point])}, ${number(own.high[point])}]` : "";
      readout.append(h("span", {class: "name " + own.colour}, `${number(own.y[point])}${interval}`));
    });
  }

  function xOf(event) {
    if (!scale) draw();
    return scale.back(event.clientX - canvas.getBoundingClientRect().left);
  }

  canvas.addEventListener("pointermove", (event) => onCursor(xOf(event)));
  canvas.addEventListener("pointerleave", () => onCursor(null));
  canvas.addEventListener("click", (event) => {
    const x = xOf(event);
    const box = canvas.getBoundingClientRect();
    const found = series.map((own, place) => ({place, point: nearest(own, x)})).filter(({point}) => point !== null);
    const away = ({place, point}) => Math.hypot(
      scale.x(series[place].x[point]) - (event.clientX - box.left), scale.y(series[place].y[point]) - (event.clientY - box.top));
    found.sort((one, other) => away(one) - away(other));
    if (found.length) onOpen(found[0].place, found[0].point);
  });
  new ResizeObserver(draw).observe(node);
  return {node, describe, replace: (changed) => { series = changed; draw(); }};
}

function nearest(own, x) {
  let best = null;
  for (let point = 0; point < own.x.length; point += 1) {
    if (own.y[point] === null) continue;
    if (best === null || Math.abs(own.x[point] - x) < Math.abs(own.x[best] - x)) best = point;
  }
  return best;
}

function scaleOf(series, width) {
  const values = series.flatMap((own) => [...own.y, ...(own.points ? [...(own.low ?? []), ...(own.high ?? [])] : [])]);
  const known = values.filter((value) => value !== null && value !== undefined);
  let low = known.reduce((least, value) => Math.min(least, value), Infinity);
  let high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!known.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const margin = (high - low) * 0.06;
  [low, high] = [low - margin, high + margin];
  const last = Math.max(1, ...series.map((own) => own.x.at(-1) ?? 0));
  const inner = width - LEFT - RIGHT;
  const tall = HEIGHT - TOP - BOTTOM;
  return {
    width, low, high, last,
    x: (x) => LEFT + (x / last) * inner,
    y: (y) => TOP + (1 - (clamp(y, low, high) - low) / (high - low)) * tall,
    back: (pixel) => clamp((pixel - LEFT) / inner, 0, 1) * last,
  };
}

function axes(scale, stages) {
  const parts = [];
  for (const value of ticks(scale.low, scale.high, 4)) {
    const y = scale.y(value);
    parts.push(svg("line", {class: "grid", x1: LEFT, x2: scale.width - RIGHT, y1: y, y2: y}));
    parts.push(svg("text", {class: "tick end", x: LEFT - 6, y: y + 3.5}, number(value)));
  }
  for (const value of ticks(0, scale.last, Math.max(2, Math.floor(scale.width / 90)))) {
    parts.push(svg("text", {class: "tick middle", x: scale.x(value), y: HEIGHT - 6}, number(value)));
  }
  for (const stage of stages.slice(1)) {
    const x = scale.x(stage.start);
    parts.push(svg("line", {class: "stage", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}));
    parts.push(svg("text", {class: "tick", x: x + 4, y: TOP + 10}, stage.name));
  }
  return parts;
}

// Round numbers between two bounds, about `most` of them.
export function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const values = [];
  for (let place = Math.ceil(low / step); place * step <= high; place += 1) values.push(Number((place * step).toPrecision(12)));
  return values;
}

function curve(own, scale) {
  const at = (point) => `${scale.x(own.x[point]).toFixed(1)},${scale.y(own.y[point]).toFixed(1)}`;
  const parts = [];
  const whole = own.x.map((_, point) => point).filter((point) => own.y[point] !== null);
  if (own.points) {
    parts.push(svg("path", {class: "line " + own.colour, d: path(whole.map(at))}));
    for (const point of whole) {
      const x = scale.x(own.x[point]);
      if (own.low?.[point] !== null && own.low?.[point] !== undefined) {
        parts.push(svg("line", {class: "whisker " + own.colour, x1: x, x2: x, y1: scale.y(own.low[point]), y2: scale.y(own.high[point])}));
      }
      parts.push(svg("circle", {class: own.colour, cx: x, cy: scale.y(own.y[point]), r: whole.length > 60 ? 1.5 : 2.5}));
    }
    return parts;
  }
  const banded = whole.filter((point) => own.low?.[point] !== null && own.low?.[point] !== undefined);
  if (banded.length) { // of several steps each: from their smallest number to their largest
    const edge = (values, points) => points.map((point) => `${scale.x(own.x[point]).toFixed(1)},${scale.y(values[point]).toFixed(1)}`);
    parts.push(svg("path", {class: "band " + own.colour, d: path([...edge(own.high, banded), ...edge(own.low, banded.toReversed())]) + "Z"}));
  }
  const smooth = runningMean(whole.map((point) => own.y[point]), Math.floor(whole.length / 15) | 1);
  if (whole.length > 15) parts.push(svg("path", {class: "thin " + own.colour, d: path(whole.map(at))}));
  const smoothed = whole.map((point, place) => `${scale.x(own.x[point]).toFixed(1)},${scale.y(smooth[place]).toFixed(1)}`);
  parts.push(svg("path", {class: "line " + own.colour, d: path(smoothed)}));
  if (whole.length === 1) parts.push(svg("circle", {class: own.colour, cx: scale.x(own.x[whole[0]]), cy: scale.y(own.y[whole[0]]), r: 2.5}));
  return parts;
}

function path(points) {
  return points.length ? "M" + points.join("L") : "";
}

// The mean of each value and its neighbours in a window of an odd number; fewer at the ends.
export function runningMean(values, window) {
  const half = (window - 1) / 2;
  return values.map((_, place) => {
    const reach = Math.min(half, place, values.length - 1 - place);
    const own = values.slice(place - reach, place + reach + 1);
    return own.reduce((sum, value) => sum + value, 0) / own.length;
  });
}
