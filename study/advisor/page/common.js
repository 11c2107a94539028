// What the parts of the page share: elements, and Python, which starts with the first question.
import { connect } from "./transport.js";

export const at = (id) => document.getElementById(id);

// Text is only ever set as textContent.
export function made(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

// A name that a line breaks after its parts.
export function madeName(text) {
  const element = document.createElement("code");
  const parts = String(text).split(/(?<=[_.=])/);
  element.append(...parts.flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part])));
  return element;
}

// A list item in which the words between backticks are code.
export function madeItem(text) {
  const element = document.createElement("li");
  element.append(...text.split("`").map((part, place) => (place % 2 ? made("code", part) : part)));
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

// What the status says before the call is there again after it.
export function call(status, name, ...given) {
  const before = status.textContent;
  return new Promise((done, fail) => post(status, { call: name, words: given }, (data) => {
    if (status.textContent === lastText) status.textContent = before;
    if (data.failed) fail(new Error(data.failed));
    else done(JSON.parse(data.answer));
  }));
}
