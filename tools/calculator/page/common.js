// What the parts of the page share: elements, and Python, which starts with the first question.
export const at = (id) => document.getElementById(id);

// Text is only ever set as textContent.
export function made(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

export function quoted(word) {
  return /^[\w.,:/=+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

let worker = null;
let last = 0;
const listeners = new Map();

export const isStarted = () => worker !== null;

// Where the newest question shows what Python does.
let place = null;

function startPython() {
  if (worker) return;
  place.textContent = "Python is loading: 14 MB once, 7 where the server compresses ...";
  worker = new Worker("worker.js", { type: "module" });
  worker.onerror = () => { place.textContent = "Python does not start in this browser."; };
  worker.onmessage = ({ data }) => {
    if (data.id === 0 && data.failed) place.textContent = `Python does not start in this browser: ${data.failed}`;
    else listeners.get(data.id)?.(data);
  };
}

export function post(status, message, listener) {
  place = status;
  startPython();
  last += 1;
  listeners.set(last, listener);
  worker.postMessage({ id: last, ...message });
  return last;
}

export function call(status, name, ...given) {
  return new Promise((done, fail) => post(status, { call: name, words: given }, (data) => {
    if (data.failed) fail(new Error(data.failed));
    else done(JSON.parse(data.answer));
  }));
}
