// The page: its form, the answers of Python, and what one takes away. Text is only ever set as textContent.
import { bars, boundMark, PARTS, svgText } from "./bars.js";
import { at, call, isStarted, made, madeItem, post, quoted, start } from "./common.js";
import { connectFile } from "./file.js";
import { copyLink, lackText, MOST_CHARACTERS, packed, unpacked } from "./link.js";
import { plot } from "./plot.js";
import { connectReleases } from "./releases.js";
import { header } from "./transport.js";

const GIB = 2 ** 30;
const form = at("form");
const fields = [...form.elements].filter((field) => field.name);
const DEFAULTS = { model: "llama-3.1-8b", nodes: "1", gpus: "8", device: "H100" };
// Fields that are flags of `study advise` by the same name.
const FLAGS = ["host_memory", "host_gb_per_s", "nvme_gb_per_s", "nvme_path", "bus_gb_per_s", "network_gb_per_s", "seq_length", "global_batch_size", "micro_batch", "accumulation", "tensor_parallel", "optimizer",
  "precision", "gradient_checkpointing", "attn_implementation", "loss_kernel", "train_tokens", "price_per_gpu_hour"];
// Of these `study explain` has another form, or none; the file's form has its own micro-batch and accumulation, and the
// file sets tensor-parallel groups.
const OTHERWISE = ["nvme_path", "global_batch_size", "micro_batch", "accumulation", "tensor_parallel", "precision", "gradient_checkpointing", "train_tokens", "price_per_gpu_hour"];
const USUAL = { optimizer: "adamw", gradient_checkpointing: "auto", attn_implementation: "sdpa" };

// Fields that change an answer only with these values of others: else they are hidden, and in no command and no link.
const offloads = () => value("optimizer") === USUAL.optimizer;
const hasAdapters = () => Boolean(value("peft"));
const hasSeveral = () => Number(value("gpus")) > 1 || Number(value("nodes")) > 1;
const APPLIES = {
  host_gb_per_s: offloads, nvme_gb_per_s: offloads, nvme_path: offloads,
  bus_gb_per_s: hasSeveral, tensor_parallel: hasSeveral,
  network_gb_per_s: () => Number(value("nodes")) > 1,
  lora_rank: hasAdapters, lora_targets: hasAdapters,
};

// --- the question

function value(name) {
  return form.elements[name].value.trim();
}

const applies = (name) => APPLIES[name]?.() ?? true;

function showFields() {
  for (const name of Object.keys(APPLIES)) form.elements[name].closest("label").hidden = !applies(name);
}

function words() {
  const nodes = Number(value("nodes")) > 1 ? `${value("nodes")}x` : "";
  const found = [value("config") ? "config.json" : value("model"), "--hardware", `${nodes}${value("gpus")}x${value("device")}`];
  return [...found, ...flags(FLAGS)];
}

function flags(names) {
  const found = [];
  for (const name of names) {
    if (value(name) && value(name) !== USUAL[name] && applies(name)) found.push(`--${name}`, value(name));
  }
  if (value("peft")) {
    found.push("--peft", "lora");
    for (const name of ["lora_rank", "lora_targets"]) {
      if (value(name)) found.push(`--${name}`, value(name));
    }
  }
  const quantization = { qlora: "4bit", lora8: "8bit" }[value("peft")];
  if (quantization) found.push("--quantization", quantization);
  if (value("with_reference")) found.push("--with_reference");
  if (value("compile")) found.push("--compile");
  return found;
}

// The words of `study explain` about the same model, hardware and training, after those of the file.
function explainWords() {
  const [model, , hardware] = words();
  const found = [model, "--hardware", hardware, ...flags(FLAGS.filter((name) => !OTHERWISE.includes(name)))];
  if (value("precision")) found.push("--precision", value("precision") === "fp32" ? "no" : value("precision"));
  if (value("gradient_checkpointing") === "on") found.push("--gradient_checkpointing");
  return found;
}

// The name that a model of one's own has in answers, and its config.json; null for a preset.
function ownModel() {
  const config = value("config");
  if (!config) return null;
  let name = "pasted";
  try {
    name = String(JSON.parse(config)._name_or_path ?? name).replace(/[^\w.-]+/g, "-");
  } catch { /* Python says what is wrong with it. */ }
  return { name, config };
}

// The address has what differs from the defaults, so that a link reproduces the question. Another version of the code may
// answer otherwise.
let linkVersion = null;

const usual = (field) => DEFAULTS[field.name] ?? field.options?.[0]?.value ?? "";

// What the link lacks, as a refusal; null if the form has all of it.
async function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  linkVersion = given.get("version");
  for (const field of fields) field.value = given.get(field.name) ?? usual(field);
  form.elements.config.value = "";
  showFields();
  const unknown = fields.find((field) => field.options && given.get(field.name) && field.value !== given.get(field.name));
  if (unknown) {
    unknown.value = usual(unknown);
    return { refused: `this link's ${unknown.name} is not in the list of this page`, fix: "choose one, and press Predict" };
  }
  if (!given.get("config")) return null;
  try {
    form.elements.config.value = await unpacked(given.get("config"), "config.json");
  } catch ({ message }) {
    return { refused: message, fix: "paste the config.json, and press Predict" };
  } finally {
    form.elements.config.closest("details").open = true;
  }
  return null;
}

// The address of the question, and with a view also of its file or releases; and what of both is too long for it.
async function address(view) {
  const changed = fields.filter((field) => field.name !== "config" && field.value !== usual(field) && applies(field.name));
  const values = changed.map((field) => [field.name, field.value]);
  const config = value("config") ? await packed(form.elements.config.value) : "";
  if (config) values.push(["config", config]);
  const more = await view?.inLink(MOST_CHARACTERS - config.length);
  const all = [...values, ...(more?.values ?? []), ["version", stored.version]];
  return { hash: `#${new URLSearchParams(all)}`, lacks: lackText(config, "config.json") + (more?.lacks ?? "") };
}

// --- the answer

let stored = { answers: [] };
let shown = { about: null, rows: new Map(), rank: null };
let current = 0;
// Whether Python has the whole answer to the newest question, later; null while only a stored answer is shown.
let computed = null;
let endComputed = () => {};

// Show the answer that was made with the page; return false if there is none to this question.
function showStored(asked, own) {
  const known = stored.answers.find((answer) => answer.words.join(" ") === asked.join(" "));
  if (!known || own) return false;
  shown = { about: known.about, rows: new Map(Object.entries(known.rows)), rank: known.rank, words: asked };
  show();
  return true;
}

function predict(asked = words(), own = ownModel()) {
  const fresh = { about: null, rows: new Map(), rank: null };
  clearDetails();
  showCommand(asked);
  document.body.dataset.done = "";
  computed = new Promise((done) => { endComputed = done; });
  // A stored answer stays until Python has the whole one.
  const isShown = showStored(asked, own);
  at("status").className = "";
  if (!isShown) at("status").textContent = isStarted() ? "comparing ..." : "";
  // How long Python loads is not known; then it counts strategies.
  at("progress").removeAttribute("value");
  at("progress").hidden = false;
  current = post(at("status"), { call: "compare", words: asked, ...own }, (data) => {
    if (data.id !== current) return;
    if (data.failed) return refuse({ refused: data.failed, fix: "run study advise on a machine" });
    if (data.about) {
      fresh.about = JSON.parse(data.about);
      if (fresh.about.refused) return refuse(fresh.about);
      if (!isShown) shown = fresh;
    } else if (data.row) {
      const row = JSON.parse(data.row);
      if (row.refused) return refuse(row);
      fresh.rows.set(data.strategy, row);
    } else if (data.rank) {
      fresh.rank = JSON.parse(data.rank);
      shown = fresh;
    }
    if (shown === fresh) show();
    if (fresh.rank) finish(true);
  });
}

function finish(isComputed) {
  document.body.dataset.done = String(current);
  endComputed(isComputed);
}

// Files and changes are Python's, which computes a stored answer first.
function whenComputed() {
  if (!computed) predict(shown.words, null);
  return computed;
}

function refuse({ refused, fix }) {
  at("status").className = "refused";
  at("status").textContent = `${refused}. To fix it: ${fix}.`;
  at("answer").textContent = "";
  at("progress").hidden = true;
  at("result").hidden = true;
  finish(false);
}

function clearDetails() {
  endComputed(false);
  computed = null;
  at("files").replaceChildren();
  at("changes").replaceChildren();
  at("what-if").hidden = true;
}

// Three digits, as in the sentences of the answer, also where the last ones are zero.
function withZeros(number) {
  return number.toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
}

function size(bytes) {
  return withZeros(bytes / GIB);
}

function rounded(number) {
  return number.toLocaleString("en", { maximumSignificantDigits: 3 });
}

function entries() {
  const names = shown.rank?.order ?? [...shown.rows.keys()];
  return names.map((name) => [name, shown.rows.get(name)]).filter(([, row]) => row);
}

// The rows of the table, as in the document of `study advise --json`; tests ask for them.
export function answer() {
  return entries().map(([, row]) => row);
}

function show() {
  const { about, rank, rows } = shown;
  at("result").hidden = rows.size === 0;
  at("progress").hidden = Boolean(rank);
  at("progress").max = about.names.length;
  at("progress").value = rows.size;
  const question = `${about.model}, ${rounded(about.parameters / 1e9)} B parameters, on ${about.hardware}: `
    + `${size(about.usable_bytes)} GiB usable of a GPU, ${about.sequence_length} tokens a sample, ${about.global_batch} samples a step, `
    + `${about.precision}, ${about.optimizer}`;
  const versions = linkVersion && linkVersion !== stored.version
    ? [`the link is of version ${linkVersion.slice(0, 20)}, these figures of ${stored.version}`] : [];
  const origin = shown.words ? ["stored with the page: its files and changes are computed when they are asked for"] : [];
  at("status").className = "";
  announce("status", rank ? [question, ...about.notes, ...versions, ...origin].join("; ")
    : `${question}; comparing ...`);
  const best = rank?.recommended ? `Use ${rank.recommended}: ` : "";
  announce("answer", rank ? `${best}${rank.how_sure}` : "");
  at("notes").replaceChildren(...(rank?.notes ?? []).map(madeItem));
  drawBars();
  drawPlot();
  drawTable();
  at("what-if").hidden = !rank;
  at("what-if").textContent = rank && !rank.recommended ? "What would make it fit?" : "What would change it?";
}

// A screen reader says each text that is set, also the same one again.
function announce(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function showCommand(asked = words()) {
  at("command").textContent = ["study", "advise", ...asked.map(quoted)].join(" ");
}

function drawBars() {
  const list = entries().map(([name, row]) => ({
    name, fits: row.fits, parts: row.device_parts, total: row.device_bytes, bound: row.bound_bytes, label: `${size(row.device_bytes)} GiB`,
  }));
  const width = Math.max(340, Math.min(at("bars").clientWidth, 1250));
  at("bars").replaceChildren(bars(list, shown.about.usable_bytes, `usable ${size(shown.about.usable_bytes)} GiB`, size, width));
  at("legend").replaceChildren(...PARTS.map((part) => {
    const item = made("li", "");
    item.className = part;
    item.append(made("span", part));
    return item;
  }));
  const bound = made("li", "");
  bound.className = "mark";
  bound.append(boundMark(), made("span", "90 % bound of the peak"));
  at("legend").append(bound);
}

// The ends of the speed: of 80 % of runs, and of an offload from the slowest host to the fastest.
function speeds(row) {
  const [low, high] = row.speed_ends ?? [null, null];
  return { low, high };
}

const span = (row, ends, text) => row.not_known ?? (ends ? ends.map(text).join(" to ") : "-");

let drawnWidth = 0;

function drawPlot() {
  const list = entries().filter(([, row]) => row.fits).map(([name, row]) => ({
    name, memory: row.device_bytes, bound: row.bound_bytes, speed: row.tokens_per_s, offloads: row.offloads, notKnown: row.not_known,
    isBest: name === shown.rank?.recommended, ...speeds(row),
  }));
  at("speeds").hidden = list.length === 0;
  if (!list.length) return;
  drawnWidth = at("plot").clientWidth;
  const width = Math.max(300, Math.min(drawnWidth, 1250));
  const limit = shown.about.usable_bytes;
  at("plot").replaceChildren(plot(list, limit, {
    width, height: Math.round(Math.max(380, Math.min(0.45 * width, 460))), limitText: `usable ${size(limit)} GiB`, size, rounded,
    memoryTitle: "predicted peak of one GPU, GiB", speedTitle: "tokens/s, all GPUs",
  }));
}

new ResizeObserver(() => {
  if (!shown.about || at("plot").clientWidth === drawnWidth) return;
  drawBars();
  drawPlot();
}).observe(at("plot"));

const COLUMNS = ["strategy", "micro-batch", "accumu\u00adlation", "check\u00adpointing", "peak GiB", "90 % bound", "tokens/s, all GPUs", "80 % of runs, ~ by host",
  "sent a step and GPU, GB", "host GiB", "NVMe GiB", "remark", "files"];
// In the currency of the price that was asked with; without a price there is no such column.
const COSTS = ["cost of 1 M tokens", "range of the cost"];

const hasCosts = () => entries().some(([, row]) => row.cost_per_million_tokens !== null);
const columns = () => (hasCosts() ? [...COLUMNS.slice(0, -2), ...COSTS, ...COLUMNS.slice(-2)] : COLUMNS);

function cells(name, row) {
  const speed = row.fits ? `${row.offloads ? "~ " : ""}${rounded(row.tokens_per_s)}` : "-";
  return [
    row.fits ? row.micro_batch : "-", row.fits ? row.accumulation : "-", row.gradient_checkpointing ? "yes" : "no",
    size(row.device_bytes), size(row.bound_bytes), speed, span(row, row.speed_ends, rounded),
    rounded(row.sent_bytes / 1e9), size(row.host_bytes_per_node.value),
    row.nvme_bytes_per_node ? size(row.nvme_bytes_per_node) : "-",
    ...(hasCosts() ? [row.fits ? withZeros(row.cost_per_million_tokens) : "-", span(row, row.cost_ends, withZeros)] : []),
  ];
}

// Columns whose rows have no error of their own.
const ERRORS = { "sent a step and GPU, GB": "sent", "host GiB": "host", "NVMe GiB": "nvme" };

function drawTable() {
  const { errors } = shown.about;
  at("errors").textContent = `Errors below names of columns: bytes sent, ${errors.sent.of}; host, ${errors.host.of}; NVMe, ${errors.nvme.of}.`;
  const head = document.createElement("thead");
  const titles = head.insertRow();
  for (const title of columns()) {
    const cell = made("th", title);
    if (ERRORS[title]) cell.append(made("small", errors[ERRORS[title]].size));
    cell.scope = "col";
    titles.append(cell);
  }
  for (const place of [0, -2]) [...titles.cells].at(place).className = "text";
  const body = document.createElement("tbody");
  for (const [name, row] of entries()) {
    const line = body.insertRow();
    line.className = name === shown.rank?.recommended ? "best" : row.fits ? "" : "out";
    const first = made("th", name);
    first.scope = "row";
    line.append(first);
    for (const text of cells(name, row)) {
      const cell = line.insertCell();
      cell.textContent = text;
      if (text === row.not_known) cell.className = "words";
    }
    const remark = line.insertCell();
    remark.className = "text";
    remark.textContent = shown.rank ? shown.rank.remarks[name] : row.fits ? "" : row.why;
    const place = line.insertCell();
    if (shown.rank) {
      const button = made("button", "files");
      button.type = "button";
      button.setAttribute("aria-label", `files of ${name}`);
      button.onclick = () => showFiles(name);
      place.append(button);
    }
  }
  at("table").className = hasCosts() ? "priced" : "";
  at("table").replaceChildren(head, body);
}

// --- what one takes away

function save(name, text, type) {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A text that the keyboard scrolls.
function block(name, text) {
  const element = made("pre", text);
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  element.setAttribute("aria-label", name);
  return element;
}

async function showFiles(name) {
  const isComputed = whenComputed();
  at("files").replaceChildren(made("p", `making the files of ${name} ...`));
  at("files").firstChild.scrollIntoView({ block: "nearest" });
  if (!await isComputed) {
    at("files").replaceChildren();
    return;
  }
  const found = await call(at("status"), "files", name);
  if (found.refused) {
    at("files").replaceChildren(made("p", `${found.refused}. To fix it: ${found.fix}.`));
    return;
  }
  const where = "Save them in one folder, and launch in it: the Accelerate file names the JSON by its name alone.";
  const parts = [made("h2", `Files of ${name}`), made("p", where), block("commands", `${found.launch}\n${found.predict}`)];
  for (const [file, text] of Object.entries(found.texts)) {
    const button = made("button", `Save ${file}`);
    button.type = "button";
    button.onclick = () => save(file, text, "text/plain");
    parts.push(button, block(file, text));
  }
  at("files").replaceChildren(...parts);
  // The next Tab is at the first file, far below the table.
  at("files").querySelector("pre").focus({ preventScroll: true });
  at("files").firstChild.scrollIntoView();
}

at("what-if").onclick = async () => {
  const isComputed = whenComputed();
  at("what-if").disabled = true;
  at("changes").replaceChildren(made("li", "comparing other hardware and lengths ..."));
  let answer;
  if (!await isComputed) {
    at("what-if").disabled = false;
    at("changes").replaceChildren();
    return;
  }
  try {
    answer = await call(at("status"), "changes");
    if (!answer.refused) answer.lines = (await call(at("status"), "what_ifs")).lines;
  } catch (error) {
    answer = { refused: error.message, fix: "run study advise on a machine" };
  }
  at("what-if").disabled = false;
  at("changes").replaceChildren(...changeTexts(answer).map((text) => made("li", text)));
};

function changeTexts({ refused, fix, changes, optimizer_on_host: offload, lines }) {
  if (refused) return [`${refused}. To fix it: ${fix}.`];
  const texts = changes.length ? changes : ["nothing of: more or fewer GPUs, a slower network, longer samples"];
  return [...texts, ...lines, ...(offload ? [offload] : [])];
}

async function copy(place, view) {
  try {
    const { hash, lacks } = await address(view);
    linkVersion = null;
    at(place).textContent = await copyLink(hash, lacks);
  } catch ({ message }) {
    at(place).textContent = message;
  }
}

at("copy-link").onclick = () => copy("status", null);
at("copy-explain").onclick = () => copy("explain-copied", views.explain);
at("copy-releases").onclick = () => copy("releases-copied", views.releases);

at("save-csv").onclick = () => {
  const plain = (text) => `"${String(text).replaceAll("\u00ad", "").replaceAll("\u00a0", " ").replaceAll('"', '""')}"`;
  const { errors } = shown.about;
  const titles = columns().slice(0, -1).map((title) => (ERRORS[title] ? `${title} (${errors[ERRORS[title]].size})` : title));
  const lines = entries().map(([name, row]) => [name, ...cells(name, row), shown.rank?.remarks[name] ?? row.why]);
  const text = [titles, ...lines].map((line) => line.map(plain).join(",")).join("\n");
  save("strategies.csv", `${text}\n`, "text/csv");
};

at("save-svg").onclick = () => save("memory.svg", svgText(at("bars").firstChild), "image/svg+xml");
at("save-plot").onclick = () => save("speed.svg", svgText(at("plot").firstChild), "image/svg+xml");

// Python loads while the question is typed.
form.addEventListener("input", start, { once: true });
form.addEventListener("input", showFields);

form.onsubmit = async (event) => {
  event.preventDefault();
  linkVersion = null;
  predict();
  at("status").scrollIntoView({ block: "nearest" });
  history.pushState(null, "", (await address(null)).hash);
};

// Show what the address asks; Python is asked only for what is not stored. A link that lacks something asks nothing: its
// answer would be that of another model. Tests begin with it, too.
export const open = () => read(() => showStored(words(), ownModel()) || predict());

async function read(answerQuestion) {
  current = 0;
  clearDetails();
  const refusal = await readAddress();
  showCommand();
  if (refusal) refuse(refusal);
  else answerQuestion();
  const link = new URLSearchParams(location.hash.slice(1));
  views.releases?.open(link);
  // Its answer would be that of another model, too.
  if (!refusal) views.explain.open(link);
}

onpopstate = () => read(() => predict());

// What else the page shows, and a link may have.
const views = { explain: connectFile(explainWords, ownModel), releases: null };

// --- start: the answers that were made with the page are shown before Python is there

if (header) at("place").textContent = header;
stored = await (await fetch("stored.json")).json();
at("models").append(...stored.models.map((name) => new Option(name)));
views.releases = connectReleases(stored);
form.elements.device.append(...stored.devices.map((name) => new Option(name)));
await open();
document.body.dataset.started = "yes";
