// A chart of curves over the steps, drawn as SVG at the width that it has.

import {clamp, h, number, svg} from "./dom.js";

const HEIGHT = 170;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;

const DRAGGED = 8; // pixels from which a press is a choice of steps and no click
const NAMED = 4; // curves whose numbers fit above a chart; of more, only the nearest one's

// series: [{name, colour, style, label(point), x, y, low, high, points, run}]; a null in y is a gap. `points`: marks with
// whiskers, as of evaluations; else a line with its running mean. onOpen(series number, point number) is called by a
// click, onCursor(x, run) when the pointer moves, and onZoom(from, to) when it has been dragged from one x to another.
export function chart({title, onOpen, onCursor, onZoom}) {
  const readout = h("span", {class: "readout"});
  const canvas = svg("svg", {height: HEIGHT, role: "img", "aria-label": title});
  const node = h("figure", {class: "chart"}, h("figcaption", {}, h("b", {title}, title), readout), canvas);
  let series = [];
  let stages = [];
  let options = {};
  let scale = null; // of the drawing; none before the first one
  let looked = {x: null, run: null}; // where the cursor is
  let pressed = null; // x in pixels

  function draw() {
    const width = canvas.clientWidth || node.clientWidth || 320;
    scale = scaleOf(series, width, options);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const clip = svg("svg", {x: LEFT - 4, y: 0, width: Math.max(0, width - LEFT - RIGHT + 8), height: HEIGHT, viewBox: `${LEFT - 4} 0 ${Math.max(1, width - LEFT - RIGHT + 8)} ${HEIGHT}`}, series.map((own) => svg("g", {style: own.style, class: own.faded ? "faded" : null}, curve(own, scale))));
    canvas.replaceChildren(...axes(scale, stages), clip, svg("g", {class: "cursor"}));
    describe(looked.x, looked.run);
  }

  function describe(x, run) {
    looked = {x, run};
    if (!scale) return;
    const group = canvas.querySelector(".cursor");
    group.replaceChildren();
    if (x === null) {
      readout.replaceChildren(...(series.length <= NAMED ? series.filter((own) => own.name).map((own) => label(own, own.name)) : []));
      return;
    }
    const found = series.map((own) => ({own, point: nearest(own, x, scale)})).filter(({point}) => point !== null);
    const told = found.length <= NAMED ? found : found.filter(({own}) => own.run === run || own.mean);
    for (const {own, point} of told) {
      const across = scale.x(own.x[point]);
      group.append(svg("line", {x1: across, x2: across, y1: TOP, y2: HEIGHT - BOTTOM}));
      if (series.length > NAMED) group.append(svg("g", {style: own.style, class: "chosen"}, curve(own, scale)));
      group.append(svg("circle", {class: own.colour, style: own.style, cx: across, cy: scale.y(own.y[point]), r: 3.5}));
    }
    const steps = [...new Set(told.map(({own, point}) => own.label(point)))];
    readout.replaceChildren(...steps.map((step) => h("span", {class: "quiet"}, step)), ...told.map(({own, point}) => {
      const bounds = own.points && own.low?.[point] !== null && own.low?.[point] !== undefined;
      const interval = bounds ? ` [${number(own.low[point])}, ${number(own.high[point])}]` : "";
      return label(own, `${series.length > NAMED ? own.runName + " " : ""}${number(own.y[point])}${interval}`);
    }));
  }

  function label(own, words) {
    return h("span", {class: "name " + own.colour, style: own.style}, words);
  }

  function at(event) {
    if (!scale) draw();
    const box = canvas.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  }

  // The curve and its point that are nearest to where the pointer is.
  function nearestTo({x, y}) {
    const found = series.map((own, place) => ({place, point: nearest(own, scale.back(x), scale)})).filter(({point}) => point !== null);
    const away = ({place, point}) => Math.hypot(scale.x(series[place].x[point]) - x, scale.y(series[place].y[point]) - y);
    return found.sort((one, other) => away(one) - away(other))[0];
  }

  canvas.addEventListener("pointerdown", (event) => {
    pressed = at(event).x;
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const here = at(event);
    onCursor(scale.back(here.x), series[nearestTo(here)?.place]?.run ?? null);
    if (pressed !== null && Math.abs(here.x - pressed) > DRAGGED) {
      canvas.querySelector(".cursor").append(svg("rect", {x: Math.min(pressed, here.x), y: TOP, width: Math.abs(here.x - pressed), height: HEIGHT - TOP - BOTTOM}));
    }
  });
  canvas.addEventListener("pointerleave", () => onCursor(null, null));
  canvas.addEventListener("pointercancel", () => { pressed = null; });
  canvas.addEventListener("click", (event) => {
    const here = at(event);
    const from = pressed;
    pressed = null;
    if (from !== null && Math.abs(here.x - from) > DRAGGED) {
      onZoom(...[scale.back(from), scale.back(here.x)].sort((one, other) => one - other));
      return;
    }
    const found = nearestTo(here);
    if (found) onOpen(found.place, found.point);
  });
  new ResizeObserver(draw).observe(node);
  return {node, describe, show: (ownSeries, ownStages, ownOptions) => { [series, stages, options] = [ownSeries, ownStages, ownOptions]; if (scale) draw(); }};
}

// The point of a curve next to x that has a number and is in the drawing; null if there is none.
function nearest(own, x, scale) {
  let best = null;
  for (let point = 0; point < own.x.length; point += 1) {
    if (!scale.has(own.x[point], own.y[point])) continue;
    if (best === null || Math.abs(own.x[point] - x) < Math.abs(own.x[best] - x)) best = point;
  }
  return best;
}

// options: {from, to} are the first and the last x, and {log} whether equal factors have equal heights; a curve without a
// number above 0 is then drawn as always.
function scaleOf(series, width, {from = 0, to = null, log = false}) {
  const last = Math.max(1, ...series.map((own) => own.x.at(-1) ?? 0));
  const [begin, end] = [from, to ?? last];
  const seen = (own) => own.x.map((x, point) => (x >= begin && x <= end ? point : -1)).filter((point) => point >= 0);
  const values = series.flatMap((own) => seen(own).flatMap((point) => (own.points ? [own.y[point], own.low?.[point], own.high?.[point]] : [own.y[point]])));
  const there = values.filter((value) => value !== null && value !== undefined);
  const known = log && there.some((value) => value > 0) ? there.filter((value) => value > 0) : there;
  const logarithmic = known.length > 0 && log && known[0] > 0;
  const way = logarithmic ? Math.log10 : (value) => value;
  let low = known.reduce((least, value) => Math.min(least, value), Infinity);
  let high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!known.length) [low, high] = [0, 1];
  [low, high] = [way(low), way(high)];
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const margin = (high - low) * 0.06;
  [low, high] = [low - margin, high + margin];
  const inner = width - LEFT - RIGHT;
  const tall = HEIGHT - TOP - BOTTOM;
  const span = Math.max(end - begin, 1e-9);
  return {
    width, low, high, begin, end, logarithmic,
    has: (x, y) => y !== null && y !== undefined && x >= begin && x <= end && (!logarithmic || y > 0),
    x: (x) => LEFT + ((x - begin) / span) * inner,
    y: (y) => TOP + (1 - (clamp(logarithmic && y <= 0 ? low : way(y), low, high) - low) / (high - low)) * tall,
    back: (pixel) => begin + clamp((pixel - LEFT) / inner, 0, 1) * span,
  };
}

function axes(scale, stages) {
  const parts = [];
  const marks = scale.logarithmic ? powers(scale.low, scale.high) : ticks(scale.low, scale.high, 4);
  for (const value of marks) {
    const y = scale.y(value);
    parts.push(svg("line", {class: "grid", x1: LEFT, x2: scale.width - RIGHT, y1: y, y2: y}));
    parts.push(svg("text", {class: "tick end", x: LEFT - 6, y: y + 3.5}, number(value)));
  }
  for (const value of ticks(scale.begin, scale.end, Math.max(2, Math.floor(scale.width / 90)))) {
    parts.push(svg("text", {class: "tick middle", x: scale.x(value), y: HEIGHT - 6}, number(value)));
  }
  parts.push(svg("text", {class: "tick axis", x: LEFT - 12, y: HEIGHT - 6}, "step"));
  for (const stage of stages.slice(1)) {
    const x = scale.x(stage.start + 0.5); // behind the last step of the stage before
    if (x < LEFT || x > scale.width - RIGHT) continue;
    parts.push(svg("line", {class: "stage", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}));
    parts.push(svg("text", {class: "tick", x: x + 4, y: TOP + 10}, stage.name));
  }
  return parts;
}

// Round numbers for a logarithmic axis between 10^low and 10^high: powers of ten, with 2 and 5 if there is room.
function powers(low, high) {
  const decades = high - low;
  const factors = decades < 1.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 4));
  const values = [];
  for (let power = Math.floor(low); power <= high && values.length < 20; power += every) {
    values.push(...factors.map((factor) => factor * 10 ** power).filter((value) => Math.log10(value) >= low && Math.log10(value) <= high));
  }
  return values.length > 1 ? values : [10 ** low, 10 ** high].map((value) => Number(value.toPrecision(2)));
}

// Round numbers between two bounds, about `most` of them; fewer where numbers cannot be told apart.
export function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step);
  const values = new Set();
  for (let count = 0; count <= most + 1; count += 1) { // not up to a number: above 2^53, adding 1 changes nothing
    const value = Number(((first + count) * step).toPrecision(12));
    if (value >= low && value <= high) values.add(value);
  }
  return [...values];
}

function curve(own, scale) {
  const at = (point) => `${scale.x(own.x[point]).toFixed(1)},${scale.y(own.y[point]).toFixed(1)}`;
  const parts = [];
  const whole = own.x.map((_, point) => point).filter((point) => own.y[point] !== null && (!scale.logarithmic || own.y[point] > 0));
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
