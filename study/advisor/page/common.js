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

let hasAnswered = false;

export const isStarted = () => hasAnswered;

// Where the newest question shows what Python does; it may start before the first one.
let place = null;
let lastText = "";

function say(text) {
  lastText = text;
  if (place) place.textContent = text;
}

export function start() {
  send ??= connect(say, (data) => {
    hasAnswered = true;
    listeners.get(data.id)?.(data);
  });
}

export function post(status, message, listener) {
  place = status;
  start();
  if (!hasAnswered) say(lastText);
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
