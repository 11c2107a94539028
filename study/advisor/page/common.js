// What the parts of the page share: elements, and Python, which starts with the first question.
import { connect } from "./transport.js";

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

let send = null;
let last = 0;
const listeners = new Map();

export const isStarted = () => send !== null;

// Where the newest question shows what Python does.
let place = null;

export function post(status, message, listener) {
  place = status;
  send ??= connect((text) => { place.textContent = text; }, (data) => listeners.get(data.id)?.(data));
  last += 1;
  listeners.set(last, listener);
  send({ id: last, ...message });
  return last;
}

export function call(status, name, ...given) {
  return new Promise((done, fail) => post(status, { call: name, words: given }, (data) => {
    if (data.failed) fail(new Error(data.failed));
    else done(JSON.parse(data.answer));
  }));
}
