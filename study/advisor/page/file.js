// `study explain`: what a DeepSpeed or Accelerate file does, by line. Files are read here and go to Python.
import { at, call, made, madeName, quoted } from "./common.js";
import { lackText, packed, unpacked } from "./link.js";

// Python refuses what is larger.
const MAX_BYTES = 1_000_000;
const SEVERITIES = ["error", "warning", "note"];
const COUNTS = ["world_size", "micro_batch", "accumulation", "generated_tokens"];
const form = at("file-form");
const field = form.elements;
// Names of this view's values in a link.
const PREFIX = "explain.";
// An Accelerate file, and the JSON that it names.
const MOST_FILES = 8;
let newest = 0;
let chosen = [];

// The form's words are those of `study explain` about model and hardware; `ownModel` has its config.json. Return how a
// link has this view, and how it is opened.
export function connectFile(formWords, ownModel) {
  const ask = () => explain(given(), formWords(), ownModel());

  async function take(files) {
    // An Accelerate file may name a JSON that is given with it.
    chosen = [...files].sort((one, other) => /\.ya?ml$/i.test(other.name) - /\.ya?ml$/i.test(one.name));
    if (!chosen.length) return;
    field.text.value = await head(chosen[0]).text();
    await ask();
  }

  field.files.onchange = () => take(field.files.files);
  field.text.oninput = () => { chosen = []; };
  form.onsubmit = (event) => {
    event.preventDefault();
    ask();
  };
  const hasFiles = (event) => event.dataTransfer.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    at("explain").open = true;
    at("explain").scrollIntoView();
    take(event.dataTransfer.files);
  });

  return {
    inLink,
    async open(link) {
      if (!link.has(`${PREFIX}file`)) return;
      at("explain").open = true;
      at("explain").scrollIntoView();
      for (const name of COUNTS) field[name].value = link.get(`${PREFIX}${name}`) ?? "";
      try {
        await take(filesOf(await unpacked(link.get(`${PREFIX}file`), "file")));
      } catch ({ message }) {
        refuse(`${message}. To fix it: drop the file here, or paste its text.`);
      }
    },
  };
}

// The files that the form has; a pasted text is one of them.
function given() {
  if (chosen.length) return chosen;
  const text = field.text.value;
  return [new File([text], text.trimStart().startsWith("{") ? "pasted.json" : "pasted.yaml")];
}

// What a link has of this view, in so many characters, and what it lacks, in words. An error says why it has nothing.
async function inLink(room) {
  const texts = [];
  for (const file of given()) texts.push([file.name, await exactText(file)]);
  const code = await packed(JSON.stringify(Object.fromEntries(texts)), room);
  const counts = COUNTS.filter((name) => field[name].value).map((name) => [`${PREFIX}${name}`, field[name].value]);
  return { values: [[`${PREFIX}file`, code], ...counts], lacks: lackText(code, "the file") };
}

async function exactText(file) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`A link has text alone, and ${file.name} is another file: send the file itself.`);
  }
}

// The files of a link: names with texts. Anything else, and a name that is a path, is not from this page.
function filesOf(text) {
  let entries = [];
  try {
    const parsed = JSON.parse(text);
    if (typeof parsed === "object" && !Array.isArray(parsed)) entries = Object.entries(parsed);
  } catch { /* It has no entries. */ }
  const isFile = ([name, content]) => /^[^/\\\p{Cc}]{1,200}$/u.test(name) && !/^\.+$/.test(name) && typeof content === "string";
  if (!entries.length || entries.length > MOST_FILES || !entries.every(isFile)) throw new Error("the file of this link is damaged");
  return entries.map(([name, content]) => new File([content], name));
}

function head(file) {
  return file.slice(0, MAX_BYTES + 1);
}

function base64(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

// A name that is not taken for a flag or a home folder.
const argument = (name) => (/^[-~]/.test(name) ? `./${name}` : name);

// Forget the last answer; return the number of this question.
function begin(text) {
  newest += 1;
  delete form.dataset.done;
  at("explain-answer").hidden = true;
  at("explain-copied").textContent = "";
  at("explain-status").textContent = text;
  return newest;
}

function refuse(text) {
  form.dataset.done = String(begin(text));
}

async function explain(files, formWords, own) {
  const question = begin("reading ...");
  const status = at("explain-status");
  const words = [argument(files[0].name), ...formWords];
  for (const name of COUNTS) {
    if (field[name].value) words.push(`--${name}`, field[name].value);
  }
  at("explain-command").textContent = ["study", "explain", ...words.map(quoted)].join(" ");
  let answer;
  let text = "";
  try {
    const contents = [];
    for (const file of files) contents.push([file.name, await base64(head(file))]);
    text = await head(files[0]).text();
    if (own) words[1] = (await call(status, "keep_config", own.name, own.config)).folder;
    answer = await call(status, "explain", JSON.stringify(words), JSON.stringify(Object.fromEntries(contents)));
  } catch (error) {
    answer = { refused: error.message, fix: "run study explain on a machine" };
  }
  if (question !== newest) return;
  if (answer.refused) status.textContent = `${answer.refused}. To fix it: ${answer.fix}.`;
  else show(answer, text.split(/\r\n|\r|\n/));
  form.dataset.done = String(question);
}

function show({ first_line: verdict, subject, findings, peak, costs, costs_error: costsError, answers }, lines) {
  at("explain-status").textContent = verdict;
  at("explain-subject").textContent = subject.join("; ");
  at("explained").replaceChildren(findings.length ? findingsTable(findings, lines) : made("p", "Every setting takes effect."));
  at("explain-peak").textContent = sentence(peak);
  at("costs").hidden = !costs.length;
  at("costs").replaceChildren(...(costs.length ? [costsTable(costs)] : []));
  at("costs-error").textContent = costs.length ? sentence(costsError) : "";
  at("answers").replaceChildren(...answers.flatMap(({ question, short, because }) => [
    made("dt", question), made("dd", short), ...because.map((text) => {
      const reason = made("dd", text);
      reason.className = "reason";
      return reason;
    }),
  ]));
  at("explain-answer").hidden = false;
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}`;
}

// A table whose columns are named; those of `texts` are aligned to the left.
function table(titles, texts, rows) {
  const element = document.createElement("table");
  const head = element.createTHead().insertRow();
  for (const title of titles) {
    const cell = made("th", title);
    cell.scope = "col";
    cell.className = texts.includes(title) ? "text" : "";
    head.append(cell);
  }
  element.createTBody().append(...rows);
  return element;
}

function findingsTable(findings, lines) {
  const order = (finding) => SEVERITIES.indexOf(finding.severity) * MAX_BYTES + finding.line;
  const sorted = [...findings].sort((one, other) => order(one) - order(other));
  // Most files have no finding with a fix.
  const texts = ["", "setting", "what it does", ...(findings.some(({ fix }) => fix) ? ["fix"] : [])];
  return table(["line", ...texts], texts, sorted.map((finding) => {
    const line = document.createElement("tr");
    line.className = finding.severity;
    const number = made("th", finding.line);
    number.scope = "row";
    line.append(number);
    const [kind] = finding.id.split("/");
    const contents = [made("span", kind), madeName(finding.key), made("span", finding.message), made("span", finding.fix)];
    for (const content of contents.slice(0, texts.length)) {
      const cell = line.insertCell();
      cell.className = "text";
      cell.append(content);
    }
    // A finding about what the file leaves out has the line of its section, or the first.
    const source = made("code", (lines[finding.line - 1] ?? "").trim().slice(0, 120));
    source.className = "source";
    if (source.textContent.includes(finding.key.split(".").at(-1))) line.cells[2].append(source);
    return line;
  }));
}

// Rows of device, host, NVMe and setting, in which the setting comes last.
function costsTable(costs) {
  const title = costs.some((row) => row.at(-1).endsWith("*")) ? "setting (*: a default, not in the file)" : "setting";
  const places = ["GPU", "host", "NVMe"];
  const filled = places.map((_, place) => costs.some((row) => row[place] !== "-"));
  const rows = costs.map((row) => {
    const line = document.createElement("tr");
    const setting = made("th", "");
    setting.scope = "row";
    setting.append(madeName(row.at(-1)));
    line.append(setting);
    for (const text of row.slice(0, -1).filter((_, place) => filled[place])) line.insertCell().textContent = text;
    return line;
  });
  return table([title, ...places.filter((_, place) => filled[place])], [title], rows);
}
