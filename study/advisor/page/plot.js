// A drawing of speed against the memory of one GPU, one point a strategy, with the errors of both.
import { LETTER, make } from "./bars.js";

const MARGIN = { left: 62, right: 14, top: 24, bottom: 44 };
const RADIUS = 5;
const TEXT_HEIGHT = 14;
// Where a name may be, from its point: near ones first, and from the second circle on with a line to the point.
const CIRCLES = [11, 22, 36, 52, 70, 90, 112];
const DIRECTIONS = [[0.8, -0.6], [-0.8, -0.6], [0.8, 0.6], [-0.8, 0.6], [-1, 0], [1, 0], [0, -1], [0, 1]];

// A list of {name, memory, bound, speed, low, high, notKnown, offloads, isBest}; `memory` in the unit of `limit`. `low` and
// `high` are null if too few measurements validate them, and `notKnown` are the words for such ends or for too wide ones.
export function plot(list, limit, { width, height, limitText, memoryTitle, speedTitle, size, rounded }) {
  const drawing = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-labelledby": "plot-title plot-text" });
  drawing.append(make("title", { id: "plot-title" }, "Speed against the memory of one GPU"));
  drawing.append(make("desc", { id: "plot-text" }, list.map((item) => sentence(item, size, rounded)).join("; ")));
  const most = { x: 1.08 * Math.max(limit, ...list.map((item) => item.bound)), y: 1.08 * Math.max(...list.map((item) => item.high ?? item.speed)) };
  const frame = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const x = (memory) => frame.left + (memory / most.x) * (frame.right - frame.left);
  const y = (speed) => frame.bottom - (speed / most.y) * (frame.bottom - frame.top);
  drawing.append(...axes(frame, most, x, y, memoryTitle, speedTitle));
  drawing.append(make("line", { x1: x(limit), x2: x(limit), y1: frame.top, y2: frame.bottom, class: "limit" }));
  drawing.append(make("text", { x: Math.min(x(limit), frame.right), y: frame.top - 8, class: "end" }, limitText));
  const points = list.map((item) => ({ ...item, x: x(item.memory), y: y(item.speed) }));
  const taken = points.map((point) => around(point.x, point.y, 2 * RADIUS, 2 * RADIUS));
  taken.push({ left: x(limit) - 2, right: x(limit) + 2, top: frame.top, bottom: frame.bottom });
  const lines = points.flatMap((point) => errorAreas(point, x, y));
  // The recommended one is named first and drawn last.
  points.sort((one, other) => other.isBest - one.isBest);
  for (const point of points) {
    // A name crosses errors only where it has no other place; without one its point has a tooltip.
    point.place = freePlace(point, frame, [...taken, ...lines], taken) ?? freePlace(point, frame, taken, taken)
      ?? freePlace(point, frame, taken, []);
    if (point.place) taken.push(point.place.area, ...leaderAreas(point, point.place));
  }
  points.reverse();
  for (const point of points) drawing.append(errors(point, x, y));
  for (const point of points) drawing.append(...leader(point));
  for (const point of points) drawing.append(mark(point, sentence(point, size, rounded)));
  return drawing;
}

function sentence(item, size, rounded) {
  const kind = item.offloads ? "by its host" : "in 80 % of runs";
  const ends = item.high ? `, ${rounded(item.low)} to ${rounded(item.high)} ${kind}` : "";
  const interval = item.notKnown ? `, ${item.notKnown}` : ends;
  return `${item.name}: ${size(item.memory)} GiB, 90 % bound ${size(item.bound)} GiB, ${rounded(item.speed)} tokens/s${interval}`;
}

function axes(frame, most, x, y, memoryTitle, speedTitle) {
  const parts = [];
  const gib = 2 ** 30;
  for (const tick of ticks(most.x / gib, (frame.right - frame.left) / 70)) {
    const place = x(tick * gib);
    parts.push(make("line", { x1: place, x2: place, y1: frame.top, y2: frame.bottom, class: "grid" }));
    parts.push(make("text", { x: place, y: frame.bottom + 15, class: "middle" }, tick.toLocaleString("en")));
  }
  for (const tick of ticks(most.y, (frame.bottom - frame.top) / 45)) {
    const place = y(tick);
    parts.push(make("line", { x1: frame.left, x2: frame.right, y1: place, y2: place, class: "grid" }));
    parts.push(make("text", { x: frame.left - 5, y: place + 4, class: "end" }, tick.toLocaleString("en")));
  }
  parts.push(make("text", { x: (frame.left + frame.right) / 2, y: frame.bottom + 34, class: "middle" }, memoryTitle));
  parts.push(make("text", { x: 2, y: frame.top - 8 }, speedTitle));
  return parts;
}

// Round numbers from 0 on, about `count` of them.
function ticks(most, count) {
  const raw = most / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, place) => Number((place * step).toPrecision(12)));
}

// The bound of memory to the right, and the interval of the speed; dashed for an offload, whose interval is that of hosts.
function errors(point, x, y) {
  const group = make("g", { class: point.offloads ? "error offload" : "error" });
  const right = x(point.bound);
  if (right > point.x) group.append(line(point.x, right, point.y, point.y), line(right, right, point.y - 4, point.y + 4));
  if (point.low === null) return group;
  const [top, bottom] = [y(point.high), y(point.low)];
  group.append(line(point.x, point.x, top, bottom));
  for (const end of [top, bottom]) group.append(line(point.x - 4, point.x + 4, end, end));
  return group;
}

function line(x1, x2, y1, y2) {
  return make("line", { x1, x2, y1, y2 });
}

function errorAreas(point, x, y) {
  const across = { left: point.x, right: x(point.bound), top: point.y - 2, bottom: point.y + 2 };
  if (point.low === null) return [across];
  return [across, { left: point.x - 2, right: point.x + 2, top: y(point.high), bottom: y(point.low) }];
}

// The line from a point to a name that is not next to it.
function leader({ x, y, place }) {
  if (!place || place.distance === CIRCLES[0]) return [];
  const end = leaderEnd({ x, y }, place.area);
  return [make("line", { x1: x, x2: end.x, y1: y, y2: end.y, class: "leader" })];
}

function leaderEnd({ x, y }, { left, right, top, bottom }) {
  return { x: Math.min(Math.max(x, left), right), y: Math.min(Math.max(y, top), bottom) };
}

// Small areas along the line to a name, from outside of the mark to the name.
function leaderAreas(point, { area, distance }) {
  if (distance === CIRCLES[0]) return [];
  const end = leaderEnd(point, area);
  const length = Math.hypot(end.x - point.x, end.y - point.y);
  const count = Math.max(Math.floor((length - 2 * RADIUS) / 4), 0);
  return Array.from({ length: count }, (_, place) => {
    const part = (2 * RADIUS + 4 * place) / length;
    return around(point.x + part * (end.x - point.x), point.y + part * (end.y - point.y), 2, 2);
  });
}

function mark(point, text) {
  const group = make("g", {});
  group.append(make("title", {}, text));
  const kind = `${point.offloads ? "offload" : "resident"}${point.isBest ? " best" : ""}`;
  group.append(make("circle", { cx: point.x, cy: point.y, r: point.isBest ? RADIUS + 1.5 : RADIUS, class: kind }));
  if (point.place) {
    const { left, right, bottom } = point.place.area;
    const name = make("text", { x: (left + right) / 2, y: bottom - 3, class: point.isBest ? "name best" : "name" }, point.name);
    group.append(name);
  }
  return group;
}

// The first place in the frame where a name covers nothing, and the line to it nothing of `others`; null if it has none.
function freePlace(point, frame, taken, others) {
  const width = point.name.length * LETTER + 4;
  for (const distance of CIRCLES) {
    for (const [right, down] of DIRECTIONS) {
      const x = point.x + right * distance + Math.sign(right) * (width / 2 - 3);
      const y = point.y + down * distance;
      const area = around(x, y, width, TEXT_HEIGHT);
      const isInside = area.left >= frame.left && area.right <= frame.right && area.top >= frame.top && area.bottom <= frame.bottom;
      if (!isInside || taken.some((other) => overlaps(area, other))) continue;
      const path = leaderAreas(point, { area, distance });
      if (!path.some((part) => others.some((other) => overlaps(part, other)))) return { area, distance };
    }
  }
  return null;
}

function around(x, y, width, height) {
  return { left: x - width / 2, right: x + width / 2, top: y - height / 2, bottom: y + height / 2 };
}

function overlaps(one, other) {
  return one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
}
