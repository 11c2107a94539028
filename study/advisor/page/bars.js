// A drawing of the memory of one GPU by part, one bar a strategy.
const SPACE = "http://www.w3.org/2000/svg";
const LINE = 22;
// The ends of names and sizes, which are columns before the bars, and the beginning of the bars.
const NAMES = 138;
const SIZES = 204;
const LEFT = 212;
const RIGHT = 12;
// The width of a letter, at most.
export const LETTER = 6.7;

export const PARTS = [
  "parameters", "gradients", "optimizer", "buffers", "activations", "logits", "attention", "context", "allocator", "fragmentation",
];

export function make(tag, attributes, text) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A list of {name, fits, parts, total, bound, label} in bytes; bars far beyond the limit are cut.
export function bars(list, limit, limitText, size, width) {
  const most = Math.max(1.15 * limit, ...list.map((item) => Math.min(item.total, 2.2 * limit)));
  const end = width - RIGHT;
  const scale = (end - LEFT) / most;
  const bottom = list.length * LINE;
  const drawing = make("svg", { viewBox: `0 0 ${width} ${bottom + 20}`, width, height: bottom + 20, role: "img" });
  const texts = list.map((item) => `${item.name} ${item.label}${item.fits ? "" : ", does not fit"}`);
  drawing.append(make("title", {}, `Predicted memory of one GPU, ${limitText}: ${texts.join(", ")}`));
  const x = LEFT + limit * scale;
  // The limit crosses bars that do not fit.
  list.forEach((item, place) => drawing.append(bar(item, place * LINE, scale, size, end), ...labels(item, place * LINE)));
  drawing.append(make("line", { x1: x, x2: x, y1: 0, y2: bottom, class: "limit" }));
  drawing.append(make("text", { x: SIZES, y: bottom + 15, class: "end" }, "predicted peak of one GPU"));
  const middle = Math.min(x, width - (limitText.length * LETTER) / 2);
  drawing.append(make("text", { x: middle, y: bottom + 15, class: "middle" }, limitText));
  return drawing;
}

function bar(item, y, scale, size, end) {
  const group = make("g", item.fits ? {} : { class: "out" });
  let x = LEFT;
  for (const part of PARTS) {
    const width = Math.min((item.parts[part] ?? 0) * scale, end - x);
    if (width <= 0) continue;
    const piece = make("rect", { x, y: y + 3, width, height: LINE - 6, class: part });
    piece.append(make("title", {}, `${item.name}, ${part}: ${size(item.parts[part])} GiB`));
    group.append(piece);
    x += width;
  }
  const bound = Math.min(LEFT + item.bound * scale, end);
  if (bound > x) group.append(...whisker(x, bound, y + LINE / 2));
  if (LEFT + item.total * scale > end) {
    // Its end is beyond the drawing.
    for (const place of [end - 18, end - 12]) group.append(make("line", { x1: place - 3, x2: place + 3, y1: y + LINE - 2, y2: y + 2, class: "cut" }));
  }
  return group;
}

function whisker(from, to, y) {
  return [
    make("line", { x1: from, x2: to, y1: y, y2: y, class: "bound" }), make("line", { x1: to, x2: to, y1: y - 5, y2: y + 5, class: "bound" }),
  ];
}

// The name and the size before a bar. After it the size would be taken for that of the bound.
function labels(item, y) {
  const kind = item.fits ? "end" : "end quiet";
  return [
    make("text", { x: NAMES, y: y + 15, class: kind }, item.name),
    make("text", { x: SIZES, y: y + 15, class: `${kind} label` }, item.label),
  ];
}

// The mark of the 90 % bound, for a legend.
export function boundMark() {
  const drawing = make("svg", { viewBox: "0 0 22 12", width: 22, height: 12, "aria-hidden": "true" });
  drawing.append(...whisker(1, 20, 6));
  return drawing;
}

// A drawing as a file of its own: the colours that the page's style gives are written into it.
export function svgText(drawing) {
  const copy = drawing.cloneNode(true);
  const originals = drawing.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, place) => {
    const style = getComputedStyle(originals[place]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "paint-order", "font-weight", "opacity", "text-anchor"]) {
      element.setAttribute(name, style.getPropertyValue(name));
    }
  });
  copy.setAttribute("xmlns", SPACE);
  copy.setAttribute("width", drawing.viewBox.baseVal.width);
  copy.setAttribute("font-family", "sans-serif");
  copy.setAttribute("font-size", "12");
  return new XMLSerializer().serializeToString(copy);
}
